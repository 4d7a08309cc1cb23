"""Groups of several classes that are refused on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.combinations import WHERE, each_of
from support.refusals import is_mine
from support.training import EVERYWHERE, assert_bitwise_equal, set_gradients, twins
from support.two_classes import groups_of, language_model, parted, separate, sharded, step_all
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer, join_state_dicts
from zeroshard_comm import DisagreementError
from zeroshard_core import level
from zeroshard_testing import assert_replicas_equal

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_wrong_uses_of_several_classes_are_refused(rank: int) -> None:
    model = language_model()
    hidden, outer, rest = parted(model)
    optimizer = sharded(model)
    with pytest.raises(AttributeError, match=r"2 local optimizers, for Muon \+ AdamW: use local_optimizers"):
        _ = optimizer.optim
    with pytest.raises(TypeError, match="takes no keyword arguments with several optimizer classes, but got grads"):
        optimizer.step(grads=None)
    with pytest.raises(ValueError, match="param group 0 has 'betas', which Muon does not take, but AdamW does"):
        ZeroRedundancyOptimizer(
            [{"params": hidden, "optimizer_class": optim.Muon, "betas": (0, 0)}, {"params": rest}], optim.AdamW
        )
    with pytest.raises(ValueError, match=r"Muon, the class of param group 0, is not known .* Use partition='level'"):
        sharded(model, partition="split")
    with pytest.raises(ValueError, match="only supports 2D"):
        ZeroRedundancyOptimizer([{"params": rest, "optimizer_class": optim.Muon}, {"params": outer}], optim.AdamW)
    with pytest.raises(TypeError, match="must be an optimizer class, but got SGD"):
        ZeroRedundancyOptimizer([{"params": rest, "optimizer_class": optim.SGD(rest)}, {"params": outer}], optim.AdamW)
    with pytest.raises(ValueError, match="cannot be sharded"):
        ZeroRedundancyOptimizer([{"params": rest, "optimizer_class": optim.LBFGS}, {"params": outer}], optim.AdamW)
    other = [optim.Muon, optim.SGD][rank]
    with pytest.raises(RuntimeError, match="optimizer is 'Muon, AdamW, AdamW' on rank 0 and 'SGD, AdamW, AdamW' on"):
        ZeroRedundancyOptimizer([{**groups_of(model)[0], "optimizer_class": other}, *groups_of(model)[1:]], optim.AdamW)
    muon, adamw = separate(model)
    for state_dict in (muon.state_dict(), adamw.state_dict()):
        with pytest.raises(ValueError, match="the assignment has"):
            join_state_dicts([state_dict, state_dict], [0, 1, 1])
    swapped = optimizer.state_dict()
    swapped["param_groups"] = [{**group, "amsgrad": False} for group in swapped["param_groups"]]
    with pytest.raises(ValueError, match="loaded state dict: group 0 has 'amsgrad', which Muon does not take"):
        optimizer.load_state_dict(swapped)
    groups = len(optimizer.param_groups)
    with pytest.raises(ValueError, match="param group 3 has 'ns_steps', which AdamW does not take, but Muon does"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "ns_steps": 5})
    assert len(optimizer.param_groups) == groups
    step_all(model, [optimizer], 0)


class WithFlag(optim.SGD):
    """Has an argument that is no hyperparameter."""

    def __init__(self, params: Any, lr: float = 0.1, flag: bool = False) -> None:
        super().__init__(params, lr=lr)


@pytest.mark.ranks(2)
def test_what_differs_between_ranks_is_told_on_both(rank: int) -> None:
    model = language_model()
    hidden, outer, rest = parted(model)
    groups = [{"params": hidden, "optimizer_class": optim.Muon}, {"params": [*outer, *rest]}]
    optimizer = ZeroRedundancyOptimizer(groups, optim.AdamW)
    set_gradients(model.parameters(), 0)
    with pytest.raises(TypeError, match=r"rank 1: step\(\) takes no keyword arguments with several optimizer classes"):
        optimizer.step(**({"grads": None} if rank else {}))
    optimizer.step()
    groups[0]["optimizer_class"], groups[0]["optimizer_defaults"] = WithFlag, {"flag": bool(rank)}
    with pytest.raises(DisagreementError, match=r"optimizer_defaults is .*False.* on rank 0 and .*True"):
        ZeroRedundancyOptimizer(groups, optim.AdamW)


def absent(*arguments: Any, **keywords: Any) -> optim.Optimizer:
    """As a class whose module one rank has not got."""
    raise ImportError("no module named 'muon_kernels'")


def matrices(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size, 8)) for size in sizes]


BAD_GROUPS: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    "a class that cannot be imported": (
        lambda: {"params": matrices(4), "optimizer_class": absent},
        ImportError,
        "no module named 'muon_kernels'",
    ),
    "an instance": (
        lambda: {"params": matrices(4), "optimizer_class": optim.SGD(matrices(4))},
        TypeError,
        "must be an optimizer class, but got SGD",
    ),
    "an unknown cost": (
        lambda: {"params": matrices(4), "cost": "newton_schulz"},
        TypeError,
        "`cost` of a param group must be a function .* but is 'newton_schulz'",
    ),
    "a cost that is no number": (
        lambda: {"params": matrices(4), "optimizer_class": optim.Muon, "cost": lambda spec: "heavy"},
        TypeError,
        "should be a number, but is 'heavy'",
    ),
    "a dict of costs without the tensor": (
        lambda: {"params": matrices(4), "optimizer_class": optim.Muon, "cost": {}},
        ValueError,
        "the dict of costs has no tensor",
    ),
    "arguments that its class does not take": (
        lambda: {"params": matrices(4), "optimizer_class": optim.Muon, "optimizer_defaults": {"betas": (0, 0)}},
        TypeError,
        "unexpected keyword argument 'betas'",
    ),
}


@pytest.mark.ranks(2, backend=EVERYWHERE)
@each_of("name", BAD_GROUPS, where=WHERE, partition=["whole", "level"])
def test_a_group_that_cannot_be_used_is_refused_on_every_rank(rank: int, where: str, name: str, partition: str) -> None:
    make, error, words = BAD_GROUPS[name]

    def bad() -> dict[str, Any]:
        made = make()
        return made if is_mine(where, rank) else {"params": made["params"], "lr": 0.1}

    model, reference = twins(language_model)
    with pytest.raises(error, match=words) as caught:
        ZeroRedundancyOptimizer([*groups_of(model), bad()], optim.AdamW, partition=partition)
    assert where == "on all ranks" or "rank 1: " in str(caught.value)
    optimizer, plain = sharded(model, partition=partition), separate(reference)
    plan, groups = optimizer.plan, copy.deepcopy(optimizer.param_groups)
    for step in range(3):
        with pytest.raises(error, match=words):
            optimizer.add_param_group(bad())
        assert (optimizer.plan, optimizer.group_assignment) == (plan, [0, 1, 1])
        assert [group.keys() for group in optimizer.param_groups] == [group.keys() for group in groups]
        step_all(model, [optimizer], step)
        step_all(reference, plain, step)
        assert_bitwise_equal(model, reference, f"after step {step}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_an_order_of_classes_that_differs_between_ranks_is_named(rank: int) -> None:
    model, reference = twins(language_model)
    hidden, outer, rest = parted(model)
    classes = [optim.Muon, optim.AdamW, optim.SGD]
    swapped = classes if rank == 0 else [classes[1], classes[0], classes[2]]
    made = [
        {"params": params, "optimizer_class": each, "lr": 0.1, "weight_decay": 0.0}
        for params, each in zip((hidden, outer, rest), swapped, strict=True)
    ]
    with pytest.raises(RuntimeError, match=r"'Muon, AdamW, SGD' on rank 0 and 'AdamW, Muon, SGD' on rank 1"):
        ZeroRedundancyOptimizer(made, optim.AdamW)
    optimizer, plain = sharded(model), separate(reference)
    for step in range(3):
        with pytest.raises(RuntimeError, match=r"Muon.* on rank 0 and .*SGD.* on rank 1"):
            optimizer.add_param_group({"params": matrices(4), "optimizer_class": classes[2 * rank]})
        assert optimizer.group_assignment == [0, 1, 1]
        step_all(model, [optimizer], step)
        step_all(reference, plain, step)
        assert_bitwise_equal(model, reference, f"after step {step}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_cap_that_nothing_can_meet_is_refused(rank: int) -> None:
    # Of 15 rows, some rank holds 8: more than the mean, which AdamW's state for a scale is part of.
    made = matrices(5, 5, 2, 2, 1)
    scale = nn.Parameter(torch.ones(()))
    groups = [{"params": made, "optimizer_class": optim.Muon}, {"params": [scale]}]
    with pytest.raises(ValueError, match=r"tensors that stay whole put .* use level\(state_cap=1.041\) or more"):
        ZeroRedundancyOptimizer(groups, optim.AdamW, partition=level(state_cap=1.0))
    with pytest.raises(ValueError, match=r"rank 1: tensors that stay whole put .* use level\(state_cap=1.041\)"):
        ZeroRedundancyOptimizer(groups, optim.AdamW, partition=level(state_cap=1.0 if rank else 1.041))
    optimizer = ZeroRedundancyOptimizer(groups, optim.AdamW, partition=level(state_cap=1.041))
    set_gradients([*made, scale], 0)
    optimizer.step()
    assert_replicas_equal([*made, scale])
