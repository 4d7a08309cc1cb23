"""``load_state_dict(from_rank=...)``: one rank alone has the checkpoint."""

from __future__ import annotations

import copy
from importlib import import_module
from importlib.util import find_spec
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
    with pytest.raises(ValueError, match=r"which rank 1 owns, are not there.*Hand in a consolidated state dict"):
        pair.sharded.load_state_dict(pair.sharded.state_dict() if rank == 0 else {}, from_rank=0)
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
