"""What a block of a test costs on its device: kernels, collectives, waits of the host, memory."""

from __future__ import annotations

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
    """Count what the block costs. Not to be nested. Raises NotImplementedError on other devices."""
    if device.type != DEVICE:
        raise NotImplementedError(
            f"device_costs counts on the emulated accelerator alone, and this is {device}: mark the test "
            f'with backend="emulated"'
        )
    costs = DeviceCosts()
    extension().reset_costs()
    yield costs
    found = extension().costs()
    costs.kernels, costs.collectives = found["kernels"], found["collectives"]
    costs.host_waits, costs.peak_bytes = [Place(*one) for one in found["host_waits"]], found["peak_bytes"]


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
        raise NotImplementedError(
            f"host_never_waits needs a device that the host can wait for, and this is {device}: mark the test "
            f'with backend="emulated", or "nccl"'
        )
