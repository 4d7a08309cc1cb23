"""Gradients that a hook has sent to their owners are accumulated, kept, set to zero and discarded as plain ones."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import pytest
import torch
from support.combinations import each_of
from support.ddp_by_collectives import VIEWS_BOTH_WAYS
from support.ddp_gradients import BareTwins, reduced, step_and_check
from support.ddp_training import EVERY_HOOK, VIEWS, WHERE, Twins, batch, with_hook
from support.groups import group_of
from support.training import EVERYWHERE, small_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")


@pytest.mark.exhaustive_at(3)
@pytest.mark.ranks(2, 3, backend=EVERYWHERE)
@VIEWS_BOTH_WAYS
def test_no_sync_accumulates_and_sends_nothing(twins_by: type[Twins], hook: str, views: bool) -> None:
    twins = twins_by(hook, ddp={"gradient_as_bucket_view": views})
    for number in range(4):
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad()
            with ddp.no_sync():
                before = twins.optimizer.traffic.total()
                twins.backward(ddp, 10 * number)
                twins.backward(ddp, 10 * number + 1)
                assert twins.optimizer.traffic.total() == before
            twins.backward(ddp, 10 * number + 2)
            optimizer.step()
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize(("local", "views"), [(True, True), (False, False)], ids=["under no_sync()", "synchronized"])
def test_nothing_is_added_to_a_gradient_that_was_reduced(views: bool, local: bool) -> None:
    twins = Twins(ddp={"gradient_as_bucket_view": views})
    twins.iterate(0)
    twins.optimizer.zero_grad()
    twins.backward(twins.ddp, 1)
    before = twins.optimizer.traffic.total()
    told = r"accumulate under ddp\.no_sync\(\), and synchronize only the last backward.*zeroshard\.shard_gradients\(\)"
    with pytest.raises(RuntimeError, match=told), twins.ddp.no_sync() if local else contextlib.nullcontext():
        twins.backward(twins.ddp, 2)
    if local:
        assert twins.optimizer.traffic.total() == before
        twins.optimizer.step()
        twins.plain.zero_grad()
        twins.backward(twins.plain_ddp, 1)
        twins.plain.step()
    else:
        # The second backward has taken the place of the first one.
        with pytest.raises(RuntimeError, match=told):
            twins.optimizer.step()
        twins.iterate(3)
    twins.check("after the refusal")


@pytest.mark.ranks(2, backend="gloo")
@WHERE
def test_a_second_backward_over_one_forward_is_told_so_on_every_rank(rank: int, where: str) -> None:
    twins = Twins(process_group=group_of())
    twins.iterate(0)
    twins.optimizer.zero_grad()
    loss = twins.ddp(batch(1)).square().mean()
    loss.backward(retain_graph=True)
    if where == "on all ranks" or rank == 1:
        with pytest.raises(RuntimeError, match=r"an earlier backward\(\) has reduced, and nothing can be added to it"):
            loss.backward()
    twins.optimizer.step()
    twins.plain.zero_grad()
    twins.backward(twins.plain_ddp, 1)
    twins.plain.step()
    twins.check("after the refusal")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@each_of("discard", ["optimizer", "model", "to zero"], partition=["whole", "split"], views=[True, False])
def test_windows_can_be_given_up(views: bool, partition: str, discard: str) -> None:
    twins = Twins(partition=partition, ddp={"gradient_as_bucket_view": views})
    for number in range(4):
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            with ddp.no_sync():
                twins.backward(ddp, 10 * number)
                twins.backward(ddp, 10 * number + 1)
            if discard == "model":
                ddp.zero_grad()
            else:
                optimizer.zero_grad(set_to_none=discard == "optimizer")
            twins.backward(ddp, 10 * number + 2)
            optimizer.step()
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_window_that_was_given_up_leaves_nothing() -> None:
    twins = Twins()
    twins.iterate(0)
    for ddp, optimizer in twins.sides:
        optimizer.zero_grad(set_to_none=False)
        with ddp.no_sync():
            twins.backward(ddp, 1)
        optimizer.zero_grad()
        optimizer.step()
    twins.check("after a step without gradients")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("unused", [False, True], ids=["all used", "unused allowed"])
def test_a_step_without_gradients_does_nothing(unused: bool) -> None:
    # A batch that is skipped after zero_grad(), in every iteration from the first one on.
    twins = Twins(ddp={"find_unused_parameters": unused})
    for number in range(4):
        twins.iterate(number)
        for _, optimizer in twins.sides:
            optimizer.zero_grad()
        assert twins.optimizer.clip_grad_norm_(1.0) == 0.0
        for _, optimizer in twins.sides:
            optimizer.step()
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize(
    ("discard", "views"),
    [("optimizer", True), ("model", False), ("to zero", True)],
    ids=["optimizer", "model", "to zero"],
)
def test_gradients_can_be_discarded(views: bool, discard: str) -> None:
    twins = Twins(ddp={"gradient_as_bucket_view": views})
    for number in range(6):
        for ddp, optimizer in twins.sides:
            # In the first iterations zero_grad() comes behind the forward, in which DDP rebuilds its buckets.
            loss = ddp(torch.full((1, 40), 0.1, dtype=torch.float64)).sum()
            if discard == "model":
                ddp.zero_grad()
            else:
                optimizer.zero_grad(set_to_none=discard == "optimizer")
            loss.backward()
            if number % 2:
                optimizer.step()
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
def test_gradients_of_the_last_step_must_be_discarded(hook: str) -> None:
    twins = Twins(hook)
    twins.iterate(0)
    twins.iterate(1)
    with pytest.raises(RuntimeError, match=r"call optimizer.zero_grad\(\) before backward\(\)"):
        twins.backward(twins.ddp, 2)


@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
def test_gradients_that_were_never_reduced_are_not_stepped(hook: str) -> None:
    twins = Twins(hook)
    twins.iterate(0)
    twins.optimizer.zero_grad()
    with twins.ddp.no_sync():
        twins.backward(twins.ddp, 1)
    with pytest.raises(RuntimeError, match=r"has not been reduced.*the last backward\(\) before step\(\) was under"):
        twins.optimizer.step()


@pytest.mark.ranks(2, backend="gloo")
def test_local_gradients_are_not_stepped_before_the_first_reduction() -> None:
    ddp = DistributedDataParallel(small_model())
    optimizer = with_hook("reduce_to_owner_hook", ddp)
    with ddp.no_sync():
        ddp(torch.ones(2, 40)).sum().backward()
    with pytest.raises(RuntimeError, match="has not been reduced"):
        optimizer.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match="has not been reduced"):
        optimizer.step()


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_gradients_set_to_zero_still_move_momentum() -> None:
    twins = Twins(optimizer=torch.optim.SGD, settings={"momentum": 0.9, "weight_decay": 0.1})
    for number in range(4):
        twins.iterate(number)
        for _, optimizer in twins.sides:
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_second_step_uses_the_same_gradients() -> None:
    twins = Twins()
    for number in range(3):
        twins.iterate(number)
        for _, optimizer in twins.sides:
            optimizer.step()
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_closure_is_called_once_before_the_step() -> None:
    def closure(ddp: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = ddp(torch.full((2, 40), 0.3 * number, dtype=torch.float64)).square().mean()
        loss.backward()
        return loss

    twins = Twins()
    for number in range(3):
        losses = []
        for ddp, optimizer in twins.sides:
            losses.append(optimizer.step(functools.partial(closure, ddp, optimizer, number)))
        assert torch.equal(losses[0], losses[1])
        twins.check(f"after iteration {number}")


# ---------------------------------------------------------------------- forwards in which DDP rebuilds its buckets


class Backwards(nn.Module):
    """Calls its layers in the order opposite to that of its parameters, by which DDP first makes its buckets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            inputs = layer(inputs).tanh()
        return inputs


