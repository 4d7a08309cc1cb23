"""``state``: its entries are read, assigned, replaced and removed as those of a plain optimizer."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.combinations import FLAG, PARTITIONS, each_of
from support.state_pair import Pair, values_missing
from support.training import EVERYWHERE, cutting, set_gradients
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer
from zeroshard.state.placeholder import StatePlaceholder


@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
def test_state_is_changed_in_place_where_it_lies(partition: str) -> None:
    pair = Pair(partition)
    pair.step()
    entries = [pair.sharded.state[param]["exp_avg"] for param in pair.model.parameters()]
    others = next(entry for entry in entries if isinstance(entry, StatePlaceholder))
    with pytest.raises(RuntimeError, match=r"change the tensors in optimizer\.optim\.state\.values\(\) on every rank"):
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


@pytest.mark.ranks(2, backend="gloo")
def test_state_may_be_cleared_and_exchanged(rank: int) -> None:
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


def rebuilt(value: Any) -> Any:
    """Rebuild mappings by their class from one mapping, as Lightning does when it moves an optimizer's state."""
    if isinstance(value, dict):
        return type(value)(OrderedDict((key, rebuilt(item)) for key, item in value.items()))
    return value.to("cpu") if isinstance(value, torch.Tensor) else value


@pytest.mark.ranks(2, backend="gloo")
def test_state_may_be_moved_as_lightning_does() -> None:
    pair = Pair()
    pair.step()
    for param, entries in pair.sharded.state.items():
        pair.sharded.state[param] = rebuilt(entries)
    pair.step()
    pair.check_equal()


@pytest.mark.ranks(2, backend=EVERYWHERE)
@each_of("partition", ["whole", "split"], stepped=FLAG)
def test_what_is_written_to_the_state_is_kept(rank: int, partition: str, stepped: bool) -> None:
    model = nn.ModuleList([nn.Linear(8, 8) for _ in range(5)])
    params = list(model.parameters())
    sharded = ZeroRedundancyOptimizer(params, optim.SGD, lr=0.1, momentum=0.9, partition=cutting(partition))
    first, second = (params[shard.tensor] for shard in sharded.plan.of_rank(rank)[:2])
    untouched = params[sharded.plan.of_rank(rank)[2].tensor]
    if stepped:
        set_gradients(params, 0)
        sharded.step()
    seen = sharded.state
    sharded.state[first]["epoch"] = 1
    sharded.state[second] = {"epoch": 2}
    assert sharded.state.get(first, {}).get("epoch") == 1
    assert seen[second] == {"epoch": 2}
    assert sharded.state.setdefault(second, {"epoch": 3}) == {"epoch": 2}
    assert (untouched in sharded.state) == stepped
    # As frameworks do to bring all state to another device.
    for param, entries in sharded.state.items():
        sharded.state[param] = {key: copy.deepcopy(value) for key, value in entries.items()}
    kept = copy.deepcopy(dict(sharded.state.items()))
    # Of other ranks' parameters there are placeholders.
    listed = len(params) if stepped else len(sharded.optim.state)
    assert len(kept) == len(sharded.state) == len(copy.deepcopy(sharded.state)) == listed
    for _ in range(2):
        set_gradients(params, 1)
        sharded.step()
    assert (sharded.state[first]["epoch"], sharded.state[second]["epoch"]) == (1, 2)
    assert sharded.state.pop(second)["epoch"] == 2
    assert second not in sharded.state
    sharded.consolidate_state_dict()
    with pytest.raises(KeyError):
        del sharded.state[second]
    sharded.state.clear()
    assert not sharded.optim.state
