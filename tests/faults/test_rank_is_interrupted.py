"""A rank that is interrupted, by Ctrl+C or by an exit, says what to do, and the others raise."""

from __future__ import annotations

import copy
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.combinations import WHERE, each_of
from support.ddp_training import EVERY_HOOK, Twins
from support.groups import group_of
from support.training import assert_bitwise_equal, set_gradients, small_model, twins
from torch import optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import PeerLostError
from zeroshard_integrations.ddp import register_reduce_to_owner
from zeroshard_testing import Faults, assert_replicas_equal

PLACES: dict[str, Callable[[optim.Optimizer, Callable[..., None]], RemovableHandle]] = {
    "before the local step": lambda local, hook: local.register_step_pre_hook(hook),
    "after the local step": lambda local, hook: local.register_step_post_hook(hook),
}


class Interrupted:
    """A sharded and an unsharded run that have taken two equal steps, of which the sharded one has a checkpoint."""

    def __init__(self, hook: str) -> None:
        self.hook = hook
        self.model, self.reference = twins()
        self.plain = optim.Adam(self.reference.parameters())
        self.build()
        for number in range(2):
            self.iterate(number)
        self.sharded.consolidate_state_dict()
        self.saved = copy.deepcopy((self.model.state_dict(), self.sharded.state_dict()))

    def build(self) -> None:
        group = group_of(seconds=60)
        self.ddp = DistributedDataParallel(self.model, process_group=group)
        self.sharded = ZeroRedundancyOptimizer(self.model.parameters(), optim.Adam, process_group=group)
        if self.hook == "reduce_to_owner_hook":
            register_reduce_to_owner(self.ddp, self.sharded)

    def load(self) -> None:
        self.model.load_state_dict(self.saved[0])
        self.sharded.load_state_dict(self.saved[1] if self.sharded.rank == 0 else {}, from_rank=0)

    def iterate(self, number: int) -> None:
        inputs = torch.full((4, 40), 1.0 + number)
        for module, optimizer in ((self.ddp, self.sharded), (self.reference, self.plain)):
            optimizer.zero_grad()
            module(inputs).square().mean().backward()
            optimizer.step()


AFTER_AN_INTERRUPTION: dict[str, Callable[[ZeroRedundancyOptimizer], object]] = {
    "step": lambda sharded: sharded.step(),
    "consolidate_state_dict": lambda sharded: sharded.consolidate_state_dict(),
    "load_state_dict": lambda sharded: sharded.load_state_dict({"state": {}, "param_groups": []}),
    "add_param_group": lambda sharded: sharded.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]}),
}


# What was interrupted leaves messages without another end.
@pytest.mark.ranks(2, backend="gloo", isolation="process", checks="no:messages")
@each_of("place", PLACES, hook=["none", "reduce_to_owner_hook"], where=WHERE, kind=[KeyboardInterrupt, SystemExit])
def test_a_step_that_was_interrupted_breaks_the_optimizer_until_it_is_built_again(
    rank: int, kind: type[BaseException], where: str, hook: str, place: str
) -> None:
    run = Interrupted(hook)
    is_mine = where == "on all ranks" or rank == 1

    def interrupted(*_: object) -> None:
        raise kind

    if is_mine:
        PLACES[place](run.sharded.optim, interrupted)
    with pytest.raises(kind if is_mine else PeerLostError):
        run.iterate(2)
    again = r"earlier call did not finish.*load a checkpoint, and build the optimizer again on a new process group"
    for call in AFTER_AN_INTERRUPTION.values():
        with pytest.raises(RuntimeError, match=rf"rank {rank}: an {again}"):
            call(run.sharded)
    assert len(run.sharded.state_dict()["state"]) == len(list(run.model.parameters()))
    assert run.sharded.describe().rank == rank
    # As the message says.
    run.build()
    run.load()
    run.reference.load_state_dict(run.saved[0])
    run.plain = optim.Adam(run.reference.parameters())
    if rank == 0:
        run.plain.load_state_dict(run.saved[1])
    for number in (2, 3):
        run.iterate(number)
    assert_replicas_equal(run.model.parameters())
    if rank == 0:
        assert_bitwise_equal(run.model, run.reference, "after the optimizer was built again")


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.ranks(1, backend="gloo")
@pytest.mark.parametrize("hook", ["none", "reduce_to_owner_hook"])
def test_an_interruption_of_a_single_rank_breaks_nothing(hook: str) -> None:
    run = Interrupted(hook)
    handle = run.sharded.optim.register_step_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.iterate(2)
    handle.remove()
    run.sharded.step()
    run.plain.zero_grad()
    run.reference(torch.full((4, 40), 3.0)).square().mean().backward()
    run.plain.step()
    assert_bitwise_equal(run.model, run.reference, "after the step that follows")


def step_twice(sharded: ZeroRedundancyOptimizer) -> None:
    """What a peer has sent before it was interrupted may do for one step."""
    sharded.step()
    sharded.step()


# What was interrupted leaves messages without another end.
@pytest.mark.ranks(2, backend="gloo", isolation="process", checks="no:messages")
@pytest.mark.parametrize(
    ("how", "where"),
    [("while it sends", "on all ranks"), ("while it waits", "on rank 1"), ("in a closure", "on all ranks")],
)
def test_an_exchange_that_was_interrupted_says_what_to_do(rank: int, where: str, how: str, faults: Faults) -> None:
    group = group_of(seconds=3)
    model = small_model()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, process_group=group)
    set_gradients(model.parameters(), 0)
    sharded.step()
    is_mine = where == "on all ranks" or rank == 1
    if how == "while it sends":
        for each in (0, 1) if where == "on all ranks" else (1,):
            faults.raise_(each, at="send", error=KeyboardInterrupt())
    elif how == "while it waits":
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if is_mine:
            threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
        else:
            time.sleep(0.6)
    if is_mine:
        with pytest.raises(KeyboardInterrupt):
            sharded.step(interrupt if how == "in a closure" else None)
        for call in AFTER_AN_INTERRUPTION.values():
            with pytest.raises(
                RuntimeError, match=rf"rank {rank}: an earlier call .*The call was ended by: KeyboardInterrupt"
            ):
                call(sharded)
    else:
        with pytest.raises(PeerLostError, match="rank 0"):
            step_twice(sharded)
    dist.barrier()


# What was interrupted leaves messages without another end.
@pytest.mark.ranks(2, backend="gloo", isolation="process", checks="no:messages")
@EVERY_HOOK
def test_no_rank_waits_for_one_that_is_interrupted_in_backward(rank: int, hook: str, faults: Faults) -> None:
    twins = Twins(hook, process_group=dist.new_group(timeout=timedelta(minutes=10)))
    twins.iterate(0)
    twins.iterate(1)
    faults.raise_(0, "send", KeyboardInterrupt())
    twins.optimizer.zero_grad()
    with pytest.raises(PeerLostError if rank else KeyboardInterrupt):
        twins.backward(twins.ddp, 2)
    with pytest.raises(RuntimeError, match="load a checkpoint, and build the optimizer again on a new process group"):
        twins.optimizer.step()
