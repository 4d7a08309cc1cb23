"""Param groups that are added after an optimizer was built: as the unsharded optimizer takes them, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.combinations import LAYOUTS, VIEWS, WHERE, each_of
from support.refusals import Run, assert_blames, is_mine
from support.training import (
    EVERYWHERE,
    assert_bitwise_equal,
    assert_same_state,
    cutting,
    set_gradients,
    train_equally,
    twin_optimizers,
    twins,
)
from support.two_classes import language_model, separate, sharded, step_all
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError

PARTS = slice(0, 2), slice(2, -1), slice(-1, None)
pytestmark = pytest.mark.usefixtures("tensors_on_the_device")


@pytest.mark.ranks(3, backend=EVERYWHERE)
@LAYOUTS
def test_groups_added_before_the_first_step_and_after_it(partition: str, as_bucket_view: bool) -> None:
    pair = twins()
    first, middle, last = ([list(module.parameters())[part] for module in pair] for part in PARTS)
    how: dict[str, Any] = {"partition": cutting(partition), "parameters_as_bucket_view": as_bucket_view}
    sharded = ZeroRedundancyOptimizer(first[0], optim.Adam, lr=0.01, **how)
    plain = optim.Adam(first[1], lr=0.01)
    # The new group has the inner optimizer's defaults at once.
    given = {"params": last[0], "lr": 0.5}
    sharded.add_param_group(given)
    assert sharded.param_groups[1] is given
    plain.add_param_group({"params": last[1], "lr": 0.5})
    assert sharded.param_groups[1]["betas"] == (0.9, 0.999)
    train_equally(pair, (sharded, plain), range(2))
    for optimizer, params in zip((sharded, plain), middle, strict=True):
        optimizer.param_groups[0]["lr"] = 0.25
        optimizer.add_param_group({"params": (p for p in params), "weight_decay": 0.1})
        assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.5, 0.01]
    train_equally(pair, (sharded, plain), range(2, 5))


@pytest.mark.ranks(2, backend=EVERYWHERE)
@VIEWS
def test_a_group_without_parameters_can_be_added(as_bucket_view: bool) -> None:
    pair = twins()
    optimizers = twin_optimizers(pair, optim.Adam, as_bucket_view=as_bucket_view)
    extra = [nn.Parameter(torch.ones(5)) for _ in pair]
    for step in range(4):
        for module, optimizer, late in zip(pair, optimizers, extra, strict=True):
            if step == 1:
                optimizer.add_param_group({"params": [], "lr": 0.5})
            if step == 2:
                optimizer.add_param_group({"params": [late], "lr": 0.25})
            set_gradients([*module.parameters(), late], step)
            optimizer.step()
        assert_bitwise_equal(*pair, f"after step {step}")
    assert torch.equal(*extra)
    optimizers[0].consolidate_state_dict(to=0)
    if optimizers[0].rank == 0:
        assert_same_state(optimizers[0].state_dict(), optimizers[1].state_dict())


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_group_of_a_third_class_is_added() -> None:
    model, reference = twins(language_model)
    optimizer, plain = sharded(model), separate(reference)
    step_all(model, [optimizer], 0)
    step_all(reference, plain, 0)
    one, other = (nn.Parameter(torch.ones(8, device=next(model.parameters()).device)) for _ in range(2))
    optimizer.add_param_group({"params": [one], "optimizer_class": partial(optim.SGD, momentum=0.9), "lr": 0.1})
    plain.append(optim.SGD([other], lr=0.1, momentum=0.9))
    assert optimizer.group_assignment == [0, 1, 1, 2]
    assert set(optimizer.defaults) == {"lr", "weight_decay"}
    for step in range(1, 4):
        one.grad, other.grad = (torch.full_like(each, step) for each in (one, other))
        step_all(model, [optimizer], step)
        step_all(reference, plain, step)
    assert_bitwise_equal(model, reference, "in the end")
    assert torch.equal(one, other)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("first", "added"),
    [
        ({"optimizer_class": optim.AdamW}, {}),
        ({"optimizer_class": partial(optim.Adam, lr=0.5, amsgrad=True)}, {"lr": 0.1}),
        ({"optimizer_class": optim.Muon}, {"lr": 0.2}),
    ],
    ids=["another class", "other arguments", "Muon"],
)
def test_a_group_that_is_added_without_a_class_has_the_defaults_of_the_constructors(first: Any, added: Any) -> None:
    one, two, three = (nn.Parameter(torch.ones(4, 4)) for _ in range(3))
    optimizer = ZeroRedundancyOptimizer([{"params": [one], **first}], optim.Adam, weight_decay=0.3)
    optimizer.add_param_group({"params": [two], **added})
    expected = optim.Adam([{"params": [three], **added}], weight_decay=0.3)
    assert {**optimizer.param_groups[1], "params": ()} == {**expected.param_groups[0], "params": ()}
    for step in range(1, 3):
        for param in (one, two, three):
            param.grad = torch.full_like(param, step)
        optimizer.step()
        expected.step()
    assert torch.equal(two, three)


class Refusing(optim.SGD):
    """Refuses tensors of three axes when a group is added, as Muon refuses all but matrices."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        if any(param.dim() == 3 for param in params):
            raise ValueError("no tensors of three axes, please")
        super().add_param_group({**param_group, "params": params})


