"""State of classes that keep lists, dicts, numbers or objects."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.combinations import PARTITIONS
from support.consolidated import saved_everywhere
from support.state_pair import Pair
from support.training import EVERYWHERE, assert_bitwise_equal, set_gradients, train_all, twin_optimizers, twins
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer


class Indexed(optim.SGD):
    """Keeps its state under integers, and in dicts of dicts."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                held = self.state[param].setdefault(0, {"sum": torch.zeros_like(param), "steps": 0, 1: [None, "text"]})
                held["sum"] += param.grad
                held["steps"] += 1
        return loss


@pytest.mark.ranks(2, backend="gloo")
def test_state_under_integers_is_listed_and_consolidated(rank: int) -> None:
    pair, calls = Pair(kind=Indexed, lr=0.1), [0]
    for _ in range(4):
        pair.step()
        calls.append(pair.sharded.traffic.of("control").calls)
        assert all(set(entries[0]) == {"sum", "steps", 1} for entries in pair.sharded.state_dict()["state"].values())
    # Numbers that count up are no news.
    assert calls[4] - calls[3] == calls[3] - calls[2] < calls[1] - calls[0]
    pair.sharded.consolidate_state_dict()
    if rank == 0:
        ours, theirs = pair.sharded.state_dict()["state"], pair.plain.state_dict()["state"]
        assert ours.keys() == theirs.keys()
        for index, entries in theirs.items():
            assert torch.equal(ours[index][0].pop("sum"), entries[0].pop("sum"))
            assert ours[index][0] == entries[0]


class WithObjects(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["object"] = object()
        return super().step(closure)


@pytest.mark.ranks(2, backend="gloo")
def test_objects_are_refused_after_the_first_step(rank: int) -> None:
    pair = Pair(kind=WithObjects, lr=0.1, momentum=0.9)
    for _ in range(2):
        set_gradients(pair.model.parameters(), 0)
        for call in (pair.sharded.step, pair.sharded.consolidate_state_dict):
            with pytest.raises(ValueError, match=r"'object' of 'param.\d' is a object, which cannot be sent without"):
                call()


class NoDict(optim.SGD):
    """Keeps something else than a dict, of one parameter, which one rank owns."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for param in self.param_groups[0]["params"]:
            if param.numel() == 7:
                self.state[param] = torch.zeros(3)
        return loss


@pytest.mark.ranks(2, backend="gloo")
def test_state_that_is_no_dict_on_one_rank_is_refused() -> None:
    pair = Pair(kind=NoDict, lr=0.1)
    for _ in range(2):
        set_gradients(pair.model.parameters(), 0)
        with pytest.raises(ValueError, match=r"the state of 'param.\d' is a Tensor, not a dict"):
            pair.sharded.step()
        pair.sharded.state_dict()


@pytest.mark.ranks(2, backend="gloo")
def test_momentum_of_sparse_gradients_is_loaded(rank: int) -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Embedding(12, 4, sparse=True))
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1, momentum=0.9)
    for table in model:
        table(torch.tensor([1, 2])).sum().backward()
    sharded.step()
    sharded.load_state_dict(sharded.state_dict())
    sharded.consolidate_state_dict()
    sharded.load_state_dict(sharded.state_dict() if rank == 0 else {}, from_rank=0)
    sharded.step()


class Counting(optim.SGD):
    """Counts its steps for each tensor, in a number of Python."""

    elementwise = True

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["steps"] = self.state[param].get("steps", 0) + 1
        return super().step(closure)


@pytest.mark.ranks(2, backend="gloo")
def test_a_number_in_the_state_of_a_tensor_without_dimensions_is_loaded(rank: int) -> None:
    params = [nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.ones(3))]
    optimizer = ZeroRedundancyOptimizer(params, Counting, lr=0.1)
    for _ in range(2):
        set_gradients(params, 0)
        optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    saved = optimizer.state_dict() if rank == 0 else {}
    optimizer.load_state_dict(saved, from_rank=0)
    assert [entries["steps"] for entries in optimizer.optim.state.values()] == [2]


class Lists(optim.SGD):
    """Keeps tensors in lists and dicts, and moves parameters by them."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state.setdefault("history", [])
                    state.setdefault("sums", {"all": torch.zeros_like(param), "calls": 0})
                    state["history"].append(param.grad.norm())
                    state["sums"]["all"] += param.grad
                    state["sums"]["calls"] += 1
                    with torch.no_grad():
                        param.add_(state["sums"]["all"] * state["history"][0], alpha=-1e-3 * state["sums"]["calls"])
        return super().step(closure)


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_nested_state_is_loaded_and_not_shared_with_the_argument() -> None:
    model, reference = twins()
    sharded, plain = twin_optimizers((model, reference), Lists, lr=0.1)
    train_all([(model, sharded), (reference, plain)], range(2))
    saved = saved_everywhere(sharded)
    untouched = copy.deepcopy(saved)
    resumed = ZeroRedundancyOptimizer(model.parameters(), Lists, lr=0.1)
    resumed.load_state_dict(saved)
    train_all([(model, resumed), (reference, plain)], range(2, 4))
    assert_bitwise_equal(model, reference, "after resuming")
    for index, entries in untouched["state"].items():
        assert len(saved["state"][index]["history"]) == len(entries["history"]) == 2
        assert torch.equal(saved["state"][index]["sums"]["all"], entries["sums"]["all"])
        assert saved["state"][index]["sums"]["calls"] == 2


@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
def test_state_under_a_name_of_its_own_is_kept(partition: str) -> None:
    model, reference = twins()
    sharded, plain = twin_optimizers((model, reference), optim.Adam, partition)
    train_all([(model, sharded), (reference, plain)], range(2))
    given = copy.deepcopy(plain.state_dict())
    given["state"]["history"] = {"epochs": 3}
    sharded.load_state_dict(given)
    plain.load_state_dict(given)
    assert sharded.optim.state["history"] == plain.state["history"] == {"epochs": 3}
