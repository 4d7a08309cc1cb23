"""Averages of parameters, each kept by its owner alone: as torch's AveragedModel in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checkpointing import load_by, save_by
from support.combinations import FLAG, each_of
from support.ddp_training import register, steps_in_backward
from support.training import EVERYWHERE, assert_bitwise_equal, cutting, set_gradients, twins
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from zeroshard import AveragedParameters, ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError
from zeroshard_integrations.join import Join
from zeroshard_testing import assert_replicas_equal

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")
two_ranks = pytest.mark.ranks(2, backend=EVERYWHERE)


def ema() -> Callable[..., None]:
    return get_ema_multi_avg_fn(0.9)


def equal() -> None:
    """As torch averages by default."""


class Sides:
    """A sharded optimizer and its averages, and a plain one with torch's."""

    def __init__(
        self,
        optimizer: type[optim.Optimizer] = optim.AdamW,
        average_by: Callable[[], Any] = ema,
        group: dist.ProcessGroup | None = None,
        **settings: Any,
    ) -> None:
        self.model, self.reference = twins()
        self.sharded = ZeroRedundancyOptimizer(self.model.parameters(), optimizer, group, lr=1e-2, **settings)
        self.average = AveragedParameters(self.sharded, average_by())
        self.plain = optimizer(self.reference.parameters(), lr=1e-2)
        self.averaged = AveragedModel(self.reference, multi_avg_fn=average_by())

    def train(self, steps: Iterable[int], *, none: int = -1) -> None:
        for step in steps:
            for model, optimizer in ((self.model, self.sharded), (self.reference, self.plain)):
                set_gradients(model.parameters(), step, none={none} if step < 2 else ())
                optimizer.step()
            self.average.update()
            self.averaged.update_parameters(self.reference)

    def check(self, when: str) -> None:
        before = copy.deepcopy(self.model)
        with self.average.applied():
            assert_bitwise_equal(self.model, self.averaged.module, when)
            assert_replicas_equal(self.model.parameters(), group=self.sharded.process_group)
        assert_bitwise_equal(self.model, before, f"{when}, and after the block")


@pytest.mark.exhaustive_at(3)
@pytest.mark.ranks(2, 3, backend=EVERYWHERE)
@each_of(
    "partition", ["whole", "split"], as_bucket_view=FLAG, optimizer=[optim.AdamW, optim.SGD], average_by=[ema, equal]
)
def test_equals_an_averaged_model(
    optimizer: type[optim.Optimizer], average_by: Callable[[], Any], partition: str, as_bucket_view: bool
) -> None:
    sides = Sides(optimizer, average_by, partition=cutting(partition), parameters_as_bucket_view=as_bucket_view)
    for step in range(4):
        sides.train([step], none=3)
        sides.check(f"after step {step}")
    assert sides.average.n_averaged == 4


@two_ranks
def test_averages_may_be_updated_before_the_first_step() -> None:
    sides = Sides()
    for _ in range(2):
        sides.average.update()
        sides.averaged.update_parameters(sides.reference)
    sides.check("before the first step")
    sides.train(range(3))
    sides.check("after three steps")


@two_ranks
def test_bytes_of_a_rank_are_its_share(rank: int) -> None:
    sides = Sides(partition=cutting("split"))
    sides.train(range(2))
    local = sides.sharded._engine.local
    kept = sum(local.state_of(shard)["average_param"].nbytes for shard in local.shards.values())
    # The plan says how many elements a rank owns; without sharding it would keep all.
    assert kept == 4 * sum(shard.numel for shard in sides.sharded.plan.of_rank(rank))
    everything = torch.tensor(kept)
    dist.all_reduce(everything)
    assert everything == 4 * sum(param.numel() for param in sides.model.parameters())


