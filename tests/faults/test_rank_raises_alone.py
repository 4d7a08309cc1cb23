"""An error that one rank raises alone reaches the others in their next call, which nobody waits for in vain."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.ddp_by_collectives import BOTH_WAYS
from support.ddp_models import Layers
from support.ddp_training import EVERY_HOOK, Twins, not_freed
from support.groups import group_of
from support.sharded_model import Plain
from support.sharded_training import Training
from support.training import assert_same_state, cutting, set_gradients, small_model, twins
from torch import optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard.grads.held import HeldBucket
from zeroshard_comm import DisagreementError, PeerLostError, RankGroup, ring, transport


@pytest.mark.ranks(2, backend="gloo", isolation="process")
def test_the_rank_that_failed_says_why_though_the_others_wait_elsewhere(rank: int) -> None:
    # Rank 1 comes out of DDP's wait only when rank 0 has given up.
    group, of_model = (group_of(seconds=seconds) for seconds in (2, 5))
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
    with pytest.raises(ValueError, match=r"has the state entry '\w+' on rank 0, but rank 1, which owns a part"):
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


@pytest.mark.ranks(2, backend="gloo")
def test_a_closure_that_raises_on_one_rank_is_an_error_on_every_rank(rank: int) -> None:
    twins = Twins()
    twins.iterate(0)

    def closure() -> torch.Tensor:
        if rank == 1:
            raise ValueError("no batch")
        return torch.zeros(())

    with pytest.raises(ValueError, match="no batch"):
        twins.optimizer.step(closure)
    twins.iterate(1)
    twins.check("after an iteration that is as ever")


# ---------------------------------------------------------------------- in backward


# By collectives, what rank 0 has issued when rank 1 fails between two buckets has no counterpart.
@pytest.mark.ranks(2, backend="gloo", checks="no:collectives")
@BOTH_WAYS
@EVERY_HOOK
def test_a_backward_that_raises_on_one_rank_is_an_error_on_the_other(
    rank: int, twins_by: type[Twins], hook: str
) -> None:
    twins = twins_by(hook, model=Layers, process_group=group_of(seconds=3), ddp={"bucket_cap_mb": 0.001})
    twins.iterate(0)
    twins.iterate(1)
    twins.ddp.module.fails = True
    twins.optimizer.zero_grad()
    if rank == 1:
        with pytest.raises(ZeroDivisionError):
            twins.backward(twins.ddp, 2)
        # What is under way cannot be called back: nothing of it is stepped, and DDP itself refuses to go on.
        with pytest.raises(RuntimeError, match="the last backward did not finish on rank 1"):
            twins.optimizer.step()
        twins.ddp.module.fails = False
        twins.optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
            twins.backward(twins.ddp, 3)
    else:
        with pytest.raises(PeerLostError, match=r"rank 0 lost (rank 1|another rank) during backward\(\)"):
            twins.backward(twins.ddp, 2)
        with pytest.raises(PeerLostError, match="build the optimizer again"):
            twins.optimizer.step()


class FailingBehind(torch.autograd.Function):
    """Raises behind all gradients of parameters, on one rank."""

    raises = False

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if FailingBehind.raises:
            raise ZeroDivisionError("in backward")
        return gradient


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("clips", [False, True], ids=["step()", "clip_grad_norm_()"])
def test_an_exception_behind_the_last_bucket_is_told_to_all(
    rank: int, clips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins()
    twins.iterate(0)
    twins.optimizer.zero_grad()
    monkeypatch.setattr(FailingBehind, "raises", rank == 0)
    inputs = torch.ones(8, 40, dtype=torch.float64, requires_grad=True)
    loss = twins.ddp(FailingBehind.apply(inputs)).sum()
    if rank == 0:
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        twins.optimizer.zero_grad()
    else:
        loss.backward()
    with pytest.raises(RuntimeError, match="the last backward did not finish on rank 0"):
        twins.optimizer.clip_grad_norm_(1.0) if clips else twins.optimizer.step()


@pytest.mark.ranks(2, backend="gloo")
def test_another_call_in_place_of_the_end_of_a_backward_is_told(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins()
    twins.iterate(0)
    twins.optimizer.zero_grad()
    monkeypatch.setattr(FailingBehind, "raises", rank == 0)
    inputs = torch.ones(8, 40, dtype=torch.float64, requires_grad=True)
    loss = twins.ddp(FailingBehind.apply(inputs)).sum()
    if rank == 0:
        with pytest.raises(ZeroDivisionError):
            loss.backward()
    # gloo would abort both processes if it were given the words of the one for those of the other.
    with pytest.raises(DisagreementError, match=r"the end of backward\(\)"):
        twins.optimizer.consolidate_state_dict() if rank == 0 else loss.backward()


# What is not sent leaves messages without another end.
@pytest.mark.by_default("messages-2-pack-one thread | messages-2-accept-two threads | reads-2-accept-two threads")
@pytest.mark.ranks(2, backend="gloo", isolation="process", checks="no:messages no:collectives no:deadlock")
@pytest.mark.usefixtures("reads")
@pytest.mark.parametrize("threads", [False, True], ids=["one thread", "two threads"])
@pytest.mark.parametrize("method", ["pack", "accept"])
def test_no_rank_waits_after_an_error_of_another_with_sharded_gradients(
    rank: int, threads: bool, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "WORTH_OVERLAPPING", 0 if threads else 2**60)
    # Some parameters share a bucket.
    training, began = Training(Plain, bucket_mb=0.02), time.monotonic()
    training.iterate()
    if rank == 1:
        monkeypatch.setattr(HeldBucket, method, mock.Mock(side_effect=MemoryError("no memory is left")))
    with pytest.raises(MemoryError if rank == 1 else PeerLostError, match=r"no memory is left|lost rank 1"):
        training.iterate_sharded()
    assert time.monotonic() - began < 10


# ---------------------------------------------------------------------- outside of a collective call


ON_RANK_1 = r"rank 1: the optimizer state of tensor \d .* belongs to other ranks"


def write_to_others(optimizer: ZeroRedundancyOptimizer) -> None:
    theirs = next(param for param, rank in optimizer._param_to_rank.items() if rank != optimizer.rank)
    with pytest.raises(RuntimeError, match="belongs to other ranks"):
        optimizer.state[theirs]["exp_avg"] = torch.zeros(1)


def write_in_place(optimizer: ZeroRedundancyOptimizer) -> None:
    theirs = next(param for param, rank in optimizer._param_to_rank.items() if rank != optimizer.rank)
    with pytest.raises(RuntimeError, match="To change the state in place"):
        optimizer.state[theirs]["exp_avg"].zero_()


@contextmanager
def while_rank_1_is_away(rank: int) -> Iterator[None]:
    """Rank 1 waits at the end of the block for the others to leave it. If they wait for rank 1, the harness says so."""
    store = dist.PrefixStore("away", dist.group.WORLD.get_group_store())  # type: ignore[union-attr]
    yield
    if rank == 1:
        store.wait([f"done {other}" for other in range(dist.get_world_size()) if other != 1])
    else:
        store.set(f"done {rank}", "")


CALLS: dict[str, Callable[[ZeroRedundancyOptimizer], object]] = {
    "step()": lambda optimizer: optimizer.step(),
    "consolidate_state_dict()": lambda optimizer: optimizer.consolidate_state_dict(),
    "add_param_group()": lambda optimizer: optimizer.add_param_group({"params": [torch.zeros(3, requires_grad=True)]}),
}


@pytest.mark.exhaustive_at(3)
@pytest.mark.ranks(2, 3, backend="gloo")
@pytest.mark.parametrize(
    ("misuse", "call", "words"),
    [
        *[(write_to_others, call, ON_RANK_1) for call in CALLS],
        (write_in_place, "step()", r"rank 1: state entry 'exp_avg' of .* on other ranks.*To change the state in"),
    ],
    ids=[*CALLS, "in place"],
)
def test_a_refused_write_to_the_state_of_another_rank_is_raised_by_the_next_call(
    rank: int, misuse: Callable[[ZeroRedundancyOptimizer], None], call: str, words: str
) -> None:
    model, twin = small_model(), small_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=0.1)
    plain = optim.AdamW(twin.parameters(), lr=0.1)

    def step(seed: int) -> None:
        for module, stepped in ((model, optimizer), (twin, plain)):
            set_gradients(module.parameters(), seed)
            stepped.step()

    for seed in range(2):
        step(seed)
    with while_rank_1_is_away(rank):
        if rank == 1:
            misuse(optimizer)
        else:
            with pytest.raises(RuntimeError, match=words):
                CALLS[call](optimizer)
    if rank == 1:
        with pytest.raises(RuntimeError, match=words):
            CALLS[call](optimizer)
    for seed in range(2, 4):
        step(seed)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.ranks(2, 3, backend="gloo")
def test_a_write_that_all_ranks_refuse_is_not_raised_again() -> None:
    model = small_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=0.1)
    set_gradients(model.parameters(), 0)
    optimizer.step()
    write_to_others(optimizer)
    write_in_place(optimizer)
    optimizer.step()


@pytest.mark.ranks(3, backend="gloo")
def test_rounds_hear_of_it_when_the_rank_goes_on(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setattr(ring, "MOST_RANKS", 1)
    model = small_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, process_group=dist.new_group(), lr=0.1)
    set_gradients(model.parameters(), 0)
    optimizer.step()
    if rank == 1:
        write_to_others(optimizer)
    with pytest.raises(RuntimeError, match=ON_RANK_1):
        optimizer.step()
    optimizer.step()


@pytest.mark.ranks(2, backend="gloo")
def test_connections_can_be_dropped_before_another_rank_has_heard(rank: int) -> None:
    model, group = small_model(), dist.new_group()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, process_group=group, lr=0.1)
    set_gradients(model.parameters(), 0)
    optimizer.step()
    connections = weakref.ref(RankGroup.of(group).context.connections)
    if rank == 1:
        write_to_others(optimizer)
        dist.destroy_process_group(group)
        del optimizer, group
        assert not not_freed([connections])
    dist.barrier()


@pytest.mark.ranks(2, 3, backend="gloo")
def test_a_refused_write_before_a_backward_that_does_not_step_is_raised_by_step(rank: int) -> None:
    twins = Twins()
    for number in range(3):
        twins.iterate(number)
    if rank == 1:
        write_to_others(twins.optimizer)
    twins.optimizer.zero_grad()
    twins.backward(twins.ddp, 3)
    with pytest.raises(RuntimeError, match=ON_RANK_1):
        twins.optimizer.step()
    for number in range(4, 6):
        twins.iterate(number)
        twins.check(f"in iteration {number}")


def change_the_rate(optimizer: ZeroRedundancyOptimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5
    with pytest.raises(RuntimeError, match="a hyperparameter was changed after the backward"):
        optimizer.step()


def step_with_a_closure(optimizer: ZeroRedundancyOptimizer) -> None:
    with pytest.raises(ValueError, match="takes neither a closure nor arguments"):
        optimizer.step(lambda: 0.0)


@pytest.mark.exhaustive_at(3)
@pytest.mark.ranks(2, 3, backend="gloo")
@pytest.mark.parametrize(
    ("misuse", "continues", "hook"),
    [
        (write_to_others, "with a backward", "hook_with_zero_step"),
        (step_with_a_closure, "with a backward", "hook_with_zero_step_interleaved"),
        (change_the_rate, "with a load", "hook_with_zero_step_interleaved"),
        (change_the_rate, "with a backward", "hook_with_zero_step"),
    ],
)
def test_the_next_backward_raises_what_one_rank_raised(
    rank: int, hook: str, misuse: Callable[[ZeroRedundancyOptimizer], None], continues: str
) -> None:
    twins = Twins(hook)
    for number in range(3):
        twins.iterate(number)
    model = {name: values.clone() for name, values in twins.ddp.state_dict().items()}
    state = twins.plain.state_dict()

    def fail() -> None:
        twins.optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="rank 1: "):
            twins.backward(twins.ddp, 4)
        with pytest.raises(RuntimeError, match="rank 1: " if rank != 1 else "."):
            twins.optimizer.step()

    twins.optimizer.zero_grad()
    twins.backward(twins.ddp, 3)
    with while_rank_1_is_away(rank):
        if rank == 1:
            misuse(twins.optimizer)
        else:
            twins.optimizer.step()
            fail()
    if rank == 1 and continues == "with a backward":
        fail()
    if misuse is change_the_rate and continues == "with a backward":
        # The loop is refused on all ranks until a state is loaded.
        fail()
    twins.ddp.load_state_dict(model)
    twins.optimizer.load_state_dict(state)
    for number in (5, 6, 7):
        twins.iterate(number)
        twins.check(f"after a state was loaded, in iteration {number}")
