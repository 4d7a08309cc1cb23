"""Numbers of which each is known to one rank: after one exchange every rank has all of them, to the bit."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from zeroshard_comm.agreement import Control
from zeroshard_comm.broadcasters import wait_for_collective


def combine_disjoint(control: Control, numbers: torch.Tensor, operation: str) -> torch.Tensor:
    """Return the numbers of all ranks. Collective. Agree on the same operation first.

    On the CPU they travel as agreements do. On an accelerator it is one all-reduce of the process group, for which the
    host does not wait.

    Args:
        control: the channel of the ranks' agreements.
        numbers: float64, 1-D, as many on every rank, with 0 for those that other ranks know; may be overwritten.
        operation: what the ranks are doing, for messages of errors.

    Raises:
        PeerLostError: if a rank is gone.
    """
    if control.alone:
        return numbers
    if numbers.device.type == "cpu":
        return control.combine_words(numbers.view(torch.int64), operation).view(torch.float64)
    started = time.perf_counter()
    # As exact as the bits: every sum has one term that is not 0.
    work = dist.all_reduce(numbers, group=control.ranks.group, async_op=True)
    wait_for_collective(work, control.ranks, "exchange of norms")
    nbytes, waited = numbers.nbytes, time.perf_counter() - started
    control.traffic.add("control", sent=nbytes, received=nbytes, calls=1, waited=waited)
    return numbers