@pytest.mark.ranks(3, backend="gloo")
@VIEWS
def test_a_group_whose_tensors_the_class_refuses_on_their_owner_alone(rank: int, as_bucket_view: bool) -> None:
    run = Run(Refusing, {"lr": 0.1}, parameters_as_bucket_view=as_bucket_view)
    before = run.local_state()
    with pytest.raises(ValueError, match=r"rank \d: Refusing: no tensors of three axes"):
        run.sharded.add_param_group({"params": [nn.Parameter(torch.ones(2, 2, 2))]})
    assert run.local_state() == before
    assert len(run.sharded.param_groups) == 1
    run.assert_goes_on()


BAD: dict[str, tuple[Callable[[Run], Any], type[Exception], str]] = {
    "on the meta device": (
        lambda run: {"params": [nn.Parameter(torch.zeros(3, device="meta"))]},
        ValueError,
        "parameter 0 of group 1, .* on the meta device",
    ),
    "a tensor that is there already": (
        lambda run: {"params": [nn.Parameter(torch.ones(3)), next(run.model.parameters())]},
        ValueError,
        "more than one parameter group",
    ),
    "no params": (lambda run: {"lr": 3}, ValueError, "'params'"),
    "no dict": (lambda run: [nn.Parameter(torch.ones(3))], TypeError, "must be a dict"),
    "numbers": (lambda run: {"params": [1]}, TypeError, "int"),
}


@pytest.mark.ranks(2, backend="gloo")
@each_of("name", BAD, where=WHERE)
def test_a_group_that_cannot_be_added_leaves_everything_as_it_was(rank: int, name: str, where: str) -> None:
    make, error, words = BAD[name]
    run, extra = Run(), [nn.Parameter(torch.ones(3)) for _ in range(2)]
    good = {"params": [extra[0]]}
    with pytest.raises(error, match=words) as caught:
        run.sharded.add_param_group(make(run) if is_mine(where, rank) else good)
    assert_blames(caught.value, where)
    assert len(run.sharded.param_groups) == len(run.sharded.optim.param_groups) == 1
    run.assert_goes_on()
    # A group that can be added is taken afterwards.
    for optimizer, param in zip((run.sharded, run.plain), extra, strict=True):
        optimizer.add_param_group(good if param is extra[0] else {"params": [param]})
        param.grad = torch.ones(3)
    run.assert_goes_on()
    assert torch.equal(*extra)


@pytest.mark.ranks(2, backend="gloo")
def test_groups_that_differ_between_ranks_are_named(rank: int) -> None:
    run = Run()
    with pytest.raises(DisagreementError, match=r"add_param_group.*tensor 9"):
        run.sharded.add_param_group({"params": [nn.Parameter(torch.zeros(2 + rank))]})
    assert len(run.sharded.param_groups) == len(run.sharded.optim.param_groups) == 1
    run.assert_goes_on()
