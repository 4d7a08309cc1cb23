"""Optimizer state is cut along shards without loss."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plan_strategies import SMALL_PARTS
from zeroshard_core import (
    StateMapError,
    TensorSpec,
    cut_state,
    partition,
    storage_view,
    to_indices,
    to_names,
)

IMAGE = TensorSpec("conv.weight", (4, 16, 3, 3), torch.float32, stride=(144, 1, 48, 16))
MATRIX = TensorSpec("head.weight", (8, 16), torch.float32)
LEFT, RIGHT = MATRIX.shard(tensor=0, rank=0, stop=4), MATRIX.shard(tensor=0, rank=1, start=4)


def numbered(spec, offset=0.0):
    """A tensor whose elements in storage order are 0, 1, 2, ..."""
    made = torch.empty(spec.shape) if spec.stride is None else torch.empty_strided(spec.shape, spec.stride)
    storage_view(made).copy_(torch.arange(spec.numel) + offset)
    return made


def adam_state(spec):
    return {"step": torch.tensor(3.0), "exp_avg": numbered(spec), "exp_avg_sq": numbered(spec, 0.5), "rounds": 7}


@given(data=st.data(), strategy=st.sampled_from(["whole", "split"]), world_size=st.integers(1, 5))
def test_the_pieces_of_all_shards_are_the_whole(data, strategy, world_size):
    specs = [MATRIX, IMAGE, TensorSpec("scale", (), torch.float32), TensorSpec("none", (0, 3), torch.float32)]
    plan = partition(data.draw(st.permutations(specs)), world_size, strategy=SMALL_PARTS[strategy])
    for index, spec in enumerate(plan.tensors):
        state, found = adam_state(spec), numbered(spec, -1.0)
        for shard in plan.of_tensor(index):
            piece = cut_state(state, spec, shard)
            assert (piece["step"], piece["rounds"]) == (state["step"], 7)
            shard.narrow(found).copy_(piece["exp_avg"])
        assert torch.equal(found, state["exp_avg"])


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_an_entry_is_cut_to_rows_in_the_tensor_s_strides(memory_format):
    entry = numbered(IMAGE).contiguous(memory_format=memory_format)
    piece = cut_state({"exp_avg": entry}, IMAGE, IMAGE.shard(tensor=0, rank=1, start=1, stop=3))["exp_avg"]
    assert torch.equal(piece, entry[1:3])
    assert piece.stride() == IMAGE.stride


def test_rows_may_lie_along_any_dimension():
    spec = replace(MATRIX, stride=(1, 8))
    entry = numbered(MATRIX)
    piece = cut_state({"m": entry}, spec, spec.shard(tensor=0, rank=1, start=3, stop=5))["m"]
    assert torch.equal(piece, entry[:, 3:5])
    assert piece.stride() == (1, 8)


def test_an_entry_with_gaps_in_memory_is_cut_like_any_other():
    gaps = torch.zeros(8, 32)[:, ::2].copy_(numbered(MATRIX))
    assert torch.equal(cut_state({"m": gaps}, MATRIX, RIGHT)["m"], numbered(MATRIX)[4:])


def test_the_state_of_a_whole_tensor_passes_through_untouched():
    state = {"row": torch.zeros(8), "exp_avg": numbered(MATRIX), "pair": [torch.zeros(2)]}
    whole = MATRIX.shard(tensor=0, rank=0)
    cut = cut_state(state, MATRIX, whole)
    assert all(cut[key] is value for key, value in state.items())


def test_cutting_leaves_its_argument_alone():
    state = adam_state(MATRIX)
    before = dict(state)
    cut_state(state, MATRIX, LEFT)
    assert all(state[key] is value for key, value in before.items())


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (torch.zeros(8, 1), r"shape \(8, 1\)"),
        (torch.zeros(128), r"shape \(128,\)"),
        (torch.zeros(8, 16).to_sparse(), r"shape \(8, 16\) and layout torch.sparse_coo"),
        ([torch.zeros(8, 16)], "a list that holds tensors"),
        ({"inner": [torch.zeros(2)]}, "a dict that holds tensors"),
    ],
)
def test_what_does_not_follow_the_elements_is_not_cut(value, shown):
    with pytest.raises(StateMapError, match=rf"'head.weight' of shape \(8, 16\).*'row' has {shown}"):
        cut_state({"row": value}, MATRIX, LEFT)


def test_names_and_indices_convert_into_each_other():
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.Adam([{"params": params[:1]}, {"params": params[1:], "lr": 0.1}])
    for param in params[:2]:
        param.grad = torch.ones(2)
    optimizer.step()
    original = optimizer.state_dict()
    named = to_names(original, ["a", "b", "c"])
    assert list(named["state"]) == ["a", "b"]
    assert [group["params"] for group in named["param_groups"]] == [["a"], ["b", "c"]]
    assert to_indices(named, ["a", "b", "c"]) == original
    assert original["param_groups"][0]["params"] == [0]


@pytest.mark.parametrize(
    ("convert", "state", "params", "names", "message"),
    [
        (to_names, {2: {}}, [0], ["a"], "'state' has the key 2, which is not an index from 0 to 0"),
        (to_names, {}, [0, 1], ["a"], "'param_groups' has the key 1"),
        (to_names, {}, [0, 0], ["a"], "lists 0 twice"),
        (to_names, {}, [0, 1], ["a", "a"], "'a' is the name of index 0 and of index 1"),
        (to_names, {"a": {}}, [0], ["a"], "the key 'a', which is not an index"),
        (to_names, {-1: {}}, [0], ["a"], "the key -1"),
        (to_indices, {"x": {}}, ["a"], ["a"], "'state' has the key 'x', which is not one of the 1 names given"),
        (to_indices, {}, ["x"], ["a"], "'param_groups' has the key 'x'"),
        (to_indices, {}, ["a", "a"], ["a"], "lists 'a' twice"),
        (to_indices, {}, ["a"], ["a", "a"], "'a' is the name of index 0 and of index 1"),
    ],
)
def test_unknown_and_repeated_names_are_refused(convert, state, params, names, message):
    with pytest.raises(StateMapError, match=message):
        convert({"state": state, "param_groups": [{"params": params}]}, names)


def test_what_is_no_state_dict_is_refused():
    with pytest.raises(StateMapError, match="lacks 'param_groups'"):
        to_names({"state": {}}, [])


def test_a_cut_tensor_of_another_dtype_keeps_its_entries_dtype():
    spec = replace(MATRIX, dtype=torch.bfloat16)
    assert cut_state({"m": torch.zeros(8, 16)}, spec, LEFT)["m"].dtype == torch.float32
