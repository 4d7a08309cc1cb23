"""A rank that dies in a step, or in another call of the optimizer: the others raise, and nobody waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.groups import group_of
from support.training import set_gradients, small_model
from torch import optim
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import PeerLostError
from zeroshard_comm.ring import Connections
from zeroshard_testing import Faults

CALLS: dict[str, Callable[[ZeroRedundancyOptimizer], object]] = {
    "step": lambda sharded: sharded.step(),
    "consolidate_state_dict": lambda sharded: sharded.consolidate_state_dict(),
    "load_state_dict": lambda sharded: sharded.load_state_dict(sharded.state_dict()),
    "load_state_dict from one rank": lambda sharded: sharded.load_state_dict(
        {"state": {}, "param_groups": sharded.state_dict()["param_groups"]} if sharded.rank == 0 else {}, from_rank=0
    ),
}


def strike_before_an_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue a send, at which a fault strikes, before the next agreement: these are collectives of our own, unseen."""
    combine = Connections.combine

    def combine_later(connections: Connections, *arguments: Any) -> torch.Tensor:
        dist.isend(torch.zeros(1), (dist.get_rank() + 1) % dist.get_world_size())
        return combine(connections, *arguments)

    monkeypatch.setattr(Connections, "combine", combine_later)


@pytest.mark.exhaustive_at(4)
@pytest.mark.ranks(3, 4, backend="gloo")
@pytest.mark.parametrize("call", CALLS)
def test_a_killed_rank_is_an_error_on_the_others(
    rank: int, faults: Faults, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam)
    set_gradients(model.parameters(), 0)
    sharded.step()
    dist.barrier()
    faults.kill(rank=2, at="send")
    if rank == 2 and call.startswith("load"):
        strike_before_an_agreement(monkeypatch)
    with pytest.raises(PeerLostError, match=r"another rank has ended|lost rank"):
        CALLS[call](sharded)


@pytest.mark.by_default("3-step")
@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("call", ["step", "consolidate_state_dict", "load_state_dict"])
def test_a_rank_that_stops_is_an_error_on_the_others_within_the_timeout(
    rank: int, faults: Faults, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_of(seconds=2)
    model = small_model()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, process_group=group)
    set_gradients(model.parameters(), 0)
    sharded.step()
    dist.barrier()
    faults.stop(rank=1, at="send")
    if rank == 1 and call.startswith("load"):
        strike_before_an_agreement(monkeypatch)
    started = time.monotonic()
    with pytest.raises(PeerLostError):
        CALLS[call](sharded)
    assert time.monotonic() - started < 20


def step_twice(sharded: ZeroRedundancyOptimizer) -> None:
    """What a peer has sent before it was interrupted may do for one step."""
    sharded.step()
    sharded.step()


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_rank_that_is_killed_while_the_ranks_tell_each_other_of_their_state(
    rank: int, faults: Faults, number: int
) -> None:
    model = small_model()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam)
    sharded.step()
    sharded.step()
    set_gradients(model.parameters(), 0)
    faults.kill(rank=2, at=f"send#{number}")
    with pytest.raises(PeerLostError, match=r"another rank has ended|lost rank"):
        step_twice(sharded)
    # What this rank has is there, and what the others had is not read.
    for entries in sharded.state_dict()["state"].values():
        assert set(entries) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.ranks(2, backend="gloo")
def test_an_exchange_that_raises_on_one_rank_is_an_error_on_both(rank: int, faults: Faults) -> None:
    group = group_of(seconds=2)
    model = small_model()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, process_group=group)
    set_gradients(model.parameters(), 0)
    faults.raise_(rank=1, at="send", error=RuntimeError("cable pulled"))
    with pytest.raises(RuntimeError, match="cable pulled" if rank == 1 else "was cut off"):
        sharded.step()
