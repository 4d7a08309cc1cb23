"""State entries as JSON and tensors, and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from zeroshard.state.serialization import copy_value, read_value, write_value
from zeroshard_core import StateMapError


def round_trip(value: object) -> Any:
    tensors: list[torch.Tensor] = []
    written = json.loads(json.dumps(write_value(value, tensors, "entry")))
    queue = iter(tensors)

    def make(dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int] | None, device: str) -> torch.Tensor:
        tensor = next(queue)
        assert (tensor.dtype, list(tensor.shape)) == (dtype, list(shape))
        assert stride is None or list(tensor.stride()) == list(stride)
        assert device == tensor.device.type
        return tensor

    return read_value(written, make)


@pytest.mark.parametrize(
    "value",
    [None, True, 0.1, float("inf"), [1, (2, "x")], {"a": [None], "b": {"c": (1.5,)}}, {0: "a", "0": {1: {2, 3}}}],
)
def test_plain_values_come_back_as_they_were(value: object) -> None:
    assert round_trip(value) == value


def test_tensors_come_back_from_inside_lists_and_dicts() -> None:
    value = {"pair": (torch.ones(2, 3), [torch.tensor(4)]), "n": 1}
    back = round_trip(value)
    assert torch.equal(back["pair"][0], torch.ones(2, 3))
    assert back["pair"][1][0].item() == 4


@pytest.mark.parametrize("value", [object(), {True: "a"}, {(1, 2): 3}, {"a": {(2,)}}, torch.nn.Linear(1, 1), b"bytes"])
def test_anything_else_is_refused_by_the_name_of_the_entry(value: object) -> None:
    with pytest.raises(StateMapError, match="entry is a"):
        write_value(value, [], "entry")


def test_a_sparse_tensor_travels_as_its_indices_and_values() -> None:
    back = round_trip({"buffer": torch.eye(3).to_sparse()})["buffer"]
    assert torch.equal(back.to_dense(), torch.eye(3))


def test_a_tensor_in_another_layout_is_refused() -> None:
    with pytest.raises(StateMapError, match="sparse_csr"):
        write_value(torch.eye(2).to_sparse_csr(), [], "entry")


@pytest.mark.parametrize("written", [{"tensor": ["no_such_dtype", [1], None, "cpu"]}, {"what": 1}, [1], {}])
def test_a_damaged_description_is_refused(written: object) -> None:
    with pytest.raises(StateMapError, match="damaged"):
        read_value(written, lambda *_: torch.empty(0))


def test_a_dtype_name_cannot_reach_anything_else_of_torch() -> None:
    with pytest.raises(StateMapError, match="no dtype 'load'"):
        read_value({"tensor": ["load", [1], None, "cpu"]}, lambda *_: torch.empty(0))


def test_a_copy_shares_nothing() -> None:
    value = {"a": [torch.zeros(2)], "b": (torch.zeros(1),)}
    copied = copy_value(value)
    copied["a"][0].fill_(1)
    assert value["a"][0].sum() == 0