@pytest.mark.exhaustive_at(3)
@pytest.mark.ranks(2, 3, backend=EVERYWHERE)
@each_of("discard", [True, False], partition=["whole", "split"], views=[True, False])
def test_gradients_outlive_a_forward_in_which_ddp_rebuilds_its_buckets(
    partition: str, views: bool, discard: bool
) -> None:
    arguments = {"gradient_as_bucket_view": views, "bucket_cap_mb": 0.02}
    twins = Twins(model=Backwards, partition=partition, ddp=arguments)
    buckets = []
    for number in range(4):
        for ddp, optimizer in twins.sides:
            loss = ddp(batch(number)).square().mean()
            if discard:
                optimizer.zero_grad(set_to_none=number % 2 == 0)
            elif number > 0:
                optimizer.step()
                optimizer.zero_grad()
                loss = ddp(batch(number)).square().mean()
            loss.backward()
            if discard:
                optimizer.step()
        buckets.append([bucket.tensors for bucket in twins.optimizer.describe().buckets])
        twins.check(f"after iteration {number}")
    assert buckets[0] != buckets[1] == buckets[2]


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.ranks(2, backend=EVERYWHERE)
@VIEWS
def test_gradients_outlive_a_forward_that_is_interrupted(views: bool) -> None:
    twins = Twins(ddp={"gradient_as_bucket_view": views})
    for ddp, optimizer in twins.sides:
        twins.backward(ddp, 0)
        handle = ddp.module[0].register_forward_pre_hook(interrupt)
        with contextlib.suppress(KeyboardInterrupt):
            ddp(batch(1))
        handle.remove()
        optimizer.step()
    twins.check("after the step")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_gradients_may_be_zeroed_in_the_forward_in_which_ddp_rebuilds_its_buckets() -> None:
    twins = Twins()
    for number in range(3):
        for ddp, optimizer in twins.sides:
            handle = ddp.module[0].register_forward_pre_hook(lambda *_, optimizer=optimizer: optimizer.zero_grad())
            twins.backward(ddp, number)
            handle.remove()
            optimizer.step()
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@VIEWS
def test_a_hook_that_was_registered_without_the_model_accumulates(views: bool) -> None:
    twins = BareTwins(ddp={"gradient_as_bucket_view": views})
    for number in range(5):
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad()
            with ddp.no_sync():
                twins.backward(ddp, 10 * number)
            twins.backward(ddp, 10 * number + 1)
            optimizer.step()
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_gradients_that_are_kept_while_ddp_rebuilds_its_buckets_are_refused_without_the_model() -> None:
    twins = BareTwins()
    twins.backward(twins.ddp, 0)
    match = r"in its second forward: call zero_grad\(\) before that. .* if register_reduce_to_owner\("
    with pytest.raises(RuntimeError, match=match):
        twins.backward(twins.ddp, 1)


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_gradients_are_not_copied_between_forward_and_backward() -> None:
    # Of a model whose buckets are never rebuilt.
    twins = Twins(ddp={"find_unused_parameters": True})
    twins.iterate(0)
    loss = twins.ddp(batch(1)).square().mean()
    param = next(twins.ddp.parameters())
    with pytest.raises(RuntimeError, match="copying is not supported on it"):
        torch.empty_like(param).copy_(param.grad)
    twins.optimizer.zero_grad()
    loss.backward()


