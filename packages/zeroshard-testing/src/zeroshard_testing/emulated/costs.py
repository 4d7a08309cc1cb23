"""Counts the costs of a block of a test on its device: kernels, collectives, waits of the host, memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from zeroshard_testing.emulated.report import Place
from zeroshard_testing.emulated.runtime import DEVICE, extension


@dataclass
class DeviceCosts:
    """The costs of a block so far, or in total after its end.

    ``kernels`` counts launched operations, ``collectives`` counts collectives by name, ``host_waits`` lists the call
    sites at which the host waited for the device, ``peak_bytes`` is the peak of allocated memory.
    """

    kernels: int = 0
    collectives: Mapping[str, int] = field(default_factory=dict)
    host_waits: Sequence[Place] = ()
    peak_bytes: int = 0


@contextmanager
def device_costs(device: torch.device) -> Iterator[DeviceCosts]:
    """Count the costs of the block. Blocks must not be nested. Raises NotImplementedError on other devices."""
    if device.type != DEVICE:
        raise NotImplementedError(
            f"device_costs works only on the emulated accelerator, but the device is {device}: mark the test "
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
    """Raise RuntimeError if the host waits for the device. Raises NotImplementedError if the device is a CPU."""
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
            f"host_never_waits needs a device for which the host can wait, but got {device}: mark the test "
            f'with backend="emulated", or "nccl"'
        )
