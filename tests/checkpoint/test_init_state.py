"""init_state(): the state that a plain optimizer has after the step by which torch initializes it, without a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.checkpointing import matrices
from support.ddp_training import HOOKS, Twins
from support.training import (
    DENSE_OPTIMIZERS,
    EVERYWHERE,
    assert_bitwise_equal,
    assert_same_state,
    train,
    train_all,
    twin_optimizers,
    twins,
)
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import _init_optim_state, get_optimizer_state_dict
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError
from zeroshard_integrations.ddp import register_reduce_to_owner
from zeroshard_testing import assert_replicas_equal

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")
ALL = {**DENSE_OPTIMIZERS, "Muon": (optim.Muon, {}), "AdamW-tensor-lr": (optim.AdamW, {"lr": torch.tensor(0.01)})}


def bits(module: nn.Module) -> list[bytes]:
    return [
        param.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes() for param in module.parameters()
    ]


def make_negative_zeros(*modules: nn.Module) -> None:
    with torch.no_grad():
        for module in modules:
            next(module.parameters())[0] = -0.0


@pytest.mark.ranks(2, backend=EVERYWHERE)
# In turn; Adafactor and Muon, which are not elementwise, stay whole.
@pytest.mark.parametrize(("name", "partition"), [*zip(ALL, itertools.cycle(["whole", "split"]), strict=False)])
def test_state_is_that_of_a_plain_optimizer(rank: int, name: str, partition: str) -> None:
    optimizer_class, settings = ALL[name]
    model, reference = twins(matrices) if name == "Muon" else twins()
    # A step with learning rate 0 may lose the sign.
    make_negative_zeros(model, reference)
    sharded, plain = twin_optimizers((model, reference), optimizer_class, partition, **settings)
    before = bits(model)
    sharded.init_state()
    assert bits(model) == before
    assert all(param.grad is None for param in model.parameters())
    _init_optim_state(plain)
    sharded.consolidate_state_dict(to=1)
    if rank == 1:
        assert_same_state(sharded.state_dict(), plain.state_dict())
    # What lists the state steps nothing any more.
    get_optimizer_state_dict(model, sharded)
    assert bits(model) == before
    make_negative_zeros(reference)
    train(model, sharded, range(3))
    train(reference, plain, range(3))
    assert_bitwise_equal(model, reference, "after 3 steps")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_state_that_is_there_stays() -> None:
    model, reference = twins()
    sharded, plain = twin_optimizers((model, reference), optim.AdamW)
    train(model, sharded, range(2))
    sharded.init_state()
    train(model, sharded, range(2, 4))
    train(reference, plain, range(4))
    assert_bitwise_equal(model, reference, "after 4 steps")


@pytest.mark.ranks(3, backend=EVERYWHERE)
def test_frozen_parameters_get_no_state_and_gradients_stay() -> None:
    model, reference = twins()
    for module in (model, reference):
        module[0].weight.requires_grad_(False)
    sharded, plain = twin_optimizers((model, reference), optim.AdamW)
    model[0].bias.grad = torch.ones_like(model[0].bias)
    sharded.init_state()
    assert model[0].bias.grad is not None
    assert torch.equal(model[0].bias.grad, torch.ones_like(model[0].bias))
    assert [param in sharded.state for param in model.parameters()] == [p.requires_grad for p in model.parameters()]
    _init_optim_state(plain)
    for module in (model, reference):
        module[0].weight.requires_grad_(True)
    train(model, sharded, range(3))
    train(reference, plain, range(3))
    assert_bitwise_equal(model, reference, "after unfreezing")


@pytest.mark.ranks(3, backend=EVERYWHERE)
def test_ranks_without_a_tensor_list_the_state(rank: int) -> None:
    param = nn.Parameter(torch.ones(3))
    sharded = ZeroRedundancyOptimizer([param], optim.AdamW)
    sharded.init_state()
    assert list(sharded.state) == [param]


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_hooks_are_not_called() -> None:
    model, _ = twins()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW)
    called: list[str] = []
    sharded.register_step_pre_hook(lambda *_: called.append("pre"))
    sharded.register_step_post_hook(lambda *_: called.append("post"))
    sharded.init_state()
    assert called == []


class FailsOnOneRank(optim.AdamW):
    """An optimizer whose step raises where it has more than three tensors."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if sum(len(group["params"]) for group in self.param_groups) > 3:
            raise RuntimeError("too many tensors")
        return super().step(closure)


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_an_error_on_one_rank_is_raised_on_all(rank: int) -> None:
    model, _ = twins()
    sharded = ZeroRedundancyOptimizer(model.parameters(), FailsOnOneRank)
    with pytest.raises(RuntimeError, match="too many tensors"):
        sharded.init_state()
    assert not sharded.state
    assert not sharded.optim.state


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_another_model_on_one_rank_is_named(rank: int) -> None:
    model, _ = twins()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW)
    model[0].weight.requires_grad_(rank == 0)
    with pytest.raises(DisagreementError, match="tensor 0"):
        sharded.init_state()
    assert not sharded.state


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("hook", HOOKS)
def test_state_is_made_under_a_hook(rank: int, hook: str) -> None:
    pair = Twins(hook)
    before = bits(pair.ddp)
    pair.optimizer.init_state()
    listed = get_optimizer_state_dict(pair.ddp, pair.optimizer)
    assert bits(pair.ddp) == before
    _init_optim_state(pair.plain)
    assert listed["state"].keys() == get_optimizer_state_dict(pair.plain_ddp, pair.plain)["state"].keys()
    for seed in range(3):
        pair.iterate(seed)
    pair.check("after 3 iterations")


