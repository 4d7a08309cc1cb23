"""Checkpoints of models that are frozen, unfrozen or converted before they are loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from support.combinations import FLAG, LAYOUTS, PARTITIONS, each_of
from support.consolidated import saved_everywhere
from support.training import (
    EVERYWHERE,
    assert_bitwise_equal,
    assert_same_state,
    convolutions,
    cutting,
    train_all,
    twin_optimizers,
    twins,
)
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")


def rebind(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data.clone()


CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "memory format": lambda model: model.to(memory_format=torch.channels_last),
    "dtype": lambda model: model.double(),
    "storage": rebind,
    "frozen": lambda model: next(model.parameters()).requires_grad_(False),
}


@pytest.mark.ranks(2, backend=EVERYWHERE)
@each_of("name", CONVERSIONS, partition=["whole", "split"], as_bucket_view=FLAG)
def test_a_model_may_be_converted_between_building_and_loading(partition: str, as_bucket_view: bool, name: str) -> None:
    model, reference = twins(convolutions)
    plain = optim.Adam(reference.parameters())
    train_all([(reference, plain)], range(2))
    saved = copy.deepcopy(plain.state_dict())
    model.load_state_dict(reference.state_dict())
    sharded = ZeroRedundancyOptimizer(
        model.parameters(), optim.Adam, partition=cutting(partition), parameters_as_bucket_view=as_bucket_view
    )
    for module in (model, reference):
        CONVERSIONS[name](module)
    if as_bucket_view and name in ("memory format", "dtype"):
        with pytest.raises(RuntimeError, match="is a view of a flat buffer"):
            sharded.load_state_dict(saved)
        return
    plain = optim.Adam(reference.parameters())
    for optimizer in (sharded, plain):
        optimizer.load_state_dict(saved)
    train_all([(model, sharded), (reference, plain)], range(2, 4))
    assert_bitwise_equal(model, reference, "after resuming")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_model_that_one_rank_has_converted_before_loading_is_named(rank: int) -> None:
    model, reference = twins(convolutions)
    plain = optim.Adam(reference.parameters())
    train_all([(reference, plain)], range(1))
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, partition=cutting("split"))
    if rank == 1:
        model.double()
    with pytest.raises(DisagreementError, match=r"load_state_dict.*dtype torch.float32 here, torch.float64 there"):
        sharded.load_state_dict(plain.state_dict())
    model.float().load_state_dict(reference.state_dict())
    sharded.load_state_dict(plain.state_dict())
    train_all([(model, sharded), (reference, plain)], range(1, 3))
    assert_bitwise_equal(model, reference, "after resuming")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
def test_frozen_tensors_have_no_state_and_get_some_after_they_are_unfrozen(partition: str) -> None:
    model, reference = twins()
    for module in (model, reference):
        list(module.parameters())[4].requires_grad_(False)
    sharded, plain = twin_optimizers((model, reference), optim.Adam, partition)
    train_all([(model, sharded), (reference, plain)], range(2))
    saved = saved_everywhere(sharded)
    assert saved["state"][4] == {}
    stepped = {index: entries for index, entries in saved["state"].items() if index != 4}
    assert_same_state({**saved, "state": stepped}, plain.state_dict())
    resumed = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, partition=cutting(partition))
    resumed.load_state_dict(saved)
    for module in (model, reference):
        list(module.parameters())[4].requires_grad_(True)
    train_all([(model, resumed), (reference, plain)], range(2, 4))
    assert_bitwise_equal(model, reference, "after unfreezing")
    assert_same_state(saved_everywhere(resumed), plain.state_dict())


@pytest.mark.ranks(2, backend=EVERYWHERE)
@LAYOUTS
def test_state_of_a_frozen_tensor_is_loaded_and_stays_with_its_owner(partition: str, as_bucket_view: bool) -> None:
    model, reference = twins()
    plain = optim.Adam(reference.parameters())
    train_all([(reference, plain)], range(2))
    model.load_state_dict(reference.state_dict())
    model[:3].requires_grad_(False)
    reference[:3].requires_grad_(False)
    sharded = ZeroRedundancyOptimizer(
        model.parameters(), optim.Adam, partition=cutting(partition), parameters_as_bucket_view=as_bucket_view
    )
    owners = sharded.plan.owners
    sharded.load_state_dict(copy.deepcopy(plain.state_dict()))
    train_all([(model, sharded), (reference, plain)], range(2, 3))
    if sharded.rank == 0:
        # No other rank notices, though this one makes its plan again.
        rebind(model)
    train_all([(model, sharded), (reference, plain)], range(3, 4))
    assert_same_state(saved_everywhere(sharded), plain.state_dict())
    for module in (model, reference):
        module.requires_grad_(True)
    train_all([(model, sharded), (reference, plain)], range(4, 6))
    assert_bitwise_equal(model, reference, "after unfreezing")
    assert_same_state(saved_everywhere(sharded), plain.state_dict())
    assert sharded.plan.owners == owners
