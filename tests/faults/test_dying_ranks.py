"""Ranks that are late, leave early, or die: the others get an error that says so, within the group's timeout."""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ending_ranks import WAYS
from support.training import assert_bitwise_equal, assert_same_state, cutting, set_gradients, small_model, twins
from torch import optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError, PeerLostError
from zeroshard_comm.ring import Connections
from zeroshard_integrations.ddp import register_reduce_to_owner
from zeroshard_testing import Faults, assert_replicas_equal


@pytest.mark.ranks(3, backend="gloo")
def test_a_late_rank_is_waited_for(rank: int) -> None:
    pair = twins()
    sharded = ZeroRedundancyOptimizer(pair[0].parameters(), optim.Adam)
    plain = optim.Adam(pair[1].parameters())
    for step in range(3):
        if rank == step:
            time.sleep(0.3)
        for module, optimizer in zip(pair, (sharded, plain), strict=True):
            set_gradients(module.parameters(), step)
            optimizer.step()
        assert_bitwise_equal(*pair, f"after step {step}")
    assert_replicas_equal(pair[0].parameters())


@pytest.mark.ranks(2, backend="gloo", isolation="process")
def test_a_rank_that_skips_a_step_ends_the_others_within_the_timeout(rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = small_model()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, process_group=group)
    set_gradients(model.parameters(), 0)
    sharded.step()
    if rank == 0:
        with pytest.raises(PeerLostError, match=r"^rank 1 did not call step\(\) within 2 s: call it on every rank"):
            sharded.step()
    dist.barrier()


SKIPPED = r"^rank 1 did not call consolidate_state_dict\(to=0\) within 2 s: call it on every rank, outside of `if rank"


@pytest.mark.ranks(2, backend="gloo", isolation="process")
def test_a_rank_that_skips_a_consolidation_is_named(rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=2))
    sharded = ZeroRedundancyOptimizer(small_model().parameters(), optim.Adam, process_group=group)
    if rank == 0:
        with pytest.raises(PeerLostError, match=SKIPPED):
            sharded.consolidate_state_dict()
    dist.barrier()


@pytest.mark.ranks(2, backend="gloo", isolation="process")
def test_meetings_keep_the_timeout_of_a_group_without_a_backend_for_the_cpu(rank: int) -> None:
    group = dist.new_group(backend="cuda:gloo", timeout=timedelta(seconds=2))
    model = small_model().requires_grad_(False)
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, process_group=group)
    if rank == 0:
        started = time.monotonic()
        with pytest.raises(PeerLostError, match=SKIPPED):
            sharded.consolidate_state_dict()
        assert time.monotonic() - started < 10
    dist.barrier()


@pytest.mark.ranks(2, backend="gloo", isolation="process")
def test_the_rank_that_failed_says_why_though_the_others_wait_elsewhere(rank: int) -> None:
    # Rank 1 comes out of DDP's wait only when rank 0 has given up.
    group, of_model = (dist.new_group(timeout=timedelta(seconds=seconds)) for seconds in (2, 5))
    model = DistributedDataParallel(small_model(), process_group=of_model)
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, process_group=group)

    def closure() -> torch.Tensor:
        if rank == 0:
            raise ZeroDivisionError("no loss today")
        loss: torch.Tensor = model(torch.ones(4, 40)).sum()
        loss.backward()
        return loss

    # Rank 1 waits for gradients that rank 0 never computes.
    with pytest.raises(ZeroDivisionError if rank == 0 else RuntimeError) as caught:
        sharded.step(closure)
    assert rank == 1 or str(caught.value) == "no loss today"
    dist.barrier()


@pytest.mark.ranks(2, backend="gloo", isolation="process")
def test_a_call_beside_a_step_is_told_from_it(rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=2))
    sharded = ZeroRedundancyOptimizer(small_model().parameters(), optim.Adam, process_group=group)
    with pytest.raises(
        DisagreementError, match=r"rank 0 called step\(\) .* rank 1 called consolidate_state_dict\(to=0\)"
    ):
        sharded.step() if rank == 0 else sharded.consolidate_state_dict()
    sharded.step()


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


@pytest.mark.by_default("3-step | 3-consolidate_state_dict | 3-load_state_dict | 3-load_state_dict from one rank")
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
@pytest.mark.parametrize(
    "call",
    [
        "step",
        pytest.param("consolidate_state_dict", marks=pytest.mark.exhaustive),
        pytest.param("load_state_dict", marks=pytest.mark.exhaustive),
    ],
)
def test_a_rank_that_stops_is_an_error_on_the_others_within_the_timeout(
    rank: int, faults: Faults, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = dist.new_group(timeout=timedelta(seconds=2))
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
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = small_model()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, process_group=group)
    set_gradients(model.parameters(), 0)
    faults.raise_(rank=1, at="send", error=RuntimeError("cable pulled"))
    with pytest.raises(RuntimeError, match="cable pulled" if rank == 1 else "was cut off"):
        sharded.step()


