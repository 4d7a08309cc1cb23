"""Hooks that step during backward: what may come between a backward and its step(), and what is refused."""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.combinations import each_of
from support.ddp_training import HOOKS, STEPPING_HOOKS, Twins, each_hook_with, register
from support.groups import group_of
from support.training import EVERYWHERE, small_model
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize(
    ("hook", "steps"),
    [("hook_with_zero_step", True), ("hook_with_zero_step_interleaved", False)],
    ids=["step()", "hooks alone"],
)
def test_state_is_empty_on_no_rank_after_a_step(rank: int, hook: str, steps: bool) -> None:
    twins = Twins(hook, model=lambda: nn.Linear(40, 30, bias=False))
    assert not twins.optimizer.state
    twins.backward(twins.ddp, 0)
    if steps:
        twins.optimizer.step()
    assert list(twins.optimizer.state) == list(twins.ddp.parameters())
    assert bool(twins.optimizer.optim.state) == (rank == 0)


@pytest.mark.ranks(2, backend=EVERYWHERE)
@STEPPING_HOOKS
def test_step_may_be_left_out(hook: str) -> None:
    twins = Twins(hook)
    for number in range(1, 5):
        twins.ddp.zero_grad()
        twins.backward(twins.ddp, number)
        twins.plain.zero_grad()
        twins.backward(twins.plain_ddp, number)
        twins.plain.step()
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend="gloo")
@each_hook_with("when, set_to_none", ("before the backward", True), ("after the step", False))
def test_gradients_may_be_dropped_before_a_backward_and_after_its_step(hook: str, when: str, set_to_none: bool) -> None:
    twins = Twins(hook)
    for number in range(4):
        for ddp, optimizer in twins.sides:
            if when == "before the backward":
                optimizer.zero_grad(set_to_none)
            twins.backward(ddp, number)
            optimizer.step()
            if when == "after the step":
                optimizer.zero_grad(set_to_none)
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend="gloo")
@STEPPING_HOOKS
def test_what_a_scheduler_changes_after_step_is_right(hook: str) -> None:
    twins = Twins(hook)
    for number in range(4):
        twins.iterate(number)
        for _, optimizer in twins.sides:
            optimizer.param_groups[0]["lr"] *= 0.7
        twins.check(f"after iteration {number}")


# ---------------------------------------------------------------------- refused


@pytest.mark.ranks(2, backend=EVERYWHERE)
@STEPPING_HOOKS
def test_clipping_and_scaling_are_refused_once_backward_has_stepped(hook: str) -> None:
    twins = Twins(hook)
    twins.iterate(0)
    with pytest.raises(ValueError, match="takes neither a closure nor arguments"):
        twins.optimizer.step(lambda: 0.0)
    with pytest.raises(ValueError, match="nothing left to clip"):
        twins.optimizer.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match="this hook steps during backward"):
        nn.utils.clip_grad_norm_(twins.ddp.parameters(), 1.0)
    scaler = torch.amp.GradScaler(torch.get_default_device().type)
    scaler.scale(torch.ones(1))
    with pytest.raises(RuntimeError, match="this hook has stepped during backward, with the scaled gradients"):
        scaler.unscale_(twins.optimizer)


TOLD = r"(?=(?s:.*)no_sync)(?=(?s:.*)reduce_to_owner_hook)"


def skip_a_step(twins: Twins, *, wrong: bool) -> None:
    """As a GradScaler does when it finds an infinity."""
    twins.backward(twins.ddp, 2)
    if not wrong:
        twins.optimizer.step()
    twins.optimizer.zero_grad()
    twins.backward(twins.ddp, 3)


def change_the_rate(twins: Twins, *, wrong: bool) -> None:
    twins.backward(twins.ddp, 2)
    if wrong:
        twins.optimizer.param_groups[0]["lr"] *= 0.5


