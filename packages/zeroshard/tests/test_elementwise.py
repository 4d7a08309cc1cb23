"""Which optimizers may work on cut tensors."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from torch import nn, optim
from zeroshard.plan.eligibility import ELEMENTWISE, check_shardable
from zeroshard.plan.group_classes import GroupClass

NOT_ELEMENTWISE = {optim.LBFGS, optim.SparseAdam, optim.Adafactor, optim.Muon}


def test_every_class_of_torch_is_known() -> None:
    classes = {item for _, item in inspect.getmembers(optim, inspect.isclass) if issubclass(item, optim.Optimizer)} - {
        optim.Optimizer
    }
    assert classes == ELEMENTWISE | NOT_ELEMENTWISE


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=lambda kind: kind.__name__))
def test_cutting_does_not_change_what_is_called_elementwise(kind: type[optim.Optimizer]) -> None:
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(192))
    parts = [nn.Parameter(whole.detach()[:64].clone()), nn.Parameter(whole.detach()[64:].clone())]
    optimizers = [kind([whole], lr=0.01), kind(parts, lr=0.01)]
    for _ in range(3):
        whole.grad = torch.randn(192)
        parts[0].grad, parts[1].grad = whole.grad[:64].clone(), whole.grad[64:].clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(whole, torch.cat([part.detach() for part in parts]))


def test_a_subclass_must_be_declared() -> None:
    class Child(optim.Adam):
        pass

    class Declared(optim.Adam):
        elementwise = True

    assert not GroupClass(Child, {}).may_be_cut
    assert GroupClass(Child, {}, elementwise=True).may_be_cut
    assert GroupClass(Declared, {}).may_be_cut
    assert GroupClass(functools.partial(optim.Adam, lr=0.1), {}).may_be_cut


def test_lbfgs_is_refused_by_name_also_behind_a_partial() -> None:
    with pytest.raises(ValueError, match="LBFGS cannot be sharded"):
        check_shardable(functools.partial(optim.LBFGS, lr=1.0))
    with pytest.raises(TypeError, match="must be an optimizer class"):
        check_shardable("Adam")  # type: ignore[arg-type]
