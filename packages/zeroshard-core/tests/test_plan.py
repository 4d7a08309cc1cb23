"""A plan is a valid, comparable, portable value."""

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plan_strategies import plans
from zeroshard_core import Plan, Shard, TensorSpec, partition

WEIGHT = TensorSpec("weight", (4,), torch.float32)
BIAS = TensorSpec("bias", (2,), torch.float32)


def two_tensors(*specs, world_size=2):
    return partition(specs or (WEIGHT, BIAS), world_size)


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([], r"'weight' has 4 elements; those in \[0, 4\) have no owner"),
        ([Shard(0, 0, 3, 0)], r"'weight' has 4 elements; those in \[3, 4\) have no owner"),
        ([Shard(0, 0, 1, 0), Shard(0, 2, 4, 1)], r"'weight'.*\[1, 2\) have no owner.*rank 1"),
        ([Shard(0, 0, 3, 0), Shard(0, 2, 4, 1)], r"'weight'.*rank 1 owns \[2, 4\).*before 3 have an owner already"),
        ([Shard(0, 0, 5, 0)], r"'weight' has 4 elements, but rank 0 owns \[0, 5\)"),
        ([Shard(0, 0, 4, 2)], r"'weight'.*rank 2, but there are ranks 0 to 1 only"),
        ([Shard(0, 0, 4, -1)], r"'weight'.*rank -1"),
        ([Shard(0, 0, 2, 1), Shard(0, 2, 4, 1)], r"'weight': rank 1 owns two ranges"),
        ([Shard(0, 0, 4, 0), Shard(0, 0, 4, 1)], r"'weight': rank 1 owns \[0, 4\) of it, which has an owner already"),
        ([Shard(0, 0, 4, 0), Shard(1, 0, 4, 1)], r"rank 1 owns a shard of tensor 1, but there are 1 tensors only"),
        ([Shard(0, 0, 0, 0), Shard(0, 0, 4, 1)], r"'weight'.*rank 0 owns \[0, 0\)"),
    ],
)
def test_a_plan_whose_elements_do_not_have_exactly_one_owner_is_refused(shards, message):
    with pytest.raises(ValueError, match=message):
        Plan(2, (WEIGHT,), tuple(shards), (0.0, 0.0))


def test_a_tensor_without_elements_has_one_owner():
    empty = TensorSpec("empty", (0, 3), torch.float32)
    plan = Plan(1, (empty, WEIGHT), (Shard(0, 0, 0, 0), Shard(1, 0, 4, 0)), (4.0,))
    assert plan.of_tensor(0) == (Shard(0, 0, 0, 0),)
    with pytest.raises(ValueError, match="'empty' has 0 elements"):
        Plan(1, (empty,), (), (0.0,))


@pytest.mark.parametrize("loads", [(1.0,), (1.0, -1.0), (1.0, float("nan")), (1.0, float("inf"))])
def test_loads_are_one_finite_number_per_rank(loads):
    with pytest.raises(ValueError, match="load"):
        Plan(2, (WEIGHT,), (Shard(0, 0, 4, 0),), loads)


def test_a_plan_needs_a_rank():
    with pytest.raises(ValueError, match="at least one rank"):
        Plan(0, (), (), ())


@given(plans())
def test_shards_can_be_looked_up_by_rank_and_by_tensor(plan):
    by_rank = [shard for rank in range(plan.world_size) for shard in plan.of_rank(rank)]
    by_tensor = [shard for index in range(len(plan.tensors)) for shard in plan.of_tensor(index)]
    assert sorted(by_rank, key=lambda s: (s.tensor, s.start)) == by_tensor == list(plan.shards)
    assert all(shard.rank == rank for rank in range(plan.world_size) for shard in plan.of_rank(rank))


@pytest.mark.parametrize("outside", [-1, 2])
def test_what_does_not_exist_is_not_looked_up(outside):
    plan = two_tensors()
    with pytest.raises(IndexError, match="no rank"):
        plan.of_rank(outside)
    with pytest.raises(IndexError, match="no tensor"):
        plan.of_tensor(outside)


def test_imbalance_is_the_largest_load_over_the_mean():
    assert two_tensors().imbalance == pytest.approx(4 / 3)


def test_nothing_that_weighs_nothing_is_out_of_balance():
    plan = two_tensors(replace(WEIGHT, trainable=False))
    assert (plan.imbalance, plan.optimality_gap) == (1.0, 0.0)


def test_the_gap_counts_from_the_heaviest_uncut_tensor():
    assert two_tensors().optimality_gap == 0.0


def test_the_gap_counts_from_the_mean_where_that_is_larger():
    thirds = [TensorSpec(f"t{i}", (10,), torch.float32) for i in range(3)]
    assert two_tensors(*thirds).optimality_gap == pytest.approx(20 / 15 - 1)


@given(plans())
def test_json_gives_back_an_equal_plan(plan):
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.fingerprint() == plan.fingerprint()


