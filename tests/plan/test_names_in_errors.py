"""Errors name parameters as the model does, where its names are known."""

from __future__ import annotations

import pytest
import torch
from support.combinations import FLAG
from support.ddp_training import HOOKS, batch, register, steps_in_backward
from support.training import cutting, set_gradients, small_model
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_testing import raises_on


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("named", FLAG, ids=["unnamed", "named"])
def test_a_sparse_gradient_of_a_cut_tensor_is_named(named: bool) -> None:
    model = nn.Sequential(nn.Embedding(400, 64, sparse=True))
    params = model.named_parameters() if named else model.parameters()
    optimizer = ZeroRedundancyOptimizer(params, optim.SGD, partition=cutting("split"), lr=0.1)
    model(torch.tensor([1])).sum().backward()
    name = "0.weight" if named else "param.0"
    with raises_on(RuntimeError, ranks=(0, 1), match=rf"tensor 0 '{name}' of shape \(400, 64\) has a sparse gradient"):
        optimizer.step()


def with_a_hook(hook: str) -> tuple[nn.Module, DistributedDataParallel, ZeroRedundancyOptimizer]:
    model = small_model().double()
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(
        list(ddp.parameters())[:-1], optim.AdamW, overlap_with_ddp=steps_in_backward(hook), partition="split"
    )
    optimizer.add_param_group({"params": model[4].weight})
    register(hook, ddp, optimizer)
    return model, ddp, optimizer


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("hook", HOOKS[:2])
def test_a_hook_that_is_registered_on_a_model_knows_its_names(hook: str) -> None:
    model, ddp, optimizer = with_a_hook(hook)
    names = [name for name, _ in model.named_parameters()]
    for seed in range(2):
        optimizer.zero_grad()
        ddp(batch(seed)).square().mean().backward()
        optimizer.step()
        assert [spec.name for spec in optimizer.plan.tensors] == names
    with pytest.raises(RuntimeError, match=r"'2\.weight'"):
        print(model[2].weight.grad.sum())
    # For which DDP waits; and the plan is another one.
    model[0].requires_grad_(False)
    optimizer.zero_grad()
    with raises_on(RuntimeError, ranks=(0, 1), match=r"tensor \d '\d\.(weight|bias)' has not been reduced"):
        ddp(batch(2)).square().mean().backward()
        optimizer.step()


@pytest.mark.ranks(2, backend="gloo")
def test_names_do_not_change_who_owns_what_nor_what_is_saved(rank: int) -> None:
    _, ddp, optimizer = with_a_hook("reduce_to_owner_hook")
    other = small_model().double()
    groups = [{"params": list(other.parameters())[:-1]}, {"params": other[4].weight}]
    plain = ZeroRedundancyOptimizer(groups, optim.AdamW, partition="split")
    assert optimizer.plan.owners == plain.plan.owners
    ddp(batch(0)).square().mean().backward()
    optimizer.step()
    set_gradients(other.parameters(), 0)
    plain.step()
    saved = []
    for each in (optimizer, plain):
        each.consolidate_state_dict()
        saved.append(each.state_dict() if rank == 0 else {"param_groups": None})
    assert saved[0]["param_groups"] == saved[1]["param_groups"]