class RegisteredTwins(Twins):
    """With the optimizer told of the hook before the first backward."""

    def register(self, *_: object) -> None:
        register_reduce_to_owner(self.ddp, self.optimizer)


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_torch_makes_a_step_under_a_registered_hook_if_init_state_was_not_called() -> None:
    pair = RegisteredTwins("reduce_to_owner_hook")
    listed = get_optimizer_state_dict(pair.ddp, pair.optimizer)
    assert listed["state"].keys() == get_optimizer_state_dict(pair.plain_ddp, pair.plain)["state"].keys()
    for seed in range(3):
        pair.iterate(seed)
    pair.check("after 3 iterations")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("hook", HOOKS)
def test_an_optimizer_without_state_is_listed_in_the_middle_of_a_run(rank: int, hook: str) -> None:
    pair = Twins(hook, optimizer=optim.SGD, settings={"lr": 0.1})
    for seed in range(2):
        pair.iterate(seed)
    for ddp, optimizer in pair.sides:
        optimizer.zero_grad()
        assert get_optimizer_state_dict(ddp, optimizer)["param_groups"][0]["lr"] == 0.1
    for seed in range(2, 4):
        pair.iterate(seed)
    pair.check("after 4 iterations")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("hook", HOOKS)
def test_a_users_step_with_learning_rate_0_is_not_torchs(rank: int, hook: str) -> None:
    pair = Twins(hook)
    for _, optimizer in pair.sides:
        optimizer.param_groups[0]["lr"] = 0.0
    pair.iterate(0)
    for _, optimizer in pair.sides:
        optimizer.param_groups[0]["lr"] = 0.1
    for seed in range(1, 3):
        pair.iterate(seed)
    pair.check("after warming up")
    fresh = Twins(hook)
    fresh.optimizer.param_groups[0]["lr"] = 0.0
    with fresh.ddp.no_sync():
        fresh.backward(fresh.ddp, 0, None)
    if hook == "reduce_to_owner_hook":
        # The hook is not known yet: these gradients are stepped as they are.
        return
    with pytest.raises(RuntimeError, match="has not been reduced"):
        fresh.optimizer.step()
    assert not fresh.optimizer.state


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_what_was_consolidated_before_there_was_state_is_listed_again(rank: int) -> None:
    model, _ = twins()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW)
    sharded.consolidate_state_dict()
    sharded.init_state()
    assert len(sharded.state_dict()["state"]) == len(list(model.parameters()))


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_state_of_frozen_parameters_is_made_once_they_are_unfrozen(rank: int) -> None:
    model, _ = twins()
    model.requires_grad_(False)
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW)
    sharded.init_state()
    model.requires_grad_(True)
    assert len(get_optimizer_state_dict(model, sharded)["state"]) == len(list(model.parameters()))


@pytest.mark.ranks(4, backend=EVERYWHERE)
def test_torch_lists_state_on_more_ranks_than_tensors(rank: int) -> None:
    # torch steps an optimizer that looks untrained, which would hang on one rank alone.
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam)
    train_all([(model, sharded)], range(1))
    assert set(get_optimizer_state_dict(model, sharded)["state"]) == {"weight", "bias"}
    sharded.consolidate_state_dict(to=2)
    assert set(get_optimizer_state_dict(model, sharded)["state"]) == {"weight", "bias"}
    train_all([(model, sharded)], range(1, 2))
    assert_replicas_equal(model.parameters())


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("hook", HOOKS)
def test_torch_lists_an_optimizer_that_keeps_no_state(hook: str) -> None:
    # torch steps an optimizer that looks untrained, which a hook refuses, and leaves the learning rate 0.
    pair = Twins(hook, optimizer=optim.SGD)
    pair.optimizer.init_state()
    for seed in range(3):
        assert get_optimizer_state_dict(pair.ddp, pair.optimizer)["state"] == {}
        pair.iterate(seed)
        pair.optimizer.zero_grad()
    pair.check("after 3 iterations")
