"""The dicts of param groups are the caller's, as in torch; only an optimizer class sees this rank's shards there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.combinations import LAYOUTS
from support.refusals import Run
from support.training import cutting, set_gradients
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError
from zeroshard_testing import assert_replicas_equal


def four() -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((3, 4), float(number))) for number in range(4)]


def step(params: list[nn.Parameter], optimizer: optim.Optimizer) -> None:
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("is_added", [False, True], ids=["constructor", "add_param_group"])
def test_a_learning_rate_is_read_from_the_dict_that_the_script_has_kept(is_added: bool) -> None:
    params, reference = four(), four()
    kept: dict[str, Any] = {"params": params[2:], "lr": 0.5}
    groups = [{"params": params[:2]}, kept]
    sharded = ZeroRedundancyOptimizer(groups[:1] if is_added else groups, optim.SGD, lr=0.1)
    if is_added:
        sharded.add_param_group(kept)
    plain = optim.SGD([{"params": reference[:2]}, {"params": reference[2:], "lr": 0.5}], lr=0.1)
    assert sharded.param_groups[1] is kept
    kept["lr"] = plain.param_groups[1]["lr"] = 0.25
    step(params, sharded)
    step(reference, plain)
    assert all(map(torch.equal, params, reference))
    assert kept["params"] == params[2:]


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("is_added", [False, True], ids=["constructor", "add_param_group"])
def test_a_dict_is_as_it_was_after_an_error_of_another_rank(rank: int, is_added: bool) -> None:
    params = four()
    given: dict[str, Any] = {"params": [("third", params[2])], "lr": 0.5 if rank == 0 else 0.25}
    before = dict(given)
    optimizer = ZeroRedundancyOptimizer([{"params": [("first", params[0])]}], optim.SGD, lr=0.1)
    call = optimizer.add_param_group if is_added else lambda group: ZeroRedundancyOptimizer([group], optim.SGD, lr=0.1)
    with pytest.raises(DisagreementError, match=r"lr of group \d is '0.5' on rank 0 and '0.25' on rank 1"):
        call(given)
    assert given == before


@pytest.mark.ranks(2, backend="gloo")
def test_a_dict_with_a_class_of_its_own_can_be_used_again() -> None:
    given = {"params": four(), "optimizer_class": optim.AdamW, "optimizer_defaults": {"lr": 0.1}}
    before = dict(given)
    ZeroRedundancyOptimizer([given], optim.SGD, lr=0.1)
    assert given == before


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("fails", [False, True], ids=["steps", "raises"])
def test_hooks_see_parameters_and_the_class_sees_shards(rank: int, fails: bool) -> None:
    seen: list[Any] = []

    class Watching(optim.SGD):
        def step(self, closure: Any = None) -> None:
            seen.append(self.param_groups[0]["params"])
            if fails:
                raise RuntimeError("no step")

    params = four()
    optimizer = ZeroRedundancyOptimizer(params, Watching, lr=0.1)
    # The constructor has tried the class.
    seen.clear()
    for registered in (optimizer, optimizer.optim):
        registered.register_step_pre_hook(lambda stepped, *_: seen.append(stepped.param_groups[0]["params"]))
    if fails:
        with pytest.raises(RuntimeError, match="no step"):
            step(params, optimizer)
    else:
        step(params, optimizer)
    of_public, of_inner, of_class = seen
    assert of_public is of_inner is optimizer.param_groups[0]["params"]
    assert of_public == params
    assert [id(p) for p in of_class] == [id(params[shard.tensor]) for shard in optimizer.plan.of_rank(rank)]


@pytest.mark.ranks(2, backend="gloo")
def test_the_inner_optimizers_state_dict_has_this_ranks_shards(rank: int) -> None:
    params = four()
    optimizer = ZeroRedundancyOptimizer(params, optim.Adam, lr=0.1, partition="split")
    step(params, optimizer)
    inner = optimizer.optim.state_dict()
    owned = len(list(optimizer.plan.of_rank(rank)))
    assert len(inner["state"]) == len(inner["param_groups"][0]["params"]) == owned
    assert optimizer.param_groups[0]["params"] == params


@pytest.mark.ranks(2, backend="gloo")
def test_a_group_may_be_put_in_place_of_another() -> None:
    params, reference = four(), four()
    sharded, plain = ZeroRedundancyOptimizer(params, optim.SGD, lr=0.1), optim.SGD(reference, lr=0.1)
    for optimizer in (sharded, plain):
        optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.5}
    step(params, sharded)
    step(reference, plain)
    assert all(map(torch.equal, params, reference))


@pytest.mark.ranks(2, backend="gloo")
@LAYOUTS
def test_members_that_one_rank_has_exchanged_are_an_error_on_every_rank(
    rank: int, partition: str, as_bucket_view: bool
) -> None:
    run = Run(partition=cutting(partition), parameters_as_bucket_view=as_bucket_view)
    members = run.sharded.param_groups[0]["params"]
    if rank == 1:
        members[0], members[1] = members[1], members[0]
    set_gradients(run.model.parameters(), 5)
    with pytest.raises(RuntimeError, match=r"^rank 1: the members of param_groups"):
        run.sharded.step()
    assert_replicas_equal(run.model.parameters())
    if rank == 1:
        members[0], members[1] = members[1], members[0]
    run.step(1, first=6)
    assert_replicas_equal(run.model.parameters())
