"""An exception that is expected on some ranks and on no other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch.distributed as dist


@contextlib.contextmanager
def raises_on(
    expected: type[BaseException] | tuple[type[BaseException], ...] = Exception,
    *,
    ranks: int | Iterable[int],
    match: str | None = None,
) -> Iterator[pytest.ExceptionInfo[Any] | None]:
    """Assert that a block raises on these ranks of the default group, and on no other.

    Args:
        expected: The exception, or several.
        ranks: Where it is raised.
        match: A regular expression that is searched for in its text.

    Yields:
        What `pytest.raises` yields there; None on the other ranks, where an exception passes through.

    Raises:
        Failed: On a rank of ``ranks`` where nothing is raised.
    """
    if dist.get_rank() not in ([ranks] if isinstance(ranks, int) else list(ranks)):
        yield None
        return
    with pytest.raises(expected, match=match) as info:
        yield info