@pytest.mark.ranks(4, backend="gloo")
def test_a_rank_that_is_late_at_random_places_changes_nothing(rank: int, faults: Faults) -> None:
    pair = twins()
    sharded = ZeroRedundancyOptimizer(pair[0].parameters(), optim.Adam)
    plain = optim.Adam(pair[1].parameters())
    faults.delay(rank=2, at="send#*", seconds=(0.0, 0.02), seed=1)
    for step in range(5):
        for module, optimizer in zip(pair, (sharded, plain), strict=True):
            set_gradients(module.parameters(), step)
            optimizer.step()
        assert_bitwise_equal(*pair, f"after step {step}")
    assert_replicas_equal(pair[0].parameters())


@pytest.mark.ranks(2, backend="gloo")
def test_no_thread_is_left_behind() -> None:
    before = set(threading.enumerate())
    model = small_model()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam)
    set_gradients(model.parameters(), 0)
    sharded.step()
    sharded.consolidate_state_dict()
    assert set(threading.enumerate()) == before


@pytest.mark.ranks(2, backend="gloo")
def test_a_first_step_that_failed_on_one_rank_leaves_no_garbage_in_a_checkpoint(rank: int) -> None:
    pair = twins()
    sharded = ZeroRedundancyOptimizer(pair[0].parameters(), optim.Adam, partition=cutting("split"))
    plain = optim.Adam(pair[1].parameters())

    def fail(*_: object) -> None:
        raise ArithmeticError("not today")

    hook = sharded.optim.register_step_pre_hook(fail) if rank == 1 else None
    set_gradients(pair[0].parameters(), 0)
    with pytest.raises(ArithmeticError, match="rank 1: not today"):
        sharded.step()
    # Half of each tensor has no state, and there is nothing to write in its place.
    with pytest.raises(ValueError, match=r"has the state entry '\w+' on rank 0, but not on rank 1, which owns a part"):
        sharded.consolidate_state_dict()
    if hook is not None:
        hook.remove()
    set_gradients(pair[1].parameters(), 0)
    plain.step()
    pair[0].load_state_dict(pair[1].state_dict())
    sharded.load_state_dict(plain.state_dict())
    sharded.consolidate_state_dict()
    if rank == 0:
        assert_same_state(sharded.state_dict(), plain.state_dict())


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


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
        group = dist.new_group(timeout=timedelta(seconds=60))
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


# What was interrupted leaves messages without another end.
@pytest.mark.by_default(
    "2-before the local step-none-on all ranks-KeyboardInterrupt | "
    "2-after the local step-reduce_to_owner_hook-on rank 1-SystemExit"
)
@pytest.mark.ranks(2, backend="gloo", isolation="process", checks="no:messages")
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["on all ranks", "on rank 1"])
@pytest.mark.parametrize("hook", ["none", "reduce_to_owner_hook"])
@pytest.mark.parametrize("place", PLACES)
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
    again = r"earlier call was not finished.*load a checkpoint and build the optimizer again, on a new process group"
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


AFTER_AN_INTERRUPTION: dict[str, Callable[[ZeroRedundancyOptimizer], object]] = {
    "step": lambda sharded: sharded.step(),
    "consolidate_state_dict": lambda sharded: sharded.consolidate_state_dict(),
    "load_state_dict": lambda sharded: sharded.load_state_dict({"state": {}, "param_groups": []}),
    "add_param_group": lambda sharded: sharded.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]}),
}


def step_twice(sharded: ZeroRedundancyOptimizer) -> None:
    """What a peer has sent before it was interrupted may do for one step."""
    sharded.step()
    sharded.step()


# What was interrupted leaves messages without another end.
@pytest.mark.by_default("2-while it sends-on all ranks | 2-while it waits-on rank 1 | 2-in a closure-on all ranks")
@pytest.mark.ranks(2, backend="gloo", isolation="process", checks="no:messages")
@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("while it sends", "on all ranks"),
        pytest.param("while it sends", "on rank 1", marks=pytest.mark.exhaustive),
        ("while it waits", "on rank 1"),
        ("in a closure", "on all ranks"),
        pytest.param("in a closure", "on rank 1", marks=pytest.mark.exhaustive),
    ],
)
def test_an_exchange_that_was_interrupted_says_what_to_do(rank: int, where: str, how: str, faults: Faults) -> None:
    group = dist.new_group(timeout=timedelta(seconds=3))
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
                RuntimeError, match=rf"rank {rank}: an earlier call .*It was ended by: KeyboardInterrupt"
            ):
                call(sharded)
    else:
        with pytest.raises(PeerLostError, match="rank 0"):
            step_twice(sharded)
    dist.barrier()


@pytest.mark.by_default("1-3")
@pytest.mark.parametrize(
    ("first", "last"), [(1, 3), *(pytest.param(*which, marks=pytest.mark.exhaustive) for which in [(0, 1), (3, 6)])]
)
def test_a_rank_that_ends_after_its_last_step_costs_the_others_nothing(first: int, last: int) -> None:
    program = [sys.executable, "-m", "support.ending_ranks", str(first), str(last)]
    ended = subprocess.run(program, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=300)
    expected = [f"{' '.join(map(str, way))} 4 4 True" for way in WAYS[first:last]]
    assert ended.stdout.splitlines() == expected, ended.stderr