@two_ranks
@pytest.mark.parametrize("hook", ["reduce_to_owner_hook", "hook_with_zero_step"])
def test_equals_an_averaged_model_with_a_hook(rank: int, hook: str) -> None:
    sides = Sides(overlap_with_ddp=steps_in_backward(hook))
    ddp = DistributedDataParallel(sides.model)
    register(hook, ddp, sides.sharded)
    plain_ddp = DistributedDataParallel(sides.reference)
    for step in range(3):
        inputs = torch.randn(8, 40, generator=torch.Generator().manual_seed(2 * step + rank))
        for model, optimizer in ((ddp, sides.sharded), (plain_ddp, sides.plain)):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        sides.average.update()
        sides.averaged.update_parameters(sides.reference)
        with sides.average.applied():
            assert torch.equal(ddp(inputs), sides.averaged(inputs))
        sides.check(f"after step {step}")


@two_ranks
def test_master_weights_are_averaged() -> None:
    model = twins()[0].to(torch.bfloat16)
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=1e-2, master_weights=True)
    average = AveragedParameters(sharded, ema())
    masters = [param.detach().float() for param in model.parameters()]
    plain = optim.AdamW(masters, lr=1e-2)
    averages = [master.clone() for master in masters]
    for step in range(4):
        set_gradients(model.parameters(), step)
        for master, param in zip(masters, model.parameters(), strict=True):
            master.grad = param.grad.float()
        sharded.step()
        plain.step()
        average.update()
        if step:
            ema()(averages, masters, step)
        else:
            averages = [master.clone() for master in masters]
    with average.applied():
        for param, expected in zip(model.parameters(), averages, strict=True):
            assert torch.equal(param, expected.to(torch.bfloat16))
    # Masters keep what their parameters cannot hold.
    set_gradients(model.parameters(), 4)
    for master, param in zip(masters, model.parameters(), strict=True):
        master.grad = param.grad.float()
    sharded.step()
    plain.step()
    for param, expected in zip(model.parameters(), masters, strict=True):
        assert torch.equal(param, expected.to(torch.bfloat16))


@pytest.mark.ranks(3, backend=EVERYWHERE)
@pytest.mark.parametrize("way", ["dcp", "consolidated"])
def test_averages_are_saved_at_one_size_and_resumed_at_another(rank: int, ranks_tmp_path: Path, way: str) -> None:
    groups = {size: dist.new_group(list(range(size))) for size in (2, 3)}
    for size, group in groups.items():
        path = ranks_tmp_path / f"from{size}"
        if rank < size:
            first = Sides(group=group, partition=cutting("split"))
            first.train(range(3))
            save_by(way, first.model, first.sharded, path, group)
        dist.barrier()
        for other, other_group in groups.items():
            if rank < other:
                second = Sides(group=other_group)
                second.train([7])
                load_by(way, second.model, second.sharded, path, other_group)
                straight = Sides(group=other_group)
                straight.train(range(5))
                second.train(range(3, 5))
                assert second.average.n_averaged == 5
                with second.average.applied():
                    assert_bitwise_equal(second.model, straight.averaged.module, f"saved at {size}, resumed at {other}")
        dist.barrier()


@two_ranks
def test_averages_are_resumed_before_a_step_was_made(ranks_tmp_path: Path) -> None:
    first = Sides()
    first.train(range(3))
    save_by("dcp", first.model, first.sharded, ranks_tmp_path / "saved", None)
    # No step has been made: torch makes one with zeros, to learn which entries there are.
    second = Sides()
    load_by("dcp", second.model, second.sharded, ranks_tmp_path / "saved", None)
    assert second.average.n_averaged == 3
    with second.average.applied():
        assert_bitwise_equal(second.model, first.averaged.module, "resumed")


@two_ranks
def test_an_exception_on_one_rank_brings_the_values_back_on_it(rank: int) -> None:
    sides = Sides()
    sides.train(range(2))
    with pytest.raises(ZeroDivisionError) if rank == 1 else sides.average.applied():
        if rank == 1:
            with sides.average.applied():
                raise ZeroDivisionError
    sides.train(range(2, 4))
    assert_bitwise_equal(sides.model, sides.reference, "after an exception")
    sides.check("after an exception")


