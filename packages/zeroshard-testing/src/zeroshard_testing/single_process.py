"""Checks that training on several ranks ends where one process alone does."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from zeroshard_testing.importing import import_test_module
from zeroshard_testing.rank_values import RankValue
from zeroshard_testing.session import RanksSession, running_session
from zeroshard_testing.spec import RanksSpec

TrainFunction = Callable[[int, int], "Mapping[str, torch.Tensor] | Iterable[torch.Tensor] | torch.nn.Module"]


def assert_matches_single_process(
    train_fn: TrainFunction,
    ranks: int | Iterable[int] = 2,
    *,
    backend: str = "gloo",
    rtol: float = 0.0,
    atol: float = 0.0,
    timeout: float = 60.0,
) -> None:
    """Assert that a training function ends with the same tensors on every rank as in one process alone.

    It is called in an ordinary test, not in one marked with ``ranks``. It runs the function once in a process group of
    one, then on the ranks, with the default process group initialised in either case, and compares on each rank. The
    function gives each rank its part of every batch.

    Args:
        train_fn: A function of its module that takes ``rank`` and ``world_size`` and returns a module, a mapping of
            names to tensors, or tensors.
        ranks: Number of ranks, or several numbers, tried one after the other.
        backend: As for ``@pytest.mark.ranks``.
        rtol: Relative tolerance; with both tolerances 0 every bit must be equal.
        atol: Absolute tolerance, in units of the tensors.
        timeout: Seconds that each run may take.

    Raises:
        RanksFailure: If a run fails, or if a tensor differs on a rank: the report names both, and where they differ.
        RuntimeError: If it is called on a rank, or outside a pytest run with this plugin.
        TypeError: If the function cannot be found from its module.

    Example:
        >>> def train(rank, world_size):
        ...     ...
        >>> def test_training():  # doctest: +SKIP
        ...     assert_matches_single_process(train, ranks=(2, 4))
    """
    __tracebackhide__ = True
    session = running_session()
    if session is None:
        raise RuntimeError(
            "assert_matches_single_process starts ranks of its own: call it in an ordinary test, not in one marked "
            "with ranks, and under pytest with the zeroshard-testing plugin"
        )
    if "<locals>" in train_fn.__qualname__ or "<lambda>" in train_fn.__qualname__:
        raise TypeError(f"{train_fn.__qualname__} must be a function of its module, for ranks to find it")
    source = train_fn.__module__, train_fn.__code__.co_filename, train_fn.__qualname__
    with tempfile.TemporaryDirectory(prefix="ranks-reference-") as folder:
        arguments = {"source": source, "folder": folder, "rtol": rtol, "atol": atol}
        _run(session, "save_reference", RanksSpec(1, backend, timeout=timeout), arguments)
        for count in [ranks] if isinstance(ranks, int) else ranks:
            _run(session, "compare_with_reference", RanksSpec(count, backend, timeout=timeout), arguments)


def save_reference(rank: int, world_size: int, source: tuple[str, str, str], folder: str, **_: float) -> None:
    """Train in this process and keep the result; runs on the only rank."""
    __tracebackhide__ = True
    header, data = [], bytearray()
    for name, tensor in _trained(rank, world_size, source):
        header.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
        data += bytes(tensor.contiguous().clone().untyped_storage())
    Path(folder, "header.json").write_text(json.dumps(header))
    Path(folder, "data.bin").write_bytes(data)


def compare_with_reference(
    rank: int, world_size: int, source: tuple[str, str, str], folder: str, rtol: float, atol: float
) -> None:
    """Train on this rank and compare with what was kept; runs on every rank."""
    expected = _reference(Path(folder))
    found = _trained(rank, world_size, source)
    names, expected_names = [name for name, _ in found], [name for name, _ in expected]
    if names != expected_names:
        pytest.fail(f"the function returned tensors {names}, in a single process {expected_names}", pytrace=False)
    for (name, here), (_, there) in zip(found, expected, strict=True):
        text = difference(here, there, rtol, atol)
        if text is not None:
            text = f"tensor {name!r} on rank {rank} of {world_size} is not that of a single process: {text}"
            pytest.fail(text, pytrace=False)


def difference(here: torch.Tensor, there: torch.Tensor, rtol: float, atol: float) -> str | None:
    """Say how two tensors differ, None if they do not.

    Args:
        here: A tensor.
        there: What it should be.
        rtol: Relative tolerance; with both 0 every bit must be equal.
        atol: Absolute tolerance.

    Example:
        >>> difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), 0, 0)
        'largest difference 0.5 at (1,): 2.0 instead of 2.5'
    """
    if here.shape != there.shape or here.dtype != there.dtype:
        return f"it is {here.dtype} of shape {tuple(here.shape)} instead of {there.dtype} of shape {tuple(there.shape)}"
    bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (here, there)] if here.numel() else []
    if not bits or torch.equal(*bits):
        return None
    if (rtol or atol) and torch.allclose(here, there, rtol, atol, equal_nan=True):
        return None
    wide = [tensor.to(torch.complex128 if tensor.is_complex() else torch.float64) for tensor in (here, there)]
    apart = (wide[0] - wide[1]).abs().nan_to_num(math.inf).reshape(-1)
    place = int(apart.argmax())
    index = tuple(int(part) for part in torch.unravel_index(torch.tensor(place), here.shape))
    values = here.reshape(-1)[place].item(), there.reshape(-1)[place].item()
    return f"largest difference {apart[place].item():g} at {index}: {values[0]!r} instead of {values[1]!r}"


def _run(session: RanksSession, function: str, spec: RanksSpec, arguments: Mapping[str, object]) -> None:
    values = {**arguments, "rank": RankValue("rank"), "world_size": spec.world_size}
    title = f"{arguments['source'][2]} on {'one process' if spec.world_size == 1 else f'{spec.world_size} ranks'}"  # type: ignore[index]
    session.call(title, (__name__, __file__), function, spec, values)


def _trained(rank: int, world_size: int, source: tuple[str, str, str]) -> list[tuple[str, torch.Tensor]]:
    __tracebackhide__ = True
    module, path, name = source
    function: Any = import_test_module(module, path)
    for part in name.split("."):
        function = getattr(function, part)
    result = function(rank, world_size)
    if isinstance(result, torch.nn.Module):
        result = result.state_dict()
    named = result.items() if isinstance(result, Mapping) else enumerate(result)
    found = [(str(key), tensor) for key, tensor in named]
    for key, tensor in found:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} returned a {type(tensor).__name__} for {key!r}; it is to return tensors")
    return [(key, tensor.detach().cpu()) for key, tensor in found]


def _reference(folder: Path) -> list[tuple[str, torch.Tensor]]:
    data, position, tensors = bytearray((folder / "data.bin").read_bytes()), 0, []
    for name, dtype, shape in json.loads((folder / "header.json").read_text()):
        kind: torch.dtype = getattr(torch, dtype)
        size = math.prod(shape) * kind.itemsize
        flat = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=position) if size else torch.empty(0)
        tensors.append((name, flat.clone().view(kind).view(shape) if size else torch.empty(shape, dtype=kind)))
        position += size
    return tensors
