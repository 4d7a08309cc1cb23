"""Errors that one rank raises alone, outside of a collective call: the next call of the other ranks raises them too."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from support.ddp_training import HOOKS, Twins, not_freed
from support.training import set_gradients, small_model
from torch import optim
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import RankGroup, ring

STEPPING_HOOKS = pytest.mark.parametrize("hook", HOOKS[1:])
ON_RANK_1 = r"rank 1: the optimizer state of tensor \d .* belongs to other ranks"


def write_to_others(optimizer: ZeroRedundancyOptimizer) -> None:
    theirs = next(param for param, rank in optimizer._param_to_rank.items() if rank != optimizer.rank)
    with pytest.raises(RuntimeError, match="belongs to other ranks"):
        optimizer.state[theirs]["exp_avg"] = torch.zeros(1)


def write_in_place(optimizer: ZeroRedundancyOptimizer) -> None:
    theirs = next(param for param, rank in optimizer._param_to_rank.items() if rank != optimizer.rank)
    with pytest.raises(RuntimeError, match="To change the state in place"):
        optimizer.state[theirs]["exp_avg"].zero_()


def change_the_rate(optimizer: ZeroRedundancyOptimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5
    with pytest.raises(RuntimeError, match="a hyperparameter was changed after the backward"):
        optimizer.step()


def step_with_a_closure(optimizer: ZeroRedundancyOptimizer) -> None:
    with pytest.raises(ValueError, match="takes neither a closure nor arguments"):
        optimizer.step(lambda: 0.0)


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


@pytest.mark.by_default(
    "2-write_to_others-step() | 2-write_to_others-consolidate_state_dict() | "
    "3-write_to_others-add_param_group() | 3-write_in_place-step()"
)
@pytest.mark.ranks(2, 3, backend="gloo")
@pytest.mark.parametrize(
    ("misuse", "call", "words"),
    [
        *[(write_to_others, call, ON_RANK_1) for call in CALLS],
        (write_in_place, "step()", r"rank 1: state entry 'exp_avg' of .* lies on other ranks.*To change the state in"),
    ],
    ids=[*(f"write_to_others-{call}" for call in CALLS), "write_in_place-step()"],
)
def test_a_refused_write_to_the_state_of_another_rank(
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
def test_a_refused_write_before_a_backward_that_does_not_step(rank: int) -> None:
    twins = Twins("reduce_to_owner_hook")
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


@pytest.mark.by_default(
    "2-with a backward-write_to_others-hook_with_zero_step | "
    "2-with a backward-step_with_a_closure-hook_with_zero_step | "
    "3-with a load-change_the_rate-hook_with_zero_step_interleaved"
)
@pytest.mark.ranks(2, 3, backend="gloo")
@STEPPING_HOOKS
@pytest.mark.parametrize("misuse", [write_to_others, change_the_rate, step_with_a_closure])
@pytest.mark.parametrize("continues", ["with a backward", "with a load"])
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


@pytest.mark.by_default(
    "2-nothing-0.05-True-reduce_to_owner_hook | 2-nothing-0.05-True-hook_with_zero_step_interleaved | "
    "3-the last layer-25-False-hook_with_zero_step"
)
@pytest.mark.ranks(2, 3, backend="gloo")
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("bucket_cap_mb", [0.05, 25])
@pytest.mark.parametrize("frees", ["nothing", "the last layer"])
def test_one_rank_forgets_zero_grad(rank: int, hook: str, views: bool, bucket_cap_mb: float, frees: str) -> None:
    twins = Twins(hook, ddp={"gradient_as_bucket_view": views, "bucket_cap_mb": bucket_cap_mb})
    for number in range(4):
        twins.iterate(number)
    if rank != 1:
        twins.optimizer.zero_grad()
    elif frees == "the last layer":
        for param in [*twins.ddp.parameters()][-2:]:
            param.grad = None
    says = r"tensor \d '\d.(weight|bias)' still has the gradient of the last step: call optimizer.zero_grad"
    if hook != "reduce_to_owner_hook" or rank == 1:
        with pytest.raises(RuntimeError, match=says):
            twins.backward(twins.ddp, 4)
    else:
        twins.backward(twins.ddp, 4)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=says):
            twins.optimizer.step()
    for number in (5, 6, 7):
        twins.iterate(number)
        twins.check(f"after a zero_grad(), in iteration {number}")
