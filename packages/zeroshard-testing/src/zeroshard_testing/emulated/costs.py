"""What a block of a test costs on its device: kernels, collectives, waits of the host, memory. On CUDA too."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from zeroshard_testing.emulated.report import Place
from zeroshard_testing.emulated.runtime import DEVICE, extension


@dataclass
class DeviceCosts:
    """What a block has used so far or, after its end, in all.

    ``kernels`` counts operations that were launched, ``collectives`` by name what was issued, ``host_waits`` has a
    place for each time that the host waited for the device, ``peak_bytes`` is the most memory that was allocated.
    """

    kernels: int = 0
    collectives: Mapping[str, int] = field(default_factory=dict)
    host_waits: Sequence[Place] = ()
    peak_bytes: int = 0


@contextmanager
def device_costs(device: torch.device) -> Iterator[DeviceCosts]:
    """Count what the block costs. Not to be nested. Raises NotImplementedError if the device is a CPU."""
    costs = DeviceCosts()
    if device.type == DEVICE:
        extension().reset_costs()
        yield costs
        found = extension().costs()
        costs.kernels, costs.collectives = found["kernels"], found["collectives"]
        costs.host_waits, costs.peak_bytes = [Place(*one) for one in found["host_waits"]], found["peak_bytes"]
    elif device.type == "cuda":
        yield from _costs_on_cuda(device, costs)
    else:
        raise _needs_a_device("device_costs", device)


@contextmanager
def host_never_waits(device: torch.device) -> Iterator[None]:
    """Raise RuntimeError where the host waits for the device. Raises NotImplementedError if the device is a CPU."""
    if device.type == DEVICE:
        before = extension().forbid_host_waits(True)
        try:
            yield
        finally:
            extension().forbid_host_waits(before)
    elif device.type == "cuda":
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    else:
        raise _needs_a_device("host_never_waits", device)


def _costs_on_cuda(device: torch.device, costs: DeviceCosts) -> Iterator[DeviceCosts]:
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.reset_peak_memory_stats(device)
    torch.cuda.set_sync_debug_mode("warn")
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    try:
        with warnings.catch_warnings(record=True) as caught, torch.profiler.profile(activities=activities) as profile:
            warnings.simplefilter("always")
            yield costs
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    events = profile.events()
    names = [one.name for one in events if one.device_type.name == "CUDA"]
    issued = [one.name.partition(":")[2] for one in events if one.name.startswith("nccl:")]
    costs.kernels = len([name for name in names if not name.startswith("nccl")])
    costs.collectives = {name: issued.count(name) for name in issued}
    costs.host_waits = [
        Place(str(one.message), [(one.filename, one.lineno, "?")]) for one in caught if "synchroniz" in str(one.message)
    ]
    costs.peak_bytes = torch.cuda.max_memory_allocated(device)


def _needs_a_device(name: str, device: torch.device) -> NotImplementedError:
    return NotImplementedError(
        f"{name} needs a device that the host can wait for, and this is {device}: mark the test "
        f'with backend="emulated", or "nccl"'
    )
