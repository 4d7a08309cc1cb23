"""Sharded training gives, bit for bit, what the unsharded optimizer gives (gradients replicated, one thread)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from support.checkpointing import matrices
from support.combinations import LAYOUTS, VIEWS
from support.training import (
    DENSE_OPTIMIZERS,
    ELEMENTWISE_OPTIMIZERS,
    EVERYWHERE,
    assert_bitwise_equal,
    assert_same_state,
    set_gradients,
    small_model,
    twin_optimizers,
    twins,
)
from torch import optim
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_testing import assert_replicas_equal

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")
STEPS = 4


def check_parity(optimizer_class: type[optim.Optimizer], settings: dict[str, Any], rank: int, **ours: Any) -> None:
    model, reference = twins()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, **ours, **settings)
    plain = optimizer_class(reference.parameters(), **settings)
    for step in range(STEPS):
        # One parameter has no gradient at first, and must not be touched by momentum or weight decay.
        none = {3} if step < 2 else set()
        set_gradients(model.parameters(), step, none=none)
        set_gradients(reference.parameters(), step, none=none)
        sharded.step()
        plain.step()
        assert_bitwise_equal(model, reference, f"after step {step}")
        assert_replicas_equal(model.parameters())
    sharded.consolidate_state_dict(to=0)
    if rank == 0:
        assert_same_state(sharded.state_dict(), plain.state_dict())


def of_every_class(names: Iterable[str]) -> pytest.MarkDecorator:
    """By default, each class on 2 ranks without views or on 3 ranks with views, in turn."""
    layouts = itertools.cycle([(2, "params"), (3, "views")])
    cases = [f"{size}-{name}-{views}" for name, (size, views) in zip(names, layouts, strict=False)]
    return pytest.mark.by_default(" | ".join(cases))


def assert_steps_are_equal(
    models: tuple[torch.nn.Module, torch.nn.Module], optimizers: tuple[optim.Optimizer, optim.Optimizer]
) -> None:
    """Step both with the same gradients, and compare after each step."""
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            set_gradients(model.parameters(), step)
            optimizer.step()
        assert_bitwise_equal(*models, f"after step {step}")


@of_every_class(DENSE_OPTIMIZERS)
@pytest.mark.ranks(2, 3, 4, backend=EVERYWHERE)
@VIEWS
@pytest.mark.parametrize("name", DENSE_OPTIMIZERS)
def test_whole_tensors(rank: int, name: str, as_bucket_view: bool) -> None:
    optimizer_class, settings = DENSE_OPTIMIZERS[name]
    check_parity(optimizer_class, settings, rank, parameters_as_bucket_view=as_bucket_view)


@of_every_class(ELEMENTWISE_OPTIMIZERS)
@pytest.mark.ranks(2, 3, 4, backend=EVERYWHERE)
@VIEWS
@pytest.mark.parametrize("name", ELEMENTWISE_OPTIMIZERS)
def test_cut_tensors(rank: int, name: str, as_bucket_view: bool) -> None:
    optimizer_class, settings = ELEMENTWISE_OPTIMIZERS[name]
    check_parity(optimizer_class, settings, rank, partition="split", parameters_as_bucket_view=as_bucket_view)


@pytest.mark.by_default("2-params | 3-views")
@pytest.mark.ranks(2, 3, 4, backend=EVERYWHERE)
@VIEWS
def test_muon_equals_one_process(as_bucket_view: bool) -> None:
    model, reference = twins(matrices)
    sharded, plain = twin_optimizers((model, reference), optim.Muon, as_bucket_view=as_bucket_view, lr=0.01)
    assert_steps_are_equal((model, reference), (sharded, plain))


# The emulated device has no sparse tensors.
@pytest.mark.by_default("2-SparseAdam | 2-Adagrad | 3-SGD")
@pytest.mark.ranks(2, 3, 4, backend="gloo")
@pytest.mark.parametrize("optimizer_class", [optim.SparseAdam, optim.SGD, optim.Adagrad])
def test_sparse_gradients_are_stepped_as_in_one_process(optimizer_class: type[optim.Optimizer]) -> None:
    def embeddings() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.ModuleList([torch.nn.Embedding(50 + i, 8, sparse=True) for i in range(3)])

    model, reference = twins(embeddings)
    sharded, plain = twin_optimizers((model, reference), optimizer_class, lr=0.1)
    for step in range(STEPS):
        for module in (model, reference):
            torch.manual_seed(step)
            module.zero_grad()
            sum(table(torch.randint(50, (6,))).square().sum() for table in module).backward()
        sharded.step()
        plain.step()
        assert_bitwise_equal(model, reference, f"after step {step}")


@pytest.mark.ranks(4, backend=EVERYWHERE)
@LAYOUTS
def test_there_may_be_more_ranks_than_tensors(world_size: int, rank: int, partition: str, as_bucket_view: bool) -> None:
    model, reference = twins(lambda: torch.nn.Linear(5, 3))
    sharded, plain = twin_optimizers((model, reference), optim.AdamW, partition, as_bucket_view)
    assert len(sharded.plan.tensors) < world_size
    assert_steps_are_equal((model, reference), (sharded, plain))
    # A framework that finds an empty state would step this rank alone to fill it.
    assert sharded.state


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_one_rank_may_own_everything_that_is_trainable(rank: int) -> None:
    model, reference = twins(small_model)
    for module in (model, reference):
        for param in list(module.parameters())[:-1]:
            param.requires_grad_(False)
    sharded, plain = twin_optimizers((model, reference), optim.Adam, as_bucket_view=True)
    assert_steps_are_equal((model, reference), (sharded, plain))
    assert sharded.state