@two_ranks
def test_in_the_block_nothing_is_trained() -> None:
    sides = Sides()
    sides.train(range(2))
    with sides.average.applied():
        averages = copy.deepcopy(sides.model)
        for call in (sides.sharded.step, lambda: sides.sharded.load_state_dict(sides.plain.state_dict())):
            with pytest.raises(RuntimeError, match=r"leave the block of AveragedParameters.applied\(\) first"):
                call()
        with pytest.raises(RuntimeError, match="parameters have their averages"):
            sides.average.update()
        with pytest.raises(RuntimeError, match="parameters have their averages"), sides.average.applied():
            pass
        assert_bitwise_equal(sides.model, averages, "after what was refused")
    sides.train(range(2, 4))
    assert_bitwise_equal(sides.model, sides.reference, "after what was refused")


@two_ranks
def test_a_rank_that_calls_something_else_is_told_so(rank: int) -> None:
    sides = Sides()
    sides.train(range(2))
    call = sides.average.applied().__enter__ if rank == 0 else sides.sharded.consolidate_state_dict
    with pytest.raises(RuntimeError, match=r"AveragedParameters.applied\(\)"):
        call()
    sides.train(range(2, 4))
    assert_bitwise_equal(sides.model, sides.reference, "after a disagreement")


@two_ranks
def test_frozen_unfrozen_and_added_parameters_are_averaged() -> None:
    sides = Sides()
    for model in (sides.model, sides.reference):
        model[2].weight.requires_grad_(False)
    sides.train(range(2))
    for model in (sides.model, sides.reference):
        model[2].weight.requires_grad_(True)
        model[0].weight.requires_grad_(False)
    sides.train(range(2, 4))
    sides.check("after a layer was frozen and another unfrozen")
    added = nn.Parameter(torch.ones(5))
    sides.sharded.add_param_group({"params": [added]})
    added.grad = torch.ones(5)
    sides.sharded.step()
    sides.average.update()
    with sides.average.applied():
        assert (added < 1).all()


@two_ranks
def test_an_average_that_is_loaded_for_a_frozen_layer_is_applied_on_all_ranks() -> None:
    saved = Sides()
    saved.train(range(3))
    saved.sharded.consolidate_state_dict()
    model = copy.deepcopy(saved.model)
    model[:3].requires_grad_(False)
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=1e-2)
    average = AveragedParameters(sharded, ema())
    sharded.load_state_dict(saved.sharded.state_dict() if dist.get_rank() == 0 else {}, from_rank=0)
    with average.applied():
        assert_bitwise_equal(model, saved.averaged.module, "in the block")
    assert_bitwise_equal(model, saved.model, "after the block")


@two_ranks
def test_wrong_uses_are_refused() -> None:
    sides = Sides()
    sides.train(range(1))
    with pytest.raises(ValueError, match="already has averages of its parameters"):
        AveragedParameters(sides.sharded)
    sides.sharded.consolidate_state_dict()
    without = ZeroRedundancyOptimizer(sides.model.parameters(), optim.AdamW)
    given = sides.sharded.state_dict() if dist.get_rank() == 0 else {}
    with pytest.raises(ValueError, match=r"extra entry 'average_count'; .* construct zeroshard.AveragedParameters"):
        without.load_state_dict(given, from_rank=0)
    with Join([sides.sharded]), pytest.raises(RuntimeError, match="averages cannot be updated inside Join"):
        sides.average.update()


# ---------------------------------------------------------------------- what checkpoints have


