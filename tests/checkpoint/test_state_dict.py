"""``state_dict()`` at any time on any rank: what lies elsewhere is listed, and refuses to be read."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.combinations import PARTITIONS, each_of
from support.state_pair import REFUSED, Pair, described, moved, values_missing
from support.training import ELEMENTWISE_OPTIMIZERS, EVERYWHERE, assert_same_state, set_gradients, train, twins
from torch import nn, optim
from torch.utils._pytree import tree_map
from zeroshard import ZeroRedundancyOptimizer, check_whole
from zeroshard_comm import DisagreementError


@pytest.mark.ranks(3, backend="gloo")
@PARTITIONS
def test_everything_is_listed_on_every_rank(partition: str) -> None:
    pair = Pair(partition)
    pair.check_listed()
    assert pair.sharded.state_dict() == {"state": {}, "param_groups": pair.plain.state_dict()["param_groups"]}
    for _ in range(2):
        pair.step()
        pair.check_listed()
    assert values_missing(pair.sharded.state_dict()) > 0
    pair.check_equal()


@pytest.mark.ranks(2, backend="gloo")
def test_state_of_a_first_gradient_at_step_100_is_listed(rank: int) -> None:
    pair = Pair()
    for step in range(102):
        sent = pair.sharded.traffic.of("control").calls
        pair.step(none=(2, 3) if step < 100 else ())
        if step in (0, 1, 99, 100, 101):
            pair.check_listed()
        if step == 1:
            usual = pair.sharded.traffic.of("control").calls - sent
        if step > 1:
            assert (pair.sharded.traffic.of("control").calls - sent > usual) == (step == 100), step
    pair.check_equal()


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("name", ELEMENTWISE_OPTIMIZERS)
def test_every_optimizer_lists_what_it_has(name: str) -> None:
    kind, settings = ELEMENTWISE_OPTIMIZERS[name]
    pair = Pair("split", kind, **settings)
    pair.check_listed()
    pair.step()
    pair.check_listed()


SAVES: dict[str, Callable[[Any], object]] = {
    "pickle": pickle.dumps,
    "torch.save": lambda sd: torch.save(sd, io.BytesIO()),
    "of containers": lambda sd: torch.save({"optimizers": [sd]}, io.BytesIO()),
    "of a dict": lambda sd: torch.save(dict(sd), io.BytesIO()),
    "of the state": lambda sd: torch.save(sd["state"], io.BytesIO()),
    "of a dict of the state": lambda sd: torch.save({**sd["state"]}, io.BytesIO()),
    "of a copy": lambda sd: torch.save(copy.copy(sd), io.BytesIO()),
    "of a deep copy": lambda sd: torch.save(copy.deepcopy(dict(sd)), io.BytesIO()),
    "of a mapped tree": lambda sd: torch.save(tree_map(as_contiguous, dict(sd["state"])), io.BytesIO()),
    "of another dtype": lambda sd: torch.save(moved(sd, "cpu", torch.float64), io.BytesIO()),
    "check_whole": check_whole,
    "check_whole of containers": lambda sd: check_whole({"optimizers": [(1, {**sd})]}),
    "check_whole of the state": lambda sd: check_whole({**sd["state"]}),
}


@pytest.mark.ranks(2, backend="gloo")
@each_of("how", SAVES, partition=["whole", "split"])
def test_no_file_lacks_what_other_ranks_own(how: str, partition: str) -> None:
    pair = Pair(partition)
    pair.step()
    with pytest.raises(RuntimeError, match=REFUSED):
        SAVES[how](pair.sharded.state_dict())
    pair.check_equal()


def as_contiguous(value: Any) -> Any:
    return value.detach().clone().to("cpu") if isinstance(value, torch.Tensor) else value


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "arithmetic": lambda value: value + 1,
    "sum": methodcaller("sum"),
    "tolist": methodcaller("tolist"),
    "numpy": methodcaller("numpy"),
    "equal": lambda value: torch.equal(value, value.clone()),
    "view": lambda value: value.view(-1),
    "copy_": lambda value: torch.empty(value.shape).copy_(value),
    "untyped_storage": methodcaller("untyped_storage"),
    "dlpack": torch.from_dlpack,
    "share_memory_": methodcaller("share_memory_"),
    "foreach": lambda value: torch._foreach_norm([value]),
}


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("how", READS)
def test_a_placeholder_refuses_to_be_read(rank: int, how: str) -> None:
    pair = Pair()
    pair.step()
    other = next(i for i, owner in enumerate(pair.sharded._param_to_rank.values()) if owner != rank)
    for value in (
        pair.sharded.state_dict()["state"][other]["exp_avg"],
        pair.sharded.state[list(pair.model.parameters())[other]]["exp_avg"],
    ):
        assert value.shape == list(pair.reference.parameters())[other].shape
        with pytest.raises(RuntimeError, match=rf"state entry 'exp_avg' of 'param.{other}' is .* on other ranks"):
            READS[how](value)
        assert "StatePlaceholder" in repr(value)
        # No memory: torch's stager asks.
        assert value.data_ptr() == 0


@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
def test_what_a_rank_has_listed_is_loaded_on_the_same_rank(partition: str) -> None:
    pair = Pair(partition)
    for change in (lambda sd: sd, copy.deepcopy, lambda sd: moved(sd, "cpu"), dict):
        pair.step()
        before = change(copy.deepcopy(pair.sharded.state_dict()))
        plain = copy.deepcopy(pair.plain.state_dict())
        pair.step()
        pair.sharded.load_state_dict(state_dict=before)
        pair.plain.load_state_dict(plain)
        pair.check_listed()
        for ours, theirs in zip(pair.model.parameters(), pair.reference.parameters(), strict=True):
            theirs.data.copy_(ours)
        pair.step()
        pair.check_equal()


@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
def test_what_was_listed_is_not_loaded_on_another_plan(rank: int, partition: str) -> None:
    pair, other = Pair(partition), Pair("split" if partition == "whole" else "whole")
    pair.step()
    other.step()
    with pytest.raises(ValueError, match=r"lacks the values that rank \d owns.*Pass a consolidated state dict"):
        other.sharded.load_state_dict(pair.sharded.state_dict())
    other.check_equal()


@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
def test_after_consolidation_one_rank_lists_all_values_and_the_others_none(rank: int, partition: str) -> None:
    pair = Pair(partition)
    pair.step()
    pair.sharded.consolidate_state_dict(to=1)
    count = sum(map(len, pair.plain.state_dict()["state"].values()))
    assert values_missing(pair.sharded.state_dict()) == (0 if rank == 1 else count)
    assert described(pair.sharded.state_dict()["state"]) == described(pair.plain.state_dict()["state"])
    if rank == 1:
        check_whole({"optimizer": pair.sharded.state_dict()})
    pair.step()
    assert 0 < values_missing(pair.sharded.state_dict()) <= count
    pair.check_equal()


@pytest.mark.ranks(2, backend="gloo")
def test_hyperparameters_that_are_written_after_a_consolidation_are_listed(rank: int) -> None:
    lr, beta = torch.tensor(0.25), torch.tensor(0.5)
    pair = Pair(kind=optim.Adam, lr=lr, betas=(beta, torch.tensor(0.75)), foreach=False)
    pair.step()
    pair.sharded.consolidate_state_dict(to=1)
    lr.fill_(0.5)
    beta.fill_(0.625)
    for group in pair.sharded.param_groups:
        group["eps"] = 1e-6
    if rank == 1:
        listed = pair.sharded.state_dict()["param_groups"]
        found = [(group["lr"].item(), group["betas"][0].item(), group["eps"]) for group in listed]
        assert found == [(0.5, 0.625, 1e-6) for _ in listed]
        for group in pair.sharded.param_groups:
            group["lr"] = 0.25
        assert [group["lr"] for group in pair.sharded.state_dict()["param_groups"]] == [0.25 for _ in listed]


@pytest.mark.ranks(2, backend="gloo")
def test_an_empty_dict_changes_nothing_and_an_empty_state_clears(rank: int) -> None:
    pair = Pair()
    pair.step()
    pair.sharded.load_state_dict({})
    pair.step()
    pair.check_equal()
    for optimizer in (pair.sharded, pair.plain):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
        assert len(optimizer.state) == 0
    pair.check_listed()
    pair.step()
    pair.check_equal()


@pytest.mark.ranks(1, backend="gloo")
def test_one_rank_alone_has_a_plain_state_dict() -> None:
    pair = Pair()
    pair.step()
    assert type(pair.sharded.state_dict()) is dict
    assert_same_state(pair.sharded.state_dict(), pair.plain.state_dict())
    torch.save(pair.sharded.state_dict(), io.BytesIO())


@pytest.mark.ranks(2, backend="gloo")
def test_a_rank_that_owns_nothing_lists_everything(rank: int) -> None:
    model = nn.Linear(3, 1, bias=False)
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam)
    set_gradients(model.parameters(), 0)
    sharded.step()
    state_dict = sharded.state_dict()
    with pytest.raises(RuntimeError, match=REFUSED):
        pickle.dumps(state_dict)
    sharded.load_state_dict(state_dict)
    assert values_missing(sharded.state_dict()) == (0 if rank == 0 else 3)
    assert dist.get_world_size() == 2


class FailsOnRank0(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if dist.get_rank() == 0:
            raise ArithmeticError("on rank 0")
        return super().step(closure)


@pytest.mark.ranks(2, backend="gloo")
def test_a_first_step_that_failed_on_one_rank_is_listed_too(rank: int) -> None:
    sharded = Pair(kind=FailsOnRank0, lr=0.1, momentum=0.9).sharded
    set_gradients(sharded.param_groups[0]["params"], 0)
    with pytest.raises(ArithmeticError):
        sharded.step()
    assert 0 < len(sharded.state) < 9
    with pytest.raises(RuntimeError, match=REFUSED):
        pickle.dumps(sharded.state_dict())
    assert values_missing(dict(sharded.state_dict())) == (len(sharded.state) if rank == 0 else 0)


@pytest.mark.ranks(2, backend="gloo")
def test_a_whole_checkpoint_on_one_rank_and_its_own_on_the_other_are_told_apart(rank: int) -> None:
    pair = Pair()
    pair.step()
    whole = copy.deepcopy(pair.plain.state_dict())
    pair.step()
    with pytest.raises(DisagreementError, match="they were passed different checkpoints"):
        pair.sharded.load_state_dict(whole if rank == 0 else pair.sharded.state_dict())
    pair.check_equal()


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("given", [None, [], 0])
def test_what_is_no_dict_is_no_empty_dict(given: Any) -> None:
    with pytest.raises(TypeError, match="expects a dict"):
        Pair().sharded.load_state_dict(given)


@pytest.mark.ranks(2, backend="gloo")
def test_what_was_consolidated_is_freed_by_the_next_step(rank: int) -> None:
    pair = Pair()
    pair.step()
    pair.sharded.consolidate_state_dict()
    if rank == 0:
        held = weakref.ref(pair.sharded.state_dict()["state"][0]["exp_avg"])
        assert held() is not None
    pair.step()
    if rank == 0:
        assert held() is None


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_hyperparameters_are_listed_as_they_are_now(rank: int) -> None:
    model, _ = twins()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=0.1)
    train(model, sharded, range(1))
    sharded.consolidate_state_dict()
    sharded.param_groups[0]["lr"] = 0.05
    assert sharded.state_dict()["param_groups"][0]["lr"] == 0.05
    sharded.load_state_dict(sharded.state_dict())
    assert sharded.optim.param_groups[0]["lr"] == 0.05
