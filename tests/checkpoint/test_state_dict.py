"""``state_dict()`` and ``state`` at any time on any rank: what lies elsewhere is listed, and refuses to be read."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.training import ELEMENTWISE_OPTIMIZERS, assert_same_state, cutting, set_gradients, small_model
from torch import nn, optim
from torch.utils._pytree import tree_map
from zeroshard import ZeroRedundancyOptimizer, check_whole
from zeroshard.state.placeholder import StatePlaceholder
from zeroshard_comm import DisagreementError

PARTITIONS = pytest.mark.parametrize("partition", ["whole", "split"])
REFUSED = r"that file is now incomplete.*consolidate_state_dict\(to=RANK\)"


class Pair:
    """A sharded optimizer and the plain one, of equal models."""

    def __init__(self, partition: str = "whole", kind: Any = optim.AdamW, **settings: Any) -> None:
        self.model, self.reference = small_model(), small_model()
        self.sharded = ZeroRedundancyOptimizer(self.model.parameters(), kind, partition=cutting(partition), **settings)
        self.plain = kind(self.reference.parameters(), **settings)
        self.steps = 0

    def step(self, *, none: tuple[int, ...] = ()) -> None:
        for model, optimizer in ((self.model, self.sharded), (self.reference, self.plain)):
            set_gradients(model.parameters(), self.steps, none=none)
            optimizer.step()
        self.steps += 1

    def check_listed(self) -> None:
        """Everything is listed as the plain optimizer lists it: parameters, entries, shapes, dtypes and devices."""
        assert described(self.sharded.state_dict()["state"]) == described(self.plain.state_dict()["state"])
        params = dict(zip(self.model.parameters(), range(9), strict=False))
        assert {params[param] for param in self.sharded.state} == set(self.plain.state_dict()["state"])
        assert {params[param]: set(entries) for param, entries in self.sharded.state.items()} == {
            key: set(entries) for key, entries in self.plain.state_dict()["state"].items()
        }

    def check_equal(self) -> None:
        for ours, theirs in zip(self.model.parameters(), self.reference.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        self.sharded.consolidate_state_dict()
        if self.sharded.rank == 0:
            assert_same_state(self.sharded.state_dict(), self.plain.state_dict())


def described(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: described(value) for key, value in state.items()}
    return (state.shape, state.dtype, state.device) if isinstance(state, torch.Tensor) else type(state)


def values_missing(state_dict: dict[str, Any]) -> int:
    """How many tensors of a state dict cannot be pickled."""
    missing = 0
    for entries in state_dict["state"].values():
        for value in entries.values():
            try:
                pickle.dumps(value)
            except RuntimeError:
                missing += 1
    return missing


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
def test_a_first_gradient_at_step_100(rank: int) -> None:
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


@pytest.mark.by_default(
    "2-<lambda>0-whole | 2-<lambda>1-split | 2-<lambda>2-whole | 2-<lambda>3-split | 2-<lambda>4-whole | "
    "2-<lambda>5-split | 2-<lambda>6-whole | 2-<lambda>7-split | 2-<lambda>8-whole | 2-<lambda>9-split | "
    "2-<lambda>10-whole | 2-<lambda>11-split | 2-<lambda>12-whole | 2-<lambda>13-split | 2-<lambda>14-whole | "
    "2-<lambda>15-split"
)
@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
@pytest.mark.parametrize(
    "save",
    [
        lambda sd: pickle.dumps(sd),
        lambda sd: torch.save(sd, io.BytesIO()),
        lambda sd: torch.save({"optimizers": [sd]}, io.BytesIO()),
        lambda sd: torch.save(dict(sd), io.BytesIO()),
        lambda sd: torch.save({**sd}, io.BytesIO()),
        lambda sd: torch.save(sd["state"], io.BytesIO()),
        lambda sd: torch.save({**sd["state"]}, io.BytesIO()),
        lambda sd: torch.save(copy.copy(sd), io.BytesIO()),
        lambda sd: torch.save(copy.deepcopy(sd), io.BytesIO()),
        lambda sd: torch.save(copy.deepcopy(dict(sd)), io.BytesIO()),
        lambda sd: torch.save(tree_map(lambda leaf: leaf, sd), io.BytesIO()),
        lambda sd: torch.save(tree_map(as_contiguous, dict(sd["state"])), io.BytesIO()),
        lambda sd: torch.save(moved(sd, "cpu", torch.float64), io.BytesIO()),
        lambda sd: check_whole(sd),
        lambda sd: check_whole({"optimizers": [(1, {**sd})]}),
        lambda sd: check_whole({**sd["state"]}),
    ],
)
def test_no_file_lacks_what_other_ranks_own(partition: str, save: Callable[[Any], object]) -> None:
    pair = Pair(partition)
    pair.step()
    with pytest.raises(RuntimeError, match=REFUSED):
        save(pair.sharded.state_dict())
    pair.check_equal()


def as_contiguous(value: Any) -> Any:
    return value.detach().clone().to("cpu") if isinstance(value, torch.Tensor) else value


def moved(value: Any, device: str, dtype: torch.dtype | None = None) -> Any:
    """Move a state dict to a device, as Accelerate does: mappings are rebuilt by their own class."""
    if isinstance(value, (list, tuple)):
        return type(value)(moved(item, device, dtype) for item in value)
    if isinstance(value, dict):
        return type(value)({key: moved(item, device, dtype) for key, item in value.items()})
    return value.to(device, dtype) if isinstance(value, torch.Tensor) else value


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize(
    "read",
    [
        lambda value: value + 1,
        lambda value: value.sum(),
        lambda value: value.tolist(),
        lambda value: value.numpy(),
        lambda value: torch.equal(value, value.clone()),
        lambda value: value.view(-1),
        lambda value: torch.empty(value.shape).copy_(value),
        lambda value: value.untyped_storage(),
        lambda value: torch.from_dlpack(value),
        lambda value: value.share_memory_(),
        lambda value: torch._foreach_norm([value]),
        lambda value: float(value.flatten()[0]),
    ],
)
def test_a_placeholder_refuses_to_be_read(rank: int, read: Callable[[torch.Tensor], object]) -> None:
    pair = Pair()
    pair.step()
    other = next(i for i, owner in enumerate(pair.sharded._param_to_rank.values()) if owner != rank)
    for value in (
        pair.sharded.state_dict()["state"][other]["exp_avg"],
        pair.sharded.state[list(pair.model.parameters())[other]]["exp_avg"],
    ):
        assert value.shape == list(pair.reference.parameters())[other].shape
        with pytest.raises(RuntimeError, match=rf"state entry 'exp_avg' of 'param.{other}' lies on other ranks"):
            read(value)
        assert "StatePlaceholder" in repr(value)
        # No memory: torch's stager asks.
        assert value.data_ptr() == 0


@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
def test_state_that_is_changed_in_place(partition: str) -> None:
    pair = Pair(partition)
    pair.step()
    entries = [pair.sharded.state[param]["exp_avg"] for param in pair.model.parameters()]
    others = next(entry for entry in entries if isinstance(entry, StatePlaceholder))
    with pytest.raises(RuntimeError, match=r"change what each rank holds, on every rank: .* optimizer\.optim\.state"):
        others.mul_(0.5)
    # As the error says.
    for optimizer in (pair.sharded.optim, pair.plain):
        for entries in optimizer.state.values():
            entries["exp_avg"].mul_(0.5)
    pair.step()
    pair.check_equal()


@pytest.mark.ranks(2, backend="gloo")
def test_an_entry_at_the_address_of_another_one_is_a_change() -> None:
    pair = Pair()
    pair.step()
    metadata, shard = pair.sharded._engine.metadata, next(iter(pair.sharded._engine.local.shards.values()))
    entries, shape = pair.sharded.optim.state[shard.tensor], (*shard.tensor.shape, 2)
    assert not metadata.has_changed()
    address, kept = id(entries["exp_avg"]), []
    entries["exp_avg"] = None
    # Held, so that the next one lies elsewhere.
    while id(found := torch.zeros(shape)) != address and len(kept) < 10_000:
        kept.append(found)
    assert id(found) == address
    entries["exp_avg"] = found
    assert metadata.has_changed()


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
    with pytest.raises(ValueError, match=r"are not there.*Hand in a consolidated state dict"):
        other.sharded.load_state_dict(pair.sharded.state_dict())
    other.check_equal()


@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
def test_what_one_rank_has_listed_is_not_loaded_from_it(rank: int, partition: str) -> None:
    pair = Pair(partition)
    pair.step()
    with pytest.raises(ValueError, match=r"which rank 1 owns, are not there.*Hand in a consolidated state dict"):
        pair.sharded.load_state_dict(pair.sharded.state_dict() if rank == 0 else {}, from_rank=0)
    pair.check_equal()


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
@pytest.mark.parametrize("how", ["assign", "replace", "del", "pop", "clear"])
def test_entries_are_assigned_and_removed_alike_on_all_ranks(how: str) -> None:
    pair = Pair()
    pair.step()
    for model, optimizer in ((pair.model, pair.sharded), (pair.reference, pair.plain)):
        state, first = optimizer.state, next(model.parameters())
        if how == "assign":
            state[first] = {key: value.clone() for key, value in state[first].items()} | {"more": torch.tensor(2.0)}
        elif how == "replace":
            kept = {param: entries for param, entries in state.items() if param is not first}
            optimizer.state = defaultdict(dict, kept)
        elif how == "del":
            del state[first]
        elif how == "pop":
            assert set(state.pop(first)) == {"exp_avg", "exp_avg_sq", "step"}
        else:
            state.clear()
        if how != "assign":
            assert first not in optimizer.state
            with pytest.raises(KeyError):
                del optimizer.state[first]
    pair.step()
    assert all(param in pair.sharded.state for param in pair.model.parameters())
    pair.check_listed()
    pair.check_equal()


@pytest.mark.ranks(2, backend="gloo")
def test_entries_of_other_ranks_refuse_to_be_changed(rank: int) -> None:
    pair = Pair()
    pair.step()
    params = list(pair.model.parameters())
    mine, others = (
        [i for i, r in enumerate(pair.sharded._param_to_rank.values()) if (r == rank) == own] for own in (True, False)
    )
    assert all(pair.sharded.state[params[i]] is pair.sharded.optim.state[params[i]] for i in mine)
    changes: list[Callable[[Any], object]] = [
        lambda entries: entries.__setitem__("exp_avg", torch.zeros(1)),
        lambda entries: entries.update(exp_avg=1),
        lambda entries: entries.setdefault("more", 1),
        lambda entries: entries.pop("exp_avg"),
        lambda entries: entries.clear(),
    ]
    for change in changes:
        with pytest.raises(
            RuntimeError, match=rf"state of tensor {others[0]} 'param.{others[0]}' belongs to other ranks"
        ):
            change(pair.sharded.state[params[others[0]]])
    # Lightning writes every entry back, after it has moved it to a device.
    for entries in pair.sharded.state.values():
        for key, value in entries.items():
            entries[key] = value.to("cpu")
    with pytest.raises(RuntimeError, match="popitem"):
        pair.sharded.state.popitem()
    pair.step()
    pair.check_equal()


@pytest.mark.ranks(3, backend="gloo")
@PARTITIONS
def test_loading_from_one_rank(rank: int, partition: str) -> None:
    pair = Pair(partition)
    pair.step()
    saved = copy.deepcopy(pair.plain.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    for source in (0, 2):
        pair.step()
        pair.sharded.load_state_dict(saved if rank == source else {}, from_rank=source)
        pair.plain.load_state_dict(saved)
        pair.check_listed()
        for ours, theirs in zip(pair.model.parameters(), pair.reference.parameters(), strict=True):
            theirs.data.copy_(ours)
        pair.step()
        pair.check_equal()


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize(
    ("given", "from_rank", "message", "error"),
    [
        (lambda rank, sd: sd, 0, "hand rank 1 an empty dict", ValueError),
        (lambda rank, sd: sd if rank == 0 else {}, 2, r"from_rank=2.*ranks 0 to 1", ValueError),
        (lambda rank, sd: sd if rank == 0 else {}, None, "its state dict is", DisagreementError),
        (lambda rank, sd: {}, 0, "expects a dict with 'state' and 'param_groups'", TypeError),
        (lambda rank, sd: broken(sd) if rank == 0 else {}, 0, "expected", ValueError),
        (lambda rank, sd: with_object(sd) if rank == 0 else {}, 0, "cannot be moved without pickle", ValueError),
        pytest.param(
            lambda rank, sd: with_numpy(sd) if rank == 0 else {},
            0,
            "rank 0: load_state_dict.*'eps' of param group 0 is a numpy.float32, .* Python's numbers",
            ValueError,
            marks=pytest.mark.skipif(find_spec("numpy") is None, reason="hyperparameters are NumPy's numbers too"),
        ),
    ],
)
def test_loading_from_one_rank_refused(
    rank: int, given: Any, from_rank: int | None, message: str, error: type[Exception]
) -> None:
    pair = Pair()
    pair.step()
    with pytest.raises(error, match=message):
        pair.sharded.load_state_dict(given(rank, copy.deepcopy(pair.plain.state_dict())), from_rank=from_rank)
    pair.step()
    pair.check_equal()


def broken(state_dict: dict[str, Any]) -> dict[str, Any]:
    state_dict["state"][0]["exp_avg"] = torch.ones(3)
    return state_dict


def with_numpy(state_dict: dict[str, Any]) -> dict[str, Any]:
    numpy = import_module("numpy")
    state_dict["param_groups"][0]["eps"] = numpy.float32(1e-8)
    return state_dict


def with_object(state_dict: dict[str, Any]) -> dict[str, Any]:
    state_dict["param_groups"][0]["schedule"] = object()
    return state_dict


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


@pytest.mark.ranks(2, backend="gloo")
def test_hooks_of_state_dicts_are_called_as_torch_calls_them() -> None:
    pair = Pair()
    pair.step()
    for optimizer in (pair.sharded, pair.plain):
        heard: list[str] = []
        optimizer.register_state_dict_pre_hook(lambda _, heard=heard: heard.append("pre"))
        optimizer.register_state_dict_post_hook(lambda _, sd: {**sd, "extra": 1})
        optimizer.register_load_state_dict_pre_hook(lambda _, sd: {k: sd[k] for k in ("state", "param_groups")})
        optimizer.register_load_state_dict_post_hook(lambda _, heard=heard: heard.append("post"))
        given = optimizer.state_dict()
        assert given["extra"] == 1
        optimizer.load_state_dict(given)
        assert heard == ["pre", "post"]
    pair.step()
    pair.check_equal()


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
def test_integer_keys(rank: int) -> None:
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
        with pytest.raises(ValueError, match=r"'object' of 'param.\d' is a object, which cannot be moved without"):
            pair.sharded.step()


@pytest.mark.ranks(1, backend="gloo")
def test_one_rank_alone_has_a_plain_state_dict() -> None:
    pair = Pair()
    pair.step()
    assert type(pair.sharded.state_dict()) is dict
    assert_same_state(pair.sharded.state_dict(), pair.plain.state_dict())
    torch.save(pair.sharded.state_dict(), io.BytesIO())


@pytest.mark.ranks(2, backend="gloo")
def test_a_rank_that_owns_everything(rank: int) -> None:
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


class NoDict(optim.SGD):
    """Keeps something else than a dict, of one parameter, which one rank owns."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for param in self.param_groups[0]["params"]:
            if param.numel() == 7:
                self.state[param] = torch.zeros(3)
        return loss


