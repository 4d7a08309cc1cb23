"""``load_state_dict(from_rank=...)``: one rank alone has the checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from support.combinations import PARTITIONS
from support.state_pair import Pair
from zeroshard_comm import DisagreementError


@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
def test_what_one_rank_has_listed_is_not_loaded_from_it(rank: int, partition: str) -> None:
    pair = Pair(partition)
    pair.step()
    with pytest.raises(ValueError, match=r"lacks the values that rank 1 owns.*Pass a consolidated state dict"):
        pair.sharded.load_state_dict(pair.sharded.state_dict() if rank == 0 else {}, from_rank=0)
    pair.check_equal()


@pytest.mark.ranks(3, backend="gloo")
@PARTITIONS
def test_all_ranks_load_what_one_rank_has(rank: int, partition: str) -> None:
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


def broken(state_dict: dict[str, Any]) -> dict[str, Any]:
    state_dict["state"][0]["exp_avg"] = torch.ones(3)
    return state_dict


def with_hyperparameter(state_dict: dict[str, Any], value: object) -> dict[str, Any]:
    state_dict["param_groups"][0]["eps"] = value
    return state_dict


NUMPY = "rank 0: load_state_dict.*'eps' of param group 0 is a numpy.float32, .* Python's numbers"
WRONG: dict[str, tuple[Callable[[int, Any], Any], int | None, type[Exception], str]] = {
    "two ranks have one": (lambda rank, sd: sd, 0, ValueError, "pass an empty dict on rank 1"),
    "a rank that is not": (lambda rank, sd: sd if rank == 0 else {}, 2, ValueError, r"from_rank=2.*a rank from 0 to 1"),
    "no rank is named": (lambda rank, sd: sd if rank == 0 else {}, None, DisagreementError, "its state dict is"),
    "none has one": (lambda rank, sd: {}, 0, TypeError, "expects a dict with 'state' and 'param_groups'"),
    "damaged": (lambda rank, sd: broken(sd) if rank == 0 else {}, 0, ValueError, "expected"),
    "an object": (
        lambda rank, sd: with_hyperparameter(sd, object()) if rank == 0 else {},
        0,
        ValueError,
        "cannot be sent without pickle",
    ),
    "NumPy's number": (
        lambda rank, sd: with_hyperparameter(sd, import_module("numpy").float32(1e-8)) if rank == 0 else {},
        0,
        ValueError,
        NUMPY,
    ),
}


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_loaded_from_one_rank_is_refused_on_both(rank: int, name: str) -> None:
    given, from_rank, error, words = WRONG[name]
    if name == "NumPy's number":
        pytest.importorskip("numpy", reason="hyperparameters are NumPy's numbers too")
    pair = Pair()
    pair.step()
    with pytest.raises(error, match=words):
        pair.sharded.load_state_dict(given(rank, copy.deepcopy(pair.plain.state_dict())), from_rank=from_rank)
    pair.step()
    pair.check_equal()
