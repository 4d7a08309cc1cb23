"""Measures on the ranks of the default group: each function prints a table and returns how many rows are wrong.

All are collective. Without CUDA they run on the CPU with the smallest model, and cells that need CUDA are "-".
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from itertools import count
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from gpu_check.models import CUDA, DEVICE, Gpt, batch, size_of
from gpu_check.tables import Table
from gpu_check.trainers import (
    BF16,
    COMPARABLE,
    DDP,
    HOOKS,
    SHARDED,
    SHARDED_SPLIT,
    SPLIT,
    TORCH,
    WHOLE,
    Trainer,
    partition_of,
    steps_in_backward,
    trainer,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.profiler import ProfilerActivity, profile
from zeroshard.plan.predict import Planner
from zeroshard_comm import collectives
from zeroshard_testing.emulated.costs import host_never_waits

NOTHING = "-"
_DELAYED = ("foreach_copy_", "reduce_scatter", "all_gather")
_DELAY = 1_500_000
"""Cycles of the device's clock, about a millisecond."""
_ROUNDING = 1e-5
"""Largest difference of two correct runs in float32, relative to the largest parameter."""


@dataclass(frozen=True)
class Settings:
    """Options: a size in `models.SIZES`, how many iterations are timed together, and in how many rounds."""

    model: str = "124M"
    iterations: int = 6
    rounds: int = 3


def waits(_: Settings) -> int:
    """Run one iteration of every trainer and training loop in which the host must not wait for the device."""
    table = Table("trainer", "loop", "the host never waits" if CUDA else "runs; a CPU has no device to wait for")
    ids = batch(2, 64)
    for name in (DDP, *HOOKS, *SHARDED):
        for loop in _LOOPS:
            if loop != "plain" and (steps_in_backward(name) or (loop == "zeroshard's clipping" and name == DDP)):
                continue
            one = trainer(name, "tiny")
            scaler = torch.amp.GradScaler(DEVICE.type, init_scale=8.0)
            for _iteration in range(3):
                one.iterate(ids)
            one.optimizer.zero_grad()
            with table.tried(name, loop), host_never_waits(DEVICE) if CUDA else nullcontext():
                loss = one.model(ids)
                (scaler.scale(loss) if loop == "unscaling" else loss).backward()
                _LOOPS[loop](one, scaler)
                one.optimizer.step()
            _synchronize()
    return table.failed


# The actions of a loop between backward and step. GradScaler.step() reads on the host whether gradients are finite.
_LOOPS: Mapping[str, Callable[[Trainer, torch.amp.GradScaler], object]] = {
    "plain": lambda _one, _scaler: None,
    "torch's clipping": lambda one, _scaler: nn.utils.clip_grad_norm_(one.model.parameters(), 1.0),
    "zeroshard's clipping": lambda one, _scaler: one.optimizer.clip_grad_norm_(1.0),
    "unscaling": lambda one, scaler: scaler.unscale_(one.optimizer),
}


def parity(_: Settings) -> int:
    """Compare six iterations of every hook, with streams delayed, with DDP and the plain optimizer."""
    table = Table("trainer", *_COMPARED)

    def train(one: Trainer) -> torch.Tensor:
        for number in range(6):
            one.iterate(batch(2, 64, number))
        return one.flat()

    theirs = train(trainer(DDP, "tiny", **COMPARABLE))
    for name in (*HOOKS, *SHARDED):
        with table.tried(name) as cells:
            one = trainer(name, "tiny", **COMPARABLE)
            with _delays():
                ours = train(one)
            cells += _compared(ours, theirs)
    return table.failed


_COMPARED = ("largest difference / largest parameter", "replicas are equal")