@pytest.mark.ranks(2, backend="gloo")
@each_hook_with("misuse, where", (skip_a_step, "on all ranks"), (change_the_rate, "on rank 1"))
def test_step_refuses_what_backward_has_stepped_otherwise(
    rank: int, hook: str, where: str, misuse: Callable[..., None]
) -> None:
    twins = Twins(hook, process_group=group_of())
    twins.iterate(0)
    twins.iterate(1)
    model, state = copy.deepcopy(twins.ddp.state_dict()), copy.deepcopy(twins.plain.state_dict())
    wrong = where == "on all ranks" or rank == 1
    twins.optimizer.zero_grad()
    misuse(twins, wrong=wrong)
    for _ in range(2 if wrong else 0):
        with pytest.raises(RuntimeError, match=TOLD):
            twins.optimizer.step()
    if not wrong:
        twins.optimizer.step()
    # Not only the ranks that did it: parameters of all are wrong.
    for number in (4, 5):
        twins.optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=TOLD):
            twins.backward(twins.ddp, number)
        with pytest.raises(RuntimeError, match=TOLD):
            twins.optimizer.step()
    twins.ddp.load_state_dict(model)
    twins.optimizer.load_state_dict(state)
    for number in (6, 7):
        twins.iterate(number)
        twins.check(f"after a state was loaded, in iteration {number}")


TOO_LATE: dict[str, Callable[[Twins], object]] = {
    "a second step()": lambda twins: twins.optimizer.step(),
    "a gradient to None": lambda twins: setattr(next(twins.ddp.parameters()), "grad", None),
    "a gradient to zero": lambda twins: next(twins.ddp.parameters()).grad.zero_(),  # type: ignore[union-attr]
    "zero_grad()": lambda twins: twins.optimizer.zero_grad(),
    "zero_grad() to zeros": lambda twins: twins.ddp.zero_grad(set_to_none=False),
}


@pytest.mark.exhaustive_at(1)
@pytest.mark.ranks(1, 2, backend="gloo")
@each_of("what", TOO_LATE, hook=HOOKS[1:], iterations=(0, 2))
def test_what_comes_between_a_backward_that_has_stepped_and_its_step_is_refused(
    what: str, hook: str, iterations: int
) -> None:
    twins = Twins(hook, process_group=group_of())
    for number in range(iterations):
        twins.iterate(number)
    twins.optimizer.zero_grad()
    twins.backward(twins.ddp, 3)
    TOO_LATE[what](twins)
    told = "called again with the same gradients" if what == "a second step()" else "was removed or set to zero after"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{told}.*{TOLD}"):
            twins.optimizer.step()


@pytest.mark.ranks(2, backend="gloo")
@STEPPING_HOOKS
def test_a_learning_rate_in_a_tensor_that_changes_after_the_backward_is_refused(hook: str) -> None:
    twins = Twins(hook, process_group=group_of())
    twins.iterate(0)
    rate = twins.optimizer.param_groups[0]["lr"] = torch.tensor(0.05)
    twins.optimizer.zero_grad()
    twins.backward(twins.ddp, 1)
    rate.mul_(0.5)
    with pytest.raises(RuntimeError, match=f"a hyperparameter was changed after the backward.*{TOLD}"):
        twins.optimizer.step()


@pytest.mark.ranks(2, backend="gloo")
@STEPPING_HOOKS
def test_gradients_that_add_up_over_reducing_backwards_are_refused(hook: str) -> None:
    twins = Twins(hook, process_group=group_of())
    twins.iterate(0)
    twins.optimizer.zero_grad()
    twins.backward(twins.ddp, 1)
    with pytest.raises(RuntimeError, match=TOLD):
        twins.backward(twins.ddp, 2)
    with pytest.raises(RuntimeError, match=f"the last backward has not stepped: .*{TOLD}"):
        twins.optimizer.step()
    # The step of the first backward; the second has changed nothing.
    twins.plain.zero_grad()
    twins.backward(twins.plain_ddp, 1)
    twins.plain.step()
    twins.check("after the refusal")
    twins.optimizer.load_state_dict(twins.plain.state_dict())
    twins.iterate(2)
    twins.check("after a state was loaded")


# An error breaks off the backward on every rank: what it had announced is never sent.
@pytest.mark.ranks(2, backend="gloo", checks="no:messages")
def test_hooks_that_would_come_too_late_and_results_of_the_wrong_size_are_refused() -> None:
    def short(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer()[:1])
        return done

    model = small_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1, overlap_with_ddp=True)
    with pytest.raises(ValueError, match="a step pre-hook would be called after the step"):
        optimizer.register_step_pre_hook(lambda *_: None)
    ddp = DistributedDataParallel(model)
    register("hook_with_zero_step", ddp, optimizer, short)
    with pytest.raises(ValueError, match="has returned 1 elements for a bucket of"):
        ddp(torch.ones(2, 40)).sum().backward()
