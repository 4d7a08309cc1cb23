"""torch.distributed.checkpoint's functions that get and set state dicts, beside DDP and beside a plain model.

The behaviours are those that PyTorch's own tests of these functions ask of a plain optimizer.
"""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from listed_state import assert_listed, assert_same, leaves
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from training import assert_bitwise_equal, cutting, set_gradients, small_model
from zeroshard import ZeroRedundancyOptimizer, full_optimizer_state_dict
from zeroshard_testing import raises_on

BOTH = (0, 1)
PARTITIONS = pytest.mark.parametrize("partition", ["whole", "split"])
LAYOUTS = pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
MODELS = pytest.mark.parametrize("wrap", [DistributedDataParallel, lambda model: model], ids=["ddp", "plain"])


class Pair:
    """A sharded optimizer beside a wrapped model, and the plain one beside an equal model."""

    def __init__(
        self,
        partition: str = "whole",
        kind: Any = optim.AdamW,
        *,
        wrap: Any = DistributedDataParallel,
        make: Any = small_model,
        params: Any = lambda model: model.parameters(),
        **settings: Any,
    ) -> None:
        self.module, self.reference = make(), make()
        self.sharded = ZeroRedundancyOptimizer(params(self.module), kind, partition=cutting(partition), **settings)
        self.plain = kind(params(self.reference), **settings)
        self.model = wrap(self.module)

    def train(self, steps: range, *, none: tuple[int, ...] = ()) -> None:
        for step in steps:
            for model, optimizer in ((self.module, self.sharded), (self.reference, self.plain)):
                set_gradients(model.parameters(), step, none=none)
                optimizer.step()
                optimizer.zero_grad()
        assert_bitwise_equal(self.module, self.reference, f"after {steps}")

    def get(self, **options: Any) -> tuple[Any, Any]:
        return (
            get_optimizer_state_dict(self.model, self.sharded, options=StateDictOptions(**options)),
            get_optimizer_state_dict(self.reference, self.plain, options=StateDictOptions(**options)),
        )

    def set(self, ours: Any, theirs: Any, **options: Any) -> None:
        for model, optimizer, loaded in (
            (self.model, self.sharded, ours),
            (self.reference, self.plain, theirs),
        ):
            set_optimizer_state_dict(model, optimizer, loaded, options=StateDictOptions(**options))

    def check_equal(self) -> None:
        """The state on all ranks together is the plain optimizer's."""
        assert_listed(*self.get())


# ---------------------------------------------------------------- get, and set again


@pytest.mark.pairwise
@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
@MODELS
@LAYOUTS
@pytest.mark.parametrize("cpu_offload", [False, True])
def test_get_lists_by_name_what_the_plain_optimizer_has(partition: str, wrap: Any, flat: bool, cpu_offload: bool) -> None:
    pair = Pair(partition, wrap=wrap, weight_decay=0.3)
    pair.train(range(2))
    ours, theirs = pair.get(flatten_optimizer_state_dict=flat, cpu_offload=cpu_offload)
    assert_listed(ours, theirs)
    assert ("state.0.weight.exp_avg" if flat else "state") in ours


@pytest.mark.pairwise
@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
@MODELS
@LAYOUTS
@pytest.mark.parametrize("cpu_offload", [False, True])
def test_set_takes_what_get_gave(partition: str, wrap: Any, flat: bool, cpu_offload: bool) -> None:
    options = {"flatten_optimizer_state_dict": flat, "cpu_offload": cpu_offload}
    pair = Pair(partition, wrap=wrap)
    pair.train(range(2))
    pair.sharded.param_groups[0]["lr"] = pair.plain.param_groups[0]["lr"] = 0.3
    pair.train(range(2, 3))
    given = copy.deepcopy(pair.get(**options))
    before = copy.deepcopy(pair.reference.state_dict())
    # Into a new optimizer, and back into one that has gone on.
    for other in (Pair(partition, wrap=wrap), pair):
        other.train(range(7, 9))
        other.module.load_state_dict(before)
        other.reference.load_state_dict(before)
        other.set(*copy.deepcopy(given), **options)
        assert other.sharded.param_groups[0]["lr"] == 0.3
        other.check_equal()
        other.train(range(3, 6))


@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
@LAYOUTS
def test_set_takes_the_plain_optimizers_state_from_every_rank(partition: str, flat: bool) -> None:
    pair = Pair(partition)
    for step in range(3):
        set_gradients(pair.reference.parameters(), step)
        pair.plain.step()
        pair.plain.zero_grad()
    pair.module.load_state_dict(pair.reference.state_dict())
    given = pair.get(flatten_optimizer_state_dict=flat)[1]
    set_optimizer_state_dict(
        pair.model, pair.sharded, given, options=StateDictOptions(flatten_optimizer_state_dict=flat)
    )
    pair.check_equal()
    pair.train(range(3, 6))


# ---------------------------------------------------------------- what does not fit


def without(state_dict: dict[str, Any], name: str) -> dict[str, Any]:
    """Leave out the state of a parameter, as a checkpoint of a model without it does."""
    return {**state_dict, "state": {key: entries for key, entries in state_dict["state"].items() if key != name}}


@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
@pytest.mark.parametrize("whose", ["ours", "plain"])
def test_a_missing_parameter_is_an_error_or_begins_anew(partition: str, whose: str) -> None:
    pair = Pair(partition)
    pair.train(range(2))
    given = [without(found, "2.weight") for found in copy.deepcopy(pair.get())]
    given[0] = given[0] if whose == "ours" else copy.deepcopy(given[1])
    other = Pair(partition)
    other.module.load_state_dict(pair.reference.state_dict())
    other.reference.load_state_dict(pair.reference.state_dict())
    with raises_on(RuntimeError, ranks=BOTH, match=r"Missing optimizer state for parameter '2\.weight'"):
        set_optimizer_state_dict(other.model, other.sharded, given[0])
    other.set(*given, strict=False)
    other.check_equal()
    assert "2.weight" not in other.get()[0]["state"]
    other.train(range(2, 5))


