"""Asserts that a block raises an exception on some ranks and on no other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from zeroshard_testing.rank_values import rank_and_world_size


@contextlib.contextmanager
def raises_on(
    expected: type[BaseException] | tuple[type[BaseException], ...] = Exception,
    *,
    ranks: int | Iterable[int],
    match: str | None = None,
) -> Iterator[pytest.ExceptionInfo[Any] | None]:
    """Assert that a block raises on these ranks of the default group (of the test, if it has none), and on no other.

    Args:
        expected: The exception type, or a tuple of types.
        ranks: The ranks on which it is raised.
        match: A regular expression that must match a part of the exception's text.

    Yields:
        The value of `pytest.raises` on these ranks; None on the other ranks, where an exception propagates.

    Raises:
        Failed: If the block does not raise on a rank of ``ranks``.
        ValueError: If ``ranks`` is empty or names a rank that does not exist.
    """
    named = [ranks] if isinstance(ranks, int) else list(ranks)
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else rank_and_world_size()
    if not named or not set(named) <= set(range(world_size)):
        raise ValueError(f"raises_on: ranks must be some of the {world_size} ranks of the group, not {named}")
    if rank not in named:
        yield None
        return
    with pytest.raises(expected, match=match) as info:
        yield info
