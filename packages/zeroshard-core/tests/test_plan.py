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
    ("owners", "message"),
    [
        ((), "a plan of 1 tensors for 2 ranks should have 1 owners, but has 0"),
        (((),), r"'weight' should have distinct owners among ranks 0 to 1, but has \[\]"),
        (((2,),), r"'weight' should have distinct owners among ranks 0 to 1, but has \[2\]"),
        (((-1,),), r"'weight' should .* but has \[-1\]"),
        (((1, 1),), r"'weight' should .* but has \[1, 1\]"),
    ],
)
def test_a_plan_whose_tensors_do_not_have_owners_is_refused(owners, message):
    with pytest.raises(ValueError, match=message):
        Plan(2, (WEIGHT,), owners, (0.0, 0.0))


@pytest.mark.parametrize("shape", [(2,), (), (0, 3), (1, 2), (2, 64), (191,)])
def test_a_tensor_is_cut_for_no_more_ranks_than_it_has_rows(shape):
    with pytest.raises(ValueError, match=r"'w' of shape .* has 3 owners, but can be cut into \d parts only"):
        Plan(3, (TensorSpec("w", shape, torch.float32),), ((0, 1, 2),), (0.0, 0.0, 0.0))


def test_a_tensor_without_elements_has_one_owner():
    empty = TensorSpec("empty", (0, 3), torch.float32)
    plan = Plan(1, (empty, WEIGHT), ((0,), (0,)), (4.0,))
    (shard,) = plan.of_tensor(0)
    assert (shard.rank, shard.numel, shard.flat) == (0, 0, slice(0, 0))
    assert shard.narrow(torch.empty(0, 3)).shape == (0, 3)


def test_parts_are_rows_in_the_order_of_their_owners_the_larger_ones_first():
    plan = Plan(3, (TensorSpec("w", (64, 5), torch.float32, stride=(1, 64)),), ((2, 0, 1),), (0.0, 0.0, 0.0))
    assert plan.shards == (Shard(0, 2, 1, 0, 2, 64), Shard(0, 0, 1, 2, 4, 64), Shard(0, 1, 1, 4, 5, 64))


@pytest.mark.parametrize("world_size", [1, 7, 4096])
def test_a_plan_prints_as_a_short_table(world_size):
    specs = [TensorSpec(f"layer{i}.weight", (512, 640), torch.float32) for i in range(40)]
    plan = partition(specs, world_size, strategy="split")
    assert str(plan) == repr(plan)
    lines = str(plan).splitlines()
    assert len(lines) <= 20
    assert lines[0].startswith(f"Plan for {world_size} rank")
    assert "40 tensors" in lines[0]
    assert "13,107,200 elements" in lines[0]
    assert max(map(len, lines)) <= 120


ROWS = TensorSpec("w", (10, 32), torch.float32, group=1)
"""Cut at multiples of two rows."""
EVEN = Plan(2, (WEIGHT, ROWS), ((0,), (1, 0)), (0.0, 0.0))
UNEVEN = replace(EVEN, starts=((), (0, 2)))


def test_parts_begin_at_the_rows_of_the_plan():
    assert EVEN.of_tensor(1) == (Shard(1, 1, 0, 0, 6, 32), Shard(1, 0, 0, 6, 10, 32))
    assert UNEVEN.of_tensor(1) == (Shard(1, 1, 0, 0, 2, 32), Shard(1, 0, 0, 2, 10, 32))
    assert UNEVEN.of_rank(0) == (Shard(0, 0, 0, 0, 4, 1), Shard(1, 0, 0, 2, 10, 32))
    assert UNEVEN.is_cut(1)


def test_rows_of_even_parts_are_no_rows():
    again = replace(EVEN, starts=((0,), (0, 6)))
    assert again == EVEN
    assert again.starts == ()
    assert again.fingerprint() == EVEN.fingerprint()
    assert replace(UNEVEN, starts=((0,), (0, 2))) == UNEVEN


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (((),), "should have 2 starts, but has 1"),
        (((), (0, 2, 4)), "tensor 1 'w' has 2 owners, but `starts` has 3 parts"),
        (((), (2, 4)), r"tensor 1 'w' should be cut at ascending multiples of 2 from 0 to 10, not \(2, 4\)"),
        (((), (0, 3)), r"ascending multiples of 2 from 0 to 10, not \(0, 3\)"),
        (((), (0, 0)), r"not \(0, 0\)"),
        (((), (0, 10)), r"not \(0, 10\)"),
        (((), (0, -2)), r"not \(0, -2\)"),
        (((1,), ()), r"tensor 0 'weight' should be cut .* from 0 to 4, not \(1,\)"),
    ],
)
def test_rows_where_a_tensor_cannot_be_cut_are_refused(starts, message):
    with pytest.raises(ValueError, match=message):
        replace(EVEN, starts=starts)


