"""State dicts that lack what a model has, or have what it lacks, set by the functions of torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.combinations import PARTITIONS
from support.listed_state import assert_listed, assert_same
from support.state_dict_functions import Pair
from support.training import small_model
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict
from zeroshard import full_optimizer_state_dict
from zeroshard_testing import raises_on

BOTH = (0, 1)


def without(state_dict: dict[str, Any], name: str) -> dict[str, Any]:
    """Leave out the state of a parameter, as a checkpoint of a model without it does."""
    return {**state_dict, "state": {key: entries for key, entries in state_dict["state"].items() if key != name}}


@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
def test_a_missing_parameter_is_an_error_or_begins_anew(rank: int, partition: str) -> None:
    pair = Pair(partition)
    pair.train(range(2))
    found, theirs = copy.deepcopy(pair.get())
    values, missing = pair.values(), without(theirs, "2.weight")
    ways = [
        (without(found, "2.weight"), {}),
        (missing, {}),
        (missing, {"full_state_dict": True}),
        (missing if rank == 0 else {}, {"full_state_dict": True, "broadcast_from_rank0": True}),
    ]
    for given, options in ways:
        other = pair.another()
        other.go_on_from(values)
        if "broadcast_from_rank0" not in options:
            # There torch raises on rank 0 alone, and the others wait for it.
            with raises_on(RuntimeError, ranks=BOTH, match=r"Missing optimizer state for parameter '2\.weight'"):
                set_optimizer_state_dict(other.model, other.sharded, given, options=StateDictOptions(**options))
        full = bool(options)
        set_optimizer_state_dict(
            other.model, other.sharded, copy.deepcopy(given), options=StateDictOptions(**options, strict=False)
        )
        set_optimizer_state_dict(
            other.reference,
            other.plain,
            copy.deepcopy(missing),
            options=StateDictOptions(full_state_dict=full, strict=False),
        )
        ours, expected = other.get()
        # With full_state_dict torch keeps what the optimizer has of it.
        assert ("2.weight" in ours["state"]) == full
        assert_listed(ours, expected)
        other.train(range(2, 4))


@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
def test_parameters_that_the_model_does_not_have_are_left_out(partition: str) -> None:
    pair = Pair(partition, model=lambda: nn.Sequential(*small_model(), nn.Linear(1, 1)))
    pair.train(range(2))
    for flat in (False, True):
        given = pair.get(flatten_optimizer_state_dict=flat)[1]
        other = Pair(partition)
        other.go_on_from(pair.values())
        other.set(copy.deepcopy(given), copy.deepcopy(given), flatten_optimizer_state_dict=flat)
        ours, theirs = other.get()
        assert "5.weight" not in ours["state"]
        assert_listed(ours, theirs)
        other.train(range(2, 4))


@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
def test_entries_that_do_not_fit_are_an_error_on_every_rank(partition: str) -> None:
    pair = Pair(partition)
    pair.train(range(2))
    whole = copy.deepcopy(pair.get()[1])
    for name in ("0.weight", "3.bias"):
        entries = whole["state"][name]
        for wrong, match in (
            ({key: value for key, value in entries.items() if key != "exp_avg"}, "missing entry 'exp_avg'"),
            ({**entries, "other": torch.ones(2)}, "extra entry 'other'"),
            ({**entries, "exp_avg": torch.ones(3, 3)}, r"entry 'exp_avg' has shape \(3, 3\)"),
        ):
            given = {**whole, "state": {**whole["state"], name: wrong}}
            with raises_on(ValueError, ranks=BOTH, match=rf"'{name}': {match}"):
                set_optimizer_state_dict(pair.model, pair.sharded, given)
    assert_listed(*pair.get())
    pair.train(range(2, 4))


@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
def test_parameters_that_are_unused_or_frozen_after_steps_are_missing(rank: int, partition: str) -> None:
    def trained() -> Pair:
        pair = Pair(partition)
        pair.train(range(2), unused=(4, 7))
        for model in (pair.module, pair.reference):
            model[0].requires_grad_(False)
        return pair

    pair, other = trained(), trained()
    for flat in (False, True):
        assert_listed(*pair.get(flatten_optimizer_state_dict=flat))
    given = copy.deepcopy(pair.get())
    with raises_on(RuntimeError, ranks=BOTH, match=r"Missing optimizer state for parameter '2\.weight'"):
        set_optimizer_state_dict(other.model, other.sharded, given[0])
    other.set(*given, strict=False)
    assert_listed(*other.get())
    full = full_optimizer_state_dict(pair.model, pair.sharded[0])
    if rank == 0:
        assert full["state"].keys() == pair.get()[1]["state"].keys()
        assert_same(full, pair.get()[1])
    # While all of it is on one rank, every rank lists an empty state of what was never stepped, or strict would differ.
    found, theirs = copy.deepcopy(pair.get())
    assert found["state"].keys() == dict(pair.module.named_parameters()).keys()
    assert found["state"]["2.weight"] == {}
    set_optimizer_state_dict(pair.model, pair.sharded, found)
    set_optimizer_state_dict(pair.reference, pair.plain, theirs, options=StateDictOptions(strict=False))
    assert_listed(*pair.get())
    given = [full]
    dist.broadcast_object_list(given)
    for broadcast in (False, True):
        ours = copy.deepcopy(given[0]) if rank == 0 or not broadcast else {}
        other.set(ours, copy.deepcopy(given[0]), full_state_dict=True, broadcast_from_rank0=broadcast, strict=False)
        assert_listed(*other.get())
    other.train(range(2, 4), unused=(7,))


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize(
    "way",
    [
        "every rank",
        pytest.param("broadcast", marks=pytest.mark.xfail(strict=True, reason="torch gives them to rank 0 alone")),
    ],
)
def test_hyperparameters_that_a_scheduler_has_added_are_set(rank: int, way: str) -> None:
    pair = Pair("whole")
    for optimizer in (*pair.sharded, *pair.plain):
        optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.95**epoch)
    theirs = copy.deepcopy(pair.get()[1])
    other, is_broadcast = pair.another(), way == "broadcast"
    other.set(
        copy.deepcopy(theirs) if rank == 0 or not is_broadcast else {},
        theirs,
        full_state_dict=is_broadcast,
        broadcast_from_rank0=is_broadcast,
    )
    assert other.sharded[0].param_groups[0]["initial_lr"] == 0.001
    other.train(range(2))
