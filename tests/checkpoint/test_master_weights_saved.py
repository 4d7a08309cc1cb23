"""Master weights in checkpoints, and where they are absent."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checkpointing import load_by, save_by
from support.combinations import each_of
from support.master_weights import HalfModel, PlainMasters, sharded_over, train, trained
from support.training import EVERYWHERE, assert_bitwise_equal, cutting, set_gradients
from torch import optim
from zeroshard import ZeroRedundancyOptimizer

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")


@pytest.mark.ranks(3, backend=EVERYWHERE)
@each_of("way", ["dcp", "consolidated"], partition=["whole", "split"])
def test_masters_are_saved_at_one_size_and_resumed_at_another(
    rank: int, ranks_tmp_path: Path, way: str, partition: str
) -> None:
    groups = {size: dist.new_group(list(range(size))) for size in (2, 3)}
    reference = HalfModel()
    train(reference, PlainMasters(reference.parameters(), optim.AdamW, lr=1e-2), range(5))
    for size, group in groups.items():
        path = ranks_tmp_path / f"from{size}"
        if rank < size:
            model = HalfModel()
            sharded = sharded_over(model, group, partition=cutting(partition))
            train(model, sharded, range(3))
            save_by(way, model, sharded, path, group)
        dist.barrier()
        for other, other_group in groups.items():
            if rank < other:
                resumed = HalfModel()
                optimizer = sharded_over(resumed, other_group, partition=cutting(partition))
                load_by(way, resumed, optimizer, path, other_group)
                train(resumed, optimizer, range(3, 5))
                assert_bitwise_equal(resumed, reference, f"saved at {size}, resumed at {other}")
        dist.barrier()


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_plain_optimizer_casts_masters_and_moments(rank: int) -> None:
    model = HalfModel()
    sharded = sharded_over(model)
    train(model, sharded, range(2))
    sharded.consolidate_state_dict()
    if rank == 0:
        plain = optim.AdamW(model.parameters(), lr=1e-2)
        plain.load_state_dict(sharded.state_dict())
        first = next(model.parameters())
        assert {value.dtype for value in plain.state[first].values()} == {torch.bfloat16, torch.float32}
        assert torch.equal(plain.state[first]["master_param"], first.detach())
        assert plain.state[first]["exp_avg"].dtype == torch.bfloat16
        set_gradients(model.parameters(), 3)
        plain.step()


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_absent_masters_are_made_from_the_parameters() -> None:
    model, other = HalfModel(), HalfModel()
    sharded, given = sharded_over(model), optim.AdamW(other.parameters(), lr=1e-2)
    train(model, sharded, range(2))
    train(other, given, range(1))
    sharded.load_state_dict(given.state_dict())
    reference = copy.deepcopy(model)
    plain = PlainMasters(reference.parameters(), optim.AdamW, lr=1e-2)
    plain.inner.load_state_dict(given.state_dict())
    train(model, sharded, range(2, 4))
    train(reference, plain, range(2, 4))
    assert_bitwise_equal(model, reference, "after a load without masters")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_state_can_be_made_before_the_first_step() -> None:
    model, reference = HalfModel(), HalfModel()
    sharded, plain = sharded_over(model), PlainMasters(reference.parameters(), optim.AdamW, lr=1e-2)
    sharded.init_state()
    # As torch.distributed.checkpoint makes state.
    for param in reference.parameters():
        param.grad = torch.zeros_like(param)
    plain.inner.param_groups[0]["lr"] = 0.0
    plain.step()
    plain.inner.param_groups[0]["lr"] = 1e-2
    listed = sharded.state_dict()["state"]
    assert {"master_param" in entries for entries in listed.values()} == {True, False}
    train(model, sharded, range(2))
    train(reference, plain, range(2))
    assert_bitwise_equal(model, reference, "after init_state()")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_load_that_fails_on_one_rank_leaves_masters_as_they_were(rank: int) -> None:
    model, sharded, reference, plain = trained(2)
    sharded.consolidate_state_dict()
    given = copy.deepcopy(sharded.state_dict()) if rank == 0 else {}
    for entries in given.get("state", {}).values():
        if "master_param" in entries:
            entries["master_param"].zero_()
    if rank == 0:
        given["state"][0]["master_param"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"entry 'master_param' has shape \(3,\), expected"):
        sharded.load_state_dict(given, from_rank=0)
    train(model, sharded, range(2, 4))
    train(reference, plain, range(2, 4))
    assert_bitwise_equal(model, reference, "after a load that failed")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_without_master_weights_they_are_refused_by_name() -> None:
    model = HalfModel()
    sharded = sharded_over(model)
    train(model, sharded, range(1))
    other = sharded_over(model, master_weights=False)
    with pytest.raises(ValueError, match=r"extra entry 'master_param'.* build the optimizer with master_weights=True"):
        other.load_state_dict(sharded.state_dict())


class DropsGradients(optim.AdamW):
    """Frees gradients as soon as they were used."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None


class KeepsMasters(optim.SGD):
    """Has an entry of its own of that name."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["master_param"] = torch.zeros_like(param)


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_class_that_drops_gradients_has_masters_in_checkpoints() -> None:
    model = HalfModel()
    sharded = ZeroRedundancyOptimizer(model.parameters(), DropsGradients, lr=1e-2, master_weights=True)
    train(model, sharded, range(2))
    sharded.consolidate_state_dict()
    if dist.get_rank() == 0:
        assert "master_param" in sharded.state_dict()["state"][0]


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_class_with_an_entry_of_that_name_is_refused() -> None:
    model = HalfModel()
    sharded = ZeroRedundancyOptimizer(model.parameters(), KeepsMasters, lr=1e-2, master_weights=True)
    set_gradients(model.parameters(), 0)
    with pytest.raises(RuntimeError, match="the optimizer class has an entry 'master_param' of its own"):
        sharded.step()
    own = ZeroRedundancyOptimizer(model.parameters(), KeepsMasters, lr=1e-2)
    own.step()
    own.consolidate_state_dict()
    own.load_state_dict(own.state_dict() if dist.get_rank() == 0 else {}, from_rank=0)


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_first_step_that_fails_leaves_a_checkpoint_that_can_be_loaded(rank: int) -> None:
    model = HalfModel()
    sharded = sharded_over(model)
    set_gradients(model.parameters(), 0)
    handle = sharded.optim.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sharded.step()
    handle.remove()
    sharded.consolidate_state_dict()
    sharded.load_state_dict(sharded.state_dict() if rank == 0 else {}, from_rank=0)
    train(model, sharded, range(1))