def both_loaded(saved: Sides, ours: Sides) -> None:
    """Load the optimizer before the model, whose values are then still those of another."""
    saved.sharded.consolidate_state_dict()
    given = saved.sharded.state_dict() if dist.get_rank() == 0 else {}
    for param in ours.model.parameters():
        torch.nn.init.normal_(param)
    ours.sharded.load_state_dict(given, from_rank=0)
    ours.model.load_state_dict(saved.model.state_dict())


@pytest.mark.ranks(3, backend=EVERYWHERE)
def test_the_number_of_updates_is_known_on_ranks_that_own_nothing() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = ZeroRedundancyOptimizer([param], optim.SGD, lr=0.1)
    average = AveragedParameters(optimizer)
    for _ in range(3):
        param.grad = torch.ones(3)
        optimizer.step()
        average.update()
    optimizer.consolidate_state_dict()
    saved = optimizer.state_dict() if dist.get_rank() == 0 else {}
    optimizer.load_state_dict(saved, from_rank=0)
    assert average.n_averaged == 3


@two_ranks
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_number_of_updates_is_not_rounded(dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = ZeroRedundancyOptimizer([param], optim.SGD, lr=0.0)
    average = AveragedParameters(optimizer)
    param.grad = torch.ones_like(param)
    optimizer.step()
    average.update()
    average._averages.count.fill_(70_001)
    average.update()
    optimizer.consolidate_state_dict()
    optimizer.load_state_dict(optimizer.state_dict() if dist.get_rank() == 0 else {}, from_rank=0)
    assert average.n_averaged == 70_002


@two_ranks
def test_averages_made_after_the_last_step_are_saved() -> None:
    sides = Sides()
    model = sides.model
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=1e-2)
    set_gradients(model.parameters(), 0)
    optimizer.step()
    average = AveragedParameters(optimizer)
    average.update()
    optimizer.consolidate_state_dict()
    if dist.get_rank() == 0:
        assert all("average_param" in entries for entries in optimizer.state_dict()["state"].values())


@two_ranks
def test_averages_of_frozen_and_never_stepped_layers_are_resumed() -> None:
    first = Sides()
    for step in range(3):
        set_gradients(first.model.parameters(), step, none={0})
        set_gradients(first.reference.parameters(), step, none={0})
        first.sharded.step()
        first.plain.step()
        first.average.update()
        first.averaged.update_parameters(first.reference)
    second = Sides()
    second.model[2].weight.requires_grad_(False)
    both_loaded(first, second)
    with second.average.applied():
        assert_bitwise_equal(second.model, first.averaged.module, "resumed")


@two_ranks
def test_values_written_between_a_step_and_an_update_are_averaged() -> None:
    for dtype, masters in ((torch.bfloat16, True), (torch.float32, False)):
        model = twins()[0].to(dtype)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optim.AdamW, partition=cutting("split"), master_weights=masters
        )
        average = AveragedParameters(optimizer, ema())
        set_gradients(model.parameters(), 0)
        optimizer.step()
        with torch.no_grad():
            model[0].weight.fill_(5)
        model[2].weight.data = torch.full_like(model[2].weight, 3)
        average.update()
        with average.applied():
            assert (model[0].weight == 5).all()
            assert (model[2].weight == 3).all()


@two_ranks
def test_ranks_that_differ_in_updates_are_told_so(rank: int) -> None:
    sides = Sides()
    sides.train(range(2))
    if rank == 0:
        sides.average.update()
    with pytest.raises(DisagreementError, match="number of updates of the average"):
        sides.average.applied().__enter__()


@two_ranks
def test_in_the_block_no_group_is_added_and_before_an_update_there_is_no_average() -> None:
    sides = Sides()
    with pytest.raises(RuntimeError, match="there is no average of the parameters yet"):
        sides.average.applied().__enter__()
    sides.train(range(2))
    with sides.average.applied(), pytest.raises(RuntimeError, match="parameters have their averages"):
        sides.sharded.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    sides.train(range(2, 4))
    assert_bitwise_equal(sides.model, sides.reference, "after a group was refused")