@pytest.mark.ranks(1, 2, backend="gloo")
@pytest.mark.parametrize(
    ("accumulates", "partition", "views"),
    [(False, "whole", False), (False, "level", False), (True, "split", True)],
    ids=["whole", "level", "accumulated and split"],
)
def test_a_hook_without_the_model_adds_to_gradients_that_were_set_to_zero(
    accumulates: bool, partition: str, views: bool
) -> None:
    twins = BareTwins(
        "reduce_to_owner_hook", partition=partition, parameters_as_bucket_view=views, exact=partition == "whole"
    )
    for number in range(4):
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad(set_to_none=False)
            if accumulates:
                with ddp.no_sync():
                    twins.backward(ddp, 10 + number)
            twins.backward(ddp, number)
            optimizer.step()
        twins.check(f"after iteration {number}")


COPIES: dict[str, Callable[[Twins], object]] = {
    "another DDP": lambda twins: DistributedDataParallel(twins.ddp.module, gradient_as_bucket_view=True),
    "share_memory()": lambda twins: twins.ddp.module.share_memory(),
}


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("how", COPIES)
def test_a_model_is_wrapped_again_or_shared_only_after_zero_grad(how: str) -> None:
    twins, *_ = reduced()
    with pytest.raises(RuntimeError, match=r"^[^\n]* is not supported on it: [^\n]*call zero_grad\(\) before"):
        COPIES[how](twins)
    step_and_check(twins)
    twins.optimizer.zero_grad()
    COPIES[how](twins)