@given(plans(), st.data())
def test_damaged_json_is_refused_or_read_as_a_valid_plan(plan, data):
    text = plan.to_json()
    position = data.draw(st.integers(0, len(text) - 1))
    damaged = (
        text[:position] + data.draw(st.sampled_from(["", "0", "-", '"', "[", "null", "9" * 400])) + text[position + 1 :]
    )
    with contextlib.suppress(ValueError):
        assert isinstance(Plan.from_json(damaged), Plan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "this is no plan"),
        ({"version": 2}, "version 2, but this release reads version 1"),
        ({"world_size": "2"}, "world_size should be an integer"),
        ({"world_size": True}, "world_size should be an integer"),
        ({"tensors": {}}, "tensors should be a list"),
        ({"tensors": [1]}, r"tensors\[0\] should be an object"),
        ({"shards": [[0, 0, 4]]}, r"shards\[0\] should be \[tensor, start, stop, rank\]"),
        ({"shards": None}, "shards should be a list, but is nothing"),
        ({"loads": [1.0, "x"]}, r"loads\[1\] should be a number"),
        ({"loads": [1.0, 10**400]}, r"loads\[1\] should be a finite number"),
        ({"heaviest": None}, "heaviest should be a number"),
    ],
)
def test_foreign_json_is_refused_by_the_name_of_the_field(change, message):
    content = {**json.loads(two_tensors().to_json()), **change}
    with pytest.raises(ValueError, match=message):
        Plan.from_json(json.dumps(content))


@pytest.mark.parametrize("dtype", ["load", "Tensor", "no_such", 3, None])
def test_only_dtypes_are_read_as_dtypes(dtype):
    content = json.loads(two_tensors().to_json())
    content["tensors"][0]["dtype"] = dtype
    with pytest.raises(ValueError, match=r"tensors\[0\].dtype should be a dtype"):
        Plan.from_json(json.dumps(content))


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "null"])
def test_what_is_no_json_object_is_no_plan(text):
    with pytest.raises(ValueError, match="this is no plan"):
        Plan.from_json(text)


def test_the_fingerprint_does_not_depend_on_the_process():
    program = (
        "import sys; from zeroshard_core import Plan; sys.stdout.write(Plan.from_json(sys.stdin.read()).fingerprint())"
    )
    specs = (replace(WEIGHT, name="gewöhnlich \ud800"), BIAS)
    plan = partition(specs, 3)
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            input=plan.to_json(),
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == plan.fingerprint()


def test_the_fingerprint_is_the_same_in_every_release():
    # A change here makes running jobs of two releases refuse each other: raise the version of the format with it.
    assert two_tensors().fingerprint() == "ed7e81e1b35afdf4001b869ea56110dccaeaa9409221db4dffcfcbe1c35c05e6"


@given(plans(), plans())
def test_plans_differ_in_words_exactly_if_their_fingerprints_differ(here, there):
    equal = here.fingerprint() == there.fingerprint()
    assert (here.difference(there) is None) == (there.difference(here) is None) == equal


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (two_tensors(world_size=3), "world size 2 here, 3 there"),
        (two_tensors(WEIGHT), "tensor 1 'bias' is here only; there are 1 tensors"),
        (two_tensors(WEIGHT, BIAS, replace(BIAS, name="x")), "tensor 2 'x' is there only; here are 2 tensors"),
        (two_tensors(BIAS), "tensor 0 'weight' is here only; there, tensor 0 is 'bias'"),
        (
            two_tensors(replace(BIAS, name="x"), WEIGHT, BIAS),
            "tensor 0 'x' is there only; here, tensor 0 is 'weight'",
        ),
        (two_tensors(WEIGHT, replace(BIAS, name="x")), "tensor 1 is 'bias' here, 'x' there"),
        (
            two_tensors(BIAS, WEIGHT),
            "another order: tensor 0 is 'weight' here, but 'bias' there, where 'weight' is tensor 1",
        ),
        (two_tensors(replace(WEIGHT, shape=(2, 2)), BIAS), "tensor 0 'weight': shape (4,) here, (2, 2) there"),
        (
            two_tensors(WEIGHT, replace(BIAS, dtype=torch.float16)),
            "tensor 1 'bias': dtype torch.float32 here, torch.float16 there",
        ),
        (two_tensors(WEIGHT, replace(BIAS, stride=(1,))), "tensor 1 'bias': stride None here, (1,) there"),
        (two_tensors(WEIGHT, replace(BIAS, trainable=False)), "tensor 1 'bias': trainable True here, False there"),
        (two_tensors(WEIGHT, replace(BIAS, group=1)), "tensor 1 'bias': group 0 here, 1 there"),
        (two_tensors(WEIGHT, replace(BIAS, device="cuda:0")), "tensor 1 'bias': device cpu here, cuda:0 there"),
        (
            Plan(2, (WEIGHT, BIAS), (Shard(0, 0, 4, 0), Shard(1, 0, 2, 0)), (6.0, 0.0)),
            "tensor 1 'bias': elements [0, 2) belong to rank 1 here, [0, 2) to rank 0 there",
        ),
        (two_tensors(), None),
    ],
)
def test_the_first_difference_is_named(there, message):
    assert two_tensors().difference(there) == message


def test_strides_with_gaps_are_no_description_of_a_tensor():
    with pytest.raises(ValueError, match="'w' of shape \\(2, 3\\) has strides \\(4, 1\\)"):
        TensorSpec("w", (2, 3), torch.float32, stride=(4, 1))


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match="'w' has a negative size"):
        TensorSpec("w", (2, -3), torch.float32)


def test_a_spec_made_from_a_tensor_s_own_size_is_an_ordinary_one():
    spec = TensorSpec("weight", torch.empty(4).shape, torch.float32)
    assert type(spec.shape) is tuple
    assert spec == WEIGHT
