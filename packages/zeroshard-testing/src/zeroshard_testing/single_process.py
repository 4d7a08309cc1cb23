"""Checks that training on several ranks has the same result as in a single process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zeroshard_testing.calls import run_on_ranks
from zeroshard_testing.replicas import bits_of, coordinates

TrainFunction = Callable[[int, int], "Mapping[str, torch.Tensor] | Iterable[torch.Tensor] | torch.nn.Module"]


def assert_matches_single_process(
    train_fn: TrainFunction,
    ranks: int | Iterable[int] = 2,
    *,
    backend: str = "gloo",
    rtol: float = 0.0,
    atol: float = 0.0,
    timeout: float | None = None,
) -> None:
    """Assert that a training function returns the same tensors on every rank as in a single process.

    Call it in an ordinary test, not in one marked with ``ranks``. It runs the function in a process group of one rank,
    then on the ranks, with the default process group initialized in both cases, and compares on each rank. The function
    must give each rank its part of every batch.

    Args:
        train_fn: A function of ``rank`` and ``world_size`` that returns a module, a mapping of names to tensors, or
            tensors. `run_on_ranks` must be able to send it.
        ranks: The number of ranks, or several numbers, which are tested one after the other.
        backend: The backend, as for ``@pytest.mark.ranks``.
        rtol: Relative tolerance. If both tolerances are 0, every bit must be equal.
        atol: Absolute tolerance, in units of the tensors.
        timeout: Seconds that each run may take; the timeout of a test by default.

    Raises:
        RanksFailure: If a run fails, or if a tensor differs on a rank: the report names both, and where they differ.
        RuntimeError: If the caller is a rank.
        TypeError: If the function cannot be sent.
    """
    __tracebackhide__ = True
    name = getattr(train_fn, "__qualname__", None)
    [expected] = run_on_ranks(_trained, 1, train_fn, backend=backend, timeout=timeout, title=name)
    for count in [ranks] if isinstance(ranks, int) else ranks:
        run_on_ranks(_compare, count, train_fn, expected, rtol, atol, backend=backend, timeout=timeout, title=name)


def difference(here: torch.Tensor, there: torch.Tensor, rtol: float, atol: float) -> str | None:
    """Describe how a tensor differs from the expected one; None if it is equal. Without tolerance, compare bits."""
    if here.shape != there.shape or here.dtype != there.dtype:
        return f"it is {here.dtype} of shape {tuple(here.shape)} instead of {there.dtype} of shape {tuple(there.shape)}"
    if torch.equal(bits_of(here), bits_of(there)):
        return None
    if (rtol or atol) and torch.allclose(here, there, rtol, atol, equal_nan=True):
        return None
    wide = [tensor.to(torch.complex128 if tensor.is_complex() else torch.float64) for tensor in (here, there)]
    apart = (wide[0] - wide[1]).abs().nan_to_num(math.inf).reshape(-1)
    place = int(apart.argmax())
    values = here.reshape(-1)[place].item(), there.reshape(-1)[place].item()
    where = f"largest difference {apart[place].item():g} at {coordinates(place, here.shape)}"
    return f"{where}: {values[0]!r} instead of {values[1]!r}"


def _compare(train_fn: TrainFunction, expected: dict[str, torch.Tensor], rtol: float, atol: float) -> None:
    """Train on this rank and compare; runs on every rank."""
    __tracebackhide__ = True
    found = _trained(train_fn)
    if list(found) != list(expected):
        text = f"the function returned tensors {list(found)}, but {list(expected)} in a single process"
        pytest.fail(text, pytrace=False)
    for name, here in found.items():
        text = difference(here, expected[name], rtol, atol) or ""
        if text:
            place = f"tensor {name!r} on rank {dist.get_rank()} of {dist.get_world_size()}"
            pytest.fail(f"{place} differs from the single process's: {text}", pytrace=False)


def _trained(train_fn: TrainFunction) -> dict[str, torch.Tensor]:
    """Train on this rank, and return the tensors by name."""
    __tracebackhide__ = True
    result: Any = train_fn(dist.get_rank(), dist.get_world_size())
    if isinstance(result, torch.nn.Module):
        result = result.state_dict()
    named = result.items() if isinstance(result, Mapping) else enumerate(result)
    found = {str(key): tensor for key, tensor in named}
    for key, tensor in found.items():
        if not isinstance(tensor, torch.Tensor):
            name = getattr(train_fn, "__qualname__", "the function")
            raise TypeError(f"{name} returned a {type(tensor).__name__} for {key!r}; it must return tensors")
    return {key: tensor.detach().cpu().clone() for key, tensor in found.items()}