def test_rows_make_another_plan():
    assert UNEVEN.fingerprint() != EVEN.fingerprint()
    assert UNEVEN.fingerprint() == "d508c14f4fda08aec49aa55109226c9cc0013f99cd8035218b4f962165476d08"
    assert EVEN.difference(UNEVEN) == "tensor 1 'w' is cut at even rows here, at rows 0, 2 there"
    assert UNEVEN.difference(EVEN) == "tensor 1 'w' is cut at rows 0, 2 here, at even rows there"
    other = replace(EVEN, starts=((), (0, 8)))
    assert UNEVEN.difference(other) == "tensor 1 'w' is cut at rows 0, 2 here, at rows 0, 8 there"
    assert UNEVEN.difference(replace(UNEVEN)) is None


VERSION_2 = (
    '{"format": "zeroshard-plan", "version": 2, "world_size": 2, "tensors": [{"name": "w", "shape": [300, 128], '
    '"dtype": "float32", "device": "cpu", "trainable": true, "group": 0, "stride": null}, {"name": "b", "shape": [4], '
    '"dtype": "bfloat16", "device": "cpu", "trainable": false, "group": 1, "stride": null}], "owners": [[0, 1], [0]], '
    '"loads": [19200.0, 19200.0], "heaviest": 0.0}'
)
"""Written before plans had rows, bytes of state, weights and classes."""


def test_the_text_of_an_older_release_is_read_and_keeps_its_fingerprint():
    plan = Plan.from_json(VERSION_2)
    assert json.loads(plan.to_json()) == json.loads(VERSION_2)
    assert plan.fingerprint() == "c3fb4292529b3868675488e57aa2320bf101e5b8f2d8f0cbca5a177c7cff4ef2"
    specs = [
        TensorSpec("w", (300, 128), torch.float32),
        TensorSpec("b", (4,), torch.bfloat16, trainable=False, group=1),
    ]
    now = partition(specs, 2, strategy="split")
    assert now.fingerprint() == plan.fingerprint()
    assert (plan.imbalances, plan.lower_bound, plan.heaviest_tensors) == ({"work": 1.0, "sent": 1.0}, 19200.0, ())
    assert plan.useful_ranks is None


def test_only_a_plan_with_rows_has_a_version_that_older_releases_refuse():
    assert json.loads(UNEVEN.to_json())["version"] == 3
    assert Plan.from_json(UNEVEN.to_json()) == UNEVEN
    known = replace(EVEN, state_loads=(1.0, 2.0), weights=(3.0, 4.0), classes=("A", "B"))
    assert json.loads(known.to_json())["version"] == 2
    assert Plan.from_json(known.to_json()) == known
    assert known.fingerprint() == EVEN.fingerprint()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"state_loads": (1.0,)}, "a plan of 2 tensors for 2 ranks should have 2 state_loads, but has 1"),
        ({"weights": (1.0, 2.0, 3.0)}, "a plan of 2 tensors for 2 ranks should have 2 weights, but has 3"),
        ({"state_loads": (1.0, -1.0)}, "finite and not negative"),
        ({"weights": (1.0, float("nan"))}, "finite and not negative"),
        ({"heaviest": float("inf")}, "finite and not negative"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        replace(EVEN, **fields)


def test_the_lower_bound_is_the_mean_or_a_tensor_or_what_their_number_forces():
    def bound(*sizes, world_size=2):
        return partition([TensorSpec("t", (size,), torch.float32) for size in sizes], world_size).lower_bound

    assert bound(1, 1, 1, 1) == 2
    assert bound(9, 1, 1) == 9
    assert bound(5, 4, 4) == 8
    assert bound(3, 3, 3, 3, 3) == 9
    assert bound(5, 4, 4, 4, 3, 3, 3, world_size=3) == 9
    assert bound() == 0


@given(plans())
def test_no_load_is_below_the_lower_bound_of_the_largest(plan):
    assert max(plan.loads) >= plan.lower_bound * (1 - 1e-9)
    assert plan.lower_bound >= max(sum(plan.loads) / plan.world_size, plan.heaviest) * (1 - 1e-9)


def test_the_heaviest_tensors_are_named():
    plan = partition([TensorSpec(f"t{size}", (size,), torch.float32) for size in (3, 9, 5, 9, 1)], 2)
    assert plan.heaviest_tensors == (1, 3, 2)
    assert plan.useful_ranks == 3


def test_a_rank_sends_the_bytes_of_its_trainable_parts():
    specs = (
        TensorSpec("cut", (3, 64), torch.bfloat16),
        TensorSpec("whole", (5,), torch.float32),
        TensorSpec("frozen", (7,), torch.float32, trainable=False),
    )
    plan = Plan(2, specs, ((1, 0), (0,), (0,)), (1.0, 1.0))
    assert plan.sent_loads == (2 * 64 + 4 * 5, 2 * 128)
    assert plan.imbalances["sent"] == 256 / ((148 + 256) / 2)


@pytest.mark.parametrize("loads", [(1.0,), (1.0, -1.0), (1.0, float("nan")), (1.0, float("inf"))])
def test_loads_are_one_finite_number_per_rank(loads):
    with pytest.raises(ValueError, match="load"):
        Plan(2, (WEIGHT,), ((0,),), loads)


def test_a_plan_needs_a_rank():
    with pytest.raises(ValueError, match="at least one rank"):
        Plan(0, (), (), ())


@given(plans())
def test_shards_can_be_looked_up_by_rank_and_by_tensor(plan):
    by_rank = [shard for rank in range(plan.world_size) for shard in plan.of_rank(rank)]
    by_tensor = [shard for index in range(len(plan.tensors)) for shard in plan.of_tensor(index)]
    assert sorted(by_rank, key=lambda s: (s.tensor, s.flat.start)) == by_tensor == list(plan.shards)
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
    assert plan.imbalance == 1.0


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
        ({"format": "other"}, "this is not a plan"),
        ({"version": 1}, "version 1, but this release reads versions 2"),
        ({"world_size": "2"}, "world_size should be of type int"),
        ({"world_size": True}, "world_size should be of type int"),
        ({"tensors": {}}, "tensors should be of type list"),
        ({"tensors": [1]}, r"tensors\[0\] should be of type dict"),
        ({"owners": [[0], ["x"]]}, r"owners\[1\]\[0\] should be of type int"),
        ({"owners": None}, "owners should be of type list, but is missing"),
        ({"loads": [1.0, "x"]}, r"loads\[1\] should be of type float"),
        ({"loads": [1.0, 10**400]}, r"loads\[1\] should be of type float"),
        ({"heaviest": None}, "heaviest should be of type float"),
        ({"version": 4}, "version 4, but this release reads versions 2 and 3"),
        ({"starts": [[], ["x"]]}, r"starts\[1\]\[0\] should be of type int"),
        ({"state_loads": 3}, "state_loads should be of type list"),
        ({"weights": [1, None]}, r"weights\[1\] should be of type float"),
        ({"classes": [1]}, r"classes\[0\] should be of type str"),
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
    with pytest.raises(ValueError, match=r"tensors\[0\].dtype should be of type dtype"):
        Plan.from_json(json.dumps(content))


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "null"])
def test_what_is_no_json_object_is_no_plan(text):
    with pytest.raises(ValueError, match="this is not a plan"):
        Plan.from_json(text)