def _compared(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[str, str]:
    """Return cells of `_COMPARED`; raise if parameters differ from DDP's, or between ranks."""
    off = float((ours - theirs).abs().max() / theirs.abs().max())
    low, high = ours.clone(), ours.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    if not torch.equal(low, high):
        raise AssertionError(f"replicas differ by up to {float((high - low).abs().max()):.1e}")
    if off >= _ROUNDING:
        raise AssertionError(f"parameters differ from DDP's by {off:.1e} of the largest")
    return f"{off:.1e}", "ok"


def sharded(settings: Settings) -> int:
    """Compare sharded gradients, of two backwards for each step, with DDP's sums; print peaks in GB, and the time."""
    peaks = ("after step", "peak in step", "peak in backward", "peak of iteration 1")
    table = Table("trainer", *_COMPARED, *peaks, "ms by events", "ms of the host")

    def train(one: Trainer) -> torch.Tensor:
        for number in range(3):
            one.optimizer.zero_grad()
            # Sharded gradients add up at their owners; DDP's gradients add up on each rank.
            with one.model.no_sync() if isinstance(one.model, DistributedDataParallel) else nullcontext():
                one.backward(batch(2, 64, number))
            one.backward(batch(2, 64, 10 + number))
            one.optimizer.step()
        return one.flat()

    theirs, ids = train(trainer(DDP, "tiny", **COMPARABLE)), batch(1, 256)
    for name in (DDP, SPLIT, *SHARDED):
        with table.tried(name) as cells:
            cells += _compared(train(trainer(name, "tiny", **COMPARABLE)), theirs)
            cells += [nbytes / 1e9 if CUDA else NOTHING for nbytes in _held(name, settings.model, ids)]
            one = trainer(name, settings.model)
            # The first iterations warm up.
            _timed(one, ids, settings.iterations)
            events, host = _timed(one, ids, settings.iterations)
            cells += [events if CUDA else NOTHING, host]
    return table.failed


@contextmanager
def _delays() -> Iterator[None]:
    """Delay the current stream before each of zeroshard's copies and collectives, on another rank each time.

    A rank that is not delayed runs ahead, so if a wait for a collective is missing, it reads data that has not arrived.
    """
    calls, rank, ranks = count(), dist.get_rank(), dist.get_world_size()

    def late(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            if next(calls) % ranks == rank and CUDA:
                # torch has no public way to keep a stream busy.
                torch.cuda._sleep(_DELAY)
            return function(*args, **kwargs)

        return call

    copies: dict[str, Any] = {name: late(getattr(collectives, name)) for name in _DELAYED}
    whole: dict[str, Any] = {"reduce": late(dist.reduce), "broadcast": late(dist.broadcast)}
    with mock.patch.multiple(collectives, **copies), mock.patch.multiple(dist, **whole):
        yield


def memory(settings: Settings) -> int:
    """Print peaks of the third iteration in GB (10^9 bytes) next to the prediction, which excludes activations."""
    peaks = ("peak in step", "peak in backward", "peak of iteration 1")
    table = Table("trainer", "ranks", "predicted GB", "after step", *peaks)
    ranks, ids = dist.get_world_size(), batch(1, 256)
    with torch.device("meta"):
        planner = Planner(Gpt(*size_of(settings.model)), AdamW, backend="nccl", fused=True)
    # Libraries allocate once.
    trainer(DDP, "tiny").iterate(batch(1, 64))
    for name in (DDP, TORCH, WHOLE, SPLIT, SHARDED_SPLIT):
        with table.tried(name, ranks) as cells:
            partition, is_sharded = partition_of(name), name in SHARDED
            predicted = planner.predict(1 if name == DDP else ranks, partition, shards_gradients=is_sharded).ranks
            # With whole tensors ranks differ, so take this rank's.
            cells.append(predicted[min(dist.get_rank(), len(predicted) - 1)].total / 1e9)
            cells += [nbytes / 1e9 if CUDA else NOTHING for nbytes in _held(name, settings.model, ids)]
    return table.failed


def _held(name: str, model: str, ids: torch.Tensor) -> tuple[int, int, int, int]:
    """Return the bytes above those allocated before the model was built, in the order of the table's columns."""
    gc.collect()
    torch.cuda.empty_cache()
    before = _allocated()
    _peak()
    one = trainer(name, model)
    one.iterate(ids, BF16)
    first = _peak()
    one.iterate(ids, BF16)
    one.optimizer.zero_grad()
    _peak()
    one.backward(ids, BF16)
    in_backward = _peak()
    one.optimizer.step()
    return _allocated() - before, _peak() - before, in_backward - before, first - before


def _allocated() -> int:
    return torch.cuda.memory_allocated() if CUDA else 0


def _peak() -> int:
    """Return the peak since the last call, in bytes."""
    found = torch.cuda.max_memory_allocated() if CUDA else 0
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    return found


def _synchronize() -> None:
    if CUDA:
        torch.accelerator.synchronize()


def times(settings: Settings) -> int:
    """Print the median time of an iteration under bf16 autocast, with trainers in turn, and what it launches."""
    counts = ("launches", "copies, sets", "host waits", "ms on device")
    table = Table("batch", "trainer", "ms by events", "ms of the host", *counts)
    trainers = {name: trainer(name, settings.model) for name in (DDP, TORCH, WHOLE, SPLIT)}
    # Over gloo the large batch measures only the link of the host.
    batches = {"8 x 1024": batch(8, 1024)} if CUDA and dist.get_backend() != "gloo" else {}
    for shape, ids in {**batches, "1 x 64": batch(1, 64)}.items():
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in trainers}
        for turn in range(settings.rounds + 1):
            for name, one in trainers.items():
                one.iterate(ids, BF16)
                spent = _timed(one, ids, settings.iterations)
                # The first round warms up.
                found[name] += [spent] if turn else []
        for name, one in trainers.items():
            events, host = (statistics.median(values) for values in zip(*found[name], strict=True))
            table.row(shape, name, events if CUDA else NOTHING, host, *_profiled(one, ids))
    return table.failed


def _timed(one: Trainer, ids: torch.Tensor, iterations: int) -> tuple[float, float]:
    """Return the milliseconds of an iteration: between events on the device, and until the host has issued it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if CUDA else (None, None)
    _synchronize()
    if start is not None:
        start.record()
    began = time.perf_counter()
    for _ in range(iterations):
        one.iterate(ids, BF16)
    host = (time.perf_counter() - began) / iterations * 1e3
    if start is None or end is None:
        return host, host
    end.record()
    _synchronize()
    return start.elapsed_time(end) / iterations, host


def _profiled(one: Trainer, ids: torch.Tensor) -> tuple[object, ...]:
    """Return kernel launches, copies and sets, waits of the host, and milliseconds on the device in one iteration."""
    if not CUDA:
        return (NOTHING,) * 4
    launches, copies, waits, busy = _profile(lambda: one.iterate(ids, BF16))
    # The profiler itself waits for the device.
    return launches, copies, waits - _profile(lambda: None)[2], busy


def _profile(run: Callable[[], object]) -> tuple[int, int, int, float]:
    _synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        run()
        _synchronize()
    events = profiled.key_averages()

    def calls(*beginnings: str) -> int:
        return sum(event.count for event in events if event.key.startswith(beginnings))

    # Operators of the host also count the time of the kernels that they launch.
    on_device = [event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation]
    return (
        calls("cudaLaunchKernel", "cuLaunchKernel"),
        calls("cudaMemcpy", "cudaMemset"),
        calls("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"),
        sum(event.self_device_time_total for event in on_device) / 1e3,
    )


def graph(_: Settings) -> int:
    """Capture step() in a CUDA graph and compare replays with the plain optimizer, or check that capture is refused."""
    table = Table("trainer", "expected", "seen")
    for name in (WHOLE, SPLIT):
        if dist.get_world_size() == 1 or (dist.get_backend() == "nccl" and name == WHOLE):
            with table.tried(name, "captured"):
                _replay(name)
            continue
        with table.tried(name, "refused"):
            try:
                _replay(name)
            except RuntimeError as error:
                if "can be captured in a CUDA graph only" not in str(error):
                    raise
            else:
                raise AssertionError("step() was captured")
    return table.failed


def _replay(name: str) -> None:
    ours, plain = (trainer(each, "tiny", **COMPARABLE) for each in (name, DDP))
    for one in (ours, plain):
        for number in range(3):
            one.iterate(batch(2, 64, number))
        one.optimizer.zero_grad()
        one.backward(batch(2, 64, 3))
    _synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        ours.optimizer.step()
    for _ in range(3):
        captured.replay()
        plain.optimizer.step()
    _synchronize()
    off = float((ours.flat() - plain.flat()).abs().max())
    if off > _ROUNDING:
        raise AssertionError(f"after three replays parameters differ by {off:.1e}")


def iterations(_: Settings) -> int:
    """Run three iterations of every trainer, for sanitizers."""
    table = Table("trainer", "three iterations")
    for name in (DDP, *HOOKS, *SHARDED):
        with table.tried(name):
            one = trainer(name, "tiny")
            for number in range(3):
                one.iterate(batch(2, 64, number))
            _synchronize()
    return table.failed


MEASUREMENTS: Mapping[str, Callable[[Settings], int]] = {
    each.__name__: each for each in (waits, parity, sharded, memory, times, graph, iterations)
}