@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
@LAYOUTS
@pytest.mark.parametrize("strict", [False, True])
def test_parameters_that_the_model_does_not_have_are_left_out(partition: str, flat: bool, strict: bool) -> None:
    class Longer(nn.Sequential):
        pass

    pair = Pair(partition, make=lambda: nn.Sequential(*small_model(), nn.Linear(1, 1)))
    pair.train(range(2))
    given = copy.deepcopy(pair.get(flatten_optimizer_state_dict=flat))
    other = Pair(partition)
    for model in (other.module, other.reference):
        model.load_state_dict(pair.reference.state_dict(), strict=False)
    other.set(*given, strict=strict, flatten_optimizer_state_dict=flat)
    assert not any("5.weight" in path for path in other.get()[0]["state"])
    other.check_equal()
    other.train(range(2, 5))


@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
@pytest.mark.parametrize("name", ["0.weight", "3.bias"])
def test_entries_that_do_not_fit_are_an_error_on_every_rank(partition: str, name: str) -> None:
    pair = Pair(partition)
    pair.train(range(2))
    whole = pair.get()[1]
    before = copy.deepcopy(whole)
    entries = whole["state"][name]
    for wrong, match in (
        ({key: value for key, value in entries.items() if key != "exp_avg"}, "missing entry 'exp_avg'"),
        ({**entries, "other": torch.ones(2)}, "extra entry 'other'"),
        ({**entries, "exp_avg": torch.ones(3, 3)}, r"entry 'exp_avg' has shape \(3, 3\)"),
    ):
        given = {**whole, "state": {**whole["state"], name: wrong}}
        with raises_on(ValueError, ranks=BOTH, match=rf"'?{name}'?.*{match}"):
            set_optimizer_state_dict(pair.model, pair.sharded, given)
    assert_same(whole, before)
    pair.check_equal()
    pair.train(range(2, 4))


# ---------------------------------------------------------------- all of it on one rank


@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
@LAYOUTS
def test_a_full_state_dict_of_one_part_refuses_to_be_read(rank: int, partition: str, flat: bool) -> None:
    pair = Pair(partition)
    pair.train(range(2))
    options = {"full_state_dict": True, "flatten_optimizer_state_dict": flat}
    ours, theirs = pair.get(**options)
    assert_listed(ours, theirs)
    lacking = 0
    for path, value in leaves(ours):
        expected = dict(leaves(theirs))[path]
        if not isinstance(value, torch.Tensor):
            continue
        try:
            assert torch.equal(value, expected)
        except RuntimeError as error:
            lacking += 1
            assert "zeroshard.full_optimizer_state_dict(model, optimizer)" in str(error)
            for read in (value.tolist, value.numpy, lambda v=value: v + 1, lambda v=value: torch.save(v, io.BytesIO())):
                with pytest.raises(RuntimeError, match=r"zeroshard\.full_optimizer_state_dict\(model, optimizer\)"):
                    read()
    assert lacking > 0
    with pytest.raises(RuntimeError, match=r"full_optimizer_state_dict|consolidate_state_dict"):
        torch.save(ours, io.BytesIO())
    # With cpu_offload rank 0 alone gets one, which lacks as much.
    on_rank_0 = pair.get(**options, cpu_offload=True)[0]
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"full_optimizer_state_dict|consolidate_state_dict"):
            torch.save(on_rank_0, io.BytesIO())
    else:
        assert on_rank_0 == {}


@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
@MODELS
@pytest.mark.parametrize("to", [0, 1])
def test_full_optimizer_state_dict_is_the_plain_optimizers(rank: int, partition: str, wrap: Any, to: int) -> None:
    pair = Pair(partition, wrap=wrap)
    # Also of state that does not exist yet.
    for _ in range(2):
        full = full_optimizer_state_dict(pair.model, pair.sharded, to=to)
        theirs = pair.get(full_state_dict=True)[1]
        if rank == to:
            assert_same(full, theirs)
            torch.save(full, io.BytesIO())
        else:
            assert full == {}
        # Until the next step torch's own function returns it on that rank.
        ours = pair.get(full_state_dict=True)[0]
        if rank == to:
            assert_same(ours, theirs)
        assert_listed(ours, theirs)
        pair.train(range(2))


@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
@MODELS
@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("source", ["plain", "ours"])
def test_a_full_state_dict_is_loaded(rank: int, partition: str, wrap: Any, broadcast: bool, source: str) -> None:
    pair = Pair(partition, wrap=wrap, betas=(0.8, 0.9))
    pair.train(range(3))
    theirs = pair.get()[1]
    if source == "ours":
        found = [full_optimizer_state_dict(pair.model, pair.sharded)]
        dist.broadcast_object_list(found)
        assert_same(found[0], theirs)
    given = theirs if rank == 0 or not broadcast else {}
    other = Pair(partition, wrap=wrap)
    for model in (other.module, other.reference):
        model.load_state_dict(pair.reference.state_dict())
    before = copy.deepcopy(given)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    # Into an optimizer without state, and into one that has some.
    for _ in range(2):
        set_optimizer_state_dict(other.model, other.sharded, given, options=options)
        set_optimizer_state_dict(other.reference, other.plain, copy.deepcopy(theirs))
        assert_same(given, before)
        other.check_equal()
        other.train(range(3, 5))
        for model in (other.module, other.reference):
            model.load_state_dict(pair.reference.state_dict())