def test_the_fingerprint_does_not_depend_on_the_process():
    program = (
        "import sys; from zeroshard_core import Plan; sys.stdout.write(Plan.from_json(sys.stdin.read()).fingerprint())"
    )
    specs = (replace(WEIGHT, name="gewöhnlich \ud800"), BIAS)
    plan = partition(specs, 3)
    other_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=plan.to_json(),
        env={**os.environ, "PYTHONHASHSEED": other_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == plan.fingerprint()


def test_the_fingerprint_is_the_same_in_every_release():
    # A change here makes running jobs of two releases refuse each other: raise the version of the format with it.
    assert two_tensors().fingerprint() == "fbfe2a38975cb4bfbf00132aa05b7a09be3f3986d6a6c1b86d072ee9c65e0324"


@given(plans(), plans())
def test_plans_differ_in_words_exactly_if_their_fingerprints_differ(here, there):
    equal = here.fingerprint() == there.fingerprint()
    assert (here.difference(there) is None) == (there.difference(here) is None) == equal


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (two_tensors(world_size=3), "world size 2 here, 3 there"),
        (two_tensors(WEIGHT), "tensor 1 'bias' is here only"),
        (two_tensors(WEIGHT, BIAS, replace(BIAS, name="x")), "tensor 2 'x' is there only"),
        (two_tensors(BIAS), "tensor 0 is 'weight' here, 'bias' there"),
        (
            two_tensors(replace(BIAS, name="x"), WEIGHT, BIAS),
            "tensor 0 is 'weight' here, 'x' there",
        ),
        (two_tensors(WEIGHT, replace(BIAS, name="x")), "tensor 1 is 'bias' here, 'x' there"),
        (
            two_tensors(BIAS, WEIGHT),
            "another order: tensor 0 is 'weight' here, 'bias' there",
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
            Plan(2, (WEIGHT, BIAS), ((0,), (0,)), (6.0, 0.0)),
            "tensor 1 'bias' belongs to rank 1 here, to rank 0 there",
        ),
        (two_tensors(), None),
    ],
)
def test_the_first_difference_is_named(there, message):
    assert two_tensors().difference(there) == message


def test_strides_with_gaps_are_no_description_of_a_tensor():
    with pytest.raises(ValueError, match="'w' of shape \\(2, 3\\) has strides \\(4, 1\\)"):
        TensorSpec("w", (2, 3), torch.float32, stride=(4, 1))


@pytest.mark.parametrize("dtype", ["float32", None, float])
def test_what_is_no_dtype_is_refused(dtype):
    with pytest.raises(TypeError, match=r"dtype of tensor 'w' should be a torch\.dtype such as torch\.float32, but is"):
        TensorSpec("w", (2, 3), dtype)


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match="'w' has a negative size"):
        TensorSpec("w", (2, -3), torch.float32)


def test_a_spec_made_from_a_tensor_s_own_size_is_an_ordinary_one():
    spec = TensorSpec("weight", torch.empty(4).shape, torch.float32)
    assert type(spec.shape) is tuple
    assert spec == WEIGHT