@pytest.mark.ranks(2, backend="gloo")
def test_state_that_is_no_dict_on_one_rank() -> None:
    pair = Pair(kind=NoDict, lr=0.1)
    for _ in range(2):
        set_gradients(pair.model.parameters(), 0)
        with pytest.raises(ValueError, match=r"the state of 'param.\d' is a Tensor, not a dict"):
            pair.sharded.step()
        pair.sharded.state_dict()


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
def test_a_whole_checkpoint_on_one_rank_and_its_own_on_the_other(rank: int) -> None:
    pair = Pair()
    pair.step()
    whole = copy.deepcopy(pair.plain.state_dict())
    pair.step()
    with pytest.raises(DisagreementError, match="they were handed different checkpoints"):
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


@pytest.mark.ranks(2, backend="gloo")
def test_state_is_cleared_and_exchanged(rank: int) -> None:
    for clear in (lambda opt: opt.state.clear(), lambda opt: setattr(opt, "state", defaultdict(dict))):
        pair = Pair()
        pair.step()
        copied = copy.deepcopy(pair.sharded.state)
        assert len(copied) == 9
        clear(pair.sharded)
        clear(pair.plain)
        assert values_missing(pair.sharded.state_dict()) == 3 * len(pair.sharded.state_dict()["state"])
        pair.step()
        pair.check_listed()
        pair.check_equal()


@pytest.mark.ranks(2, backend="gloo")
def test_momentum_of_sparse_gradients(rank: int) -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Embedding(12, 4, sparse=True))
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1, momentum=0.9)
    for table in model:
        table(torch.tensor([1, 2])).sum().backward()
    sharded.step()
    sharded.load_state_dict(sharded.state_dict())
    sharded.consolidate_state_dict()
    sharded.load_state_dict(sharded.state_dict() if rank == 0 else {}, from_rank=0)
    sharded.step()


def rebuilt(value: Any) -> Any:
    """Rebuild mappings by their class from one mapping, as Lightning does when it moves an optimizer's state."""
    if isinstance(value, dict):
        return type(value)(OrderedDict((key, rebuilt(item)) for key, item in value.items()))
    return value.to("cpu") if isinstance(value, torch.Tensor) else value


@pytest.mark.ranks(2, backend="gloo")
def test_state_is_moved_as_lightning_does() -> None:
    pair = Pair()
    pair.step()
    for param, entries in pair.sharded.state.items():
        pair.sharded.state[param] = rebuilt(entries)
    pair.step()
    pair.check_equal()


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
