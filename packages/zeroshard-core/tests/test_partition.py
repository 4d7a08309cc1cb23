"""A partition gives every element one owner, and balances what the owners bear."""

import math
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plan_strategies import SMALL_PARTS, WORLD_SIZES, specs
from torch.distributed.optim import ZeroRedundancyOptimizer
from zeroshard_core import (
    ALIGNMENT,
    SMALLEST_PART,
    Shard,
    TensorSpec,
    nbytes,
    numel,
    partition,
    repartition,
    split,
    state_bytes,
)

NAMES = sorted(SMALL_PARTS)
names = pytest.mark.parametrize("name", NAMES)


def vectors(*sizes, **fields):
    return [TensorSpec(f"t{i}", (size,), torch.float32, **fields) for i, size in enumerate(sizes)]


def owners(plan):
    """The owner of every element of every tensor, counted anew."""
    found = [[None] * spec.numel for spec in plan.tensors]
    for shard in plan.shards:
        for element in range(shard.flat.start, shard.flat.stop):
            assert found[shard.tensor][element] is None
            found[shard.tensor][element] = shard.rank
    return found


def torch_owners(tensors, world_size):
    """The owner of every tensor by torch's own algorithm, run on an object without a process group."""
    bare = object.__new__(ZeroRedundancyOptimizer)
    groups = {}
    params = [torch.empty(spec.shape, device="meta") for spec in tensors]
    for spec, param in zip(tensors, params, strict=True):
        groups.setdefault(spec.group, {"params": []})["params"].append(param)
    bare.world_size, bare.param_groups, bare._partition_parameters_cache = world_size, list(groups.values()), []
    owner = {
        id(param): rank
        for rank, rank_groups in enumerate(bare._partition_parameters())
        for group in rank_groups
        for param in group["params"]
    }
    return [owner[id(param)] for param in params]


@names
@given(tensors=specs(), world_size=WORLD_SIZES)
def test_every_element_has_exactly_one_owner(name, tensors, world_size):
    plan = partition(tensors, world_size, strategy=SMALL_PARTS[name])
    assert all(0 <= owner < world_size for tensor in owners(plan) for owner in tensor)
    assert all(plan.of_tensor(index) for index in range(len(tensors)))


@names
@given(tensors=specs(), world_size=WORLD_SIZES)
def test_loads_are_what_a_recount_of_elements_gives(name, tensors, world_size):
    plan = partition(tensors, world_size, strategy=SMALL_PARTS[name])
    count = Counter(
        owner for spec, tensor in zip(tensors, owners(plan), strict=True) if spec.trainable for owner in tensor
    )
    assert plan.loads == pytest.approx(tuple(count[rank] for rank in range(world_size)))


@names
@given(tensors=specs(), world_size=WORLD_SIZES)
def test_loads_follow_the_cost(name, tensors, world_size):
    plan = partition(tensors, world_size, strategy=SMALL_PARTS[name], cost=nbytes)
    counted = [0.0] * world_size
    for shard in plan.shards:
        if tensors[shard.tensor].trainable:
            counted[shard.rank] += shard.numel * tensors[shard.tensor].dtype.itemsize
    assert plan.loads == pytest.approx(counted)
    assert sum(plan.loads) == pytest.approx(sum(spec.nbytes for spec in tensors if spec.trainable))


@given(tensors=specs(trainable=st.just(True)), world_size=WORLD_SIZES)
def test_whole_chooses_the_owners_that_torch_chooses(tensors, world_size):
    plan = partition(tensors, world_size)
    assert [shard.rank for shard in plan.shards] == torch_owners(tensors, world_size)


@given(tensors=specs(), world_size=WORLD_SIZES)
def test_whole_cuts_nothing(tensors, world_size):
    plan = partition(tensors, world_size)
    assert not any(plan.is_cut(index) for index in range(len(tensors)))


@given(tensors=specs(), world_size=WORLD_SIZES)
def test_whole_stays_within_graham_s_bound(tensors, world_size):
    one_group = [replace(spec, group=0) for spec in tensors]
    plan = partition(one_group, world_size)
    assert max(plan.loads) <= (2 - 1 / world_size) * max(sum(plan.loads) / world_size, plan.heaviest) * (1 + 1e-9)


@names
@given(tensors=specs(), world_size=WORLD_SIZES)
def test_a_part_is_a_box_of_whole_rows_and_one_range_of_memory(name, tensors, world_size):
    for shard in partition(tensors, world_size, strategy=SMALL_PARTS[name]).shards:
        spec = tensors[shard.tensor]
        storage = torch.arange(spec.numel)
        tensor = storage.view(spec.shape) if spec.stride is None else storage.as_strided(spec.shape, spec.stride)
        assert sorted(shard.narrow(tensor).reshape(-1).tolist()) == storage[shard.flat].tolist()


PART_SIZES = st.sampled_from([1, 100, 16_384])


@given(rows=st.integers(2, 3_000), row=st.sampled_from([64, 128]), world_size=WORLD_SIZES, smallest=PART_SIZES)
def test_split_makes_as_many_parts_as_ranks_and_the_smallest_part_allow(rows, row, world_size, smallest):
    tensor = TensorSpec("w", (rows, row), torch.float32)
    plan = partition([tensor], world_size, strategy=partial(split, smallest_part=smallest))
    shares = [shard.stop - shard.start for shard in plan.shards]
    assert len(shares) == max(1, min(world_size, rows // math.ceil(smallest / row)))
    assert len({shard.rank for shard in plan.shards}) == len(shares)
    assert max(shares) - min(shares) <= 1


@given(rows=st.integers(1, 3_000), row=st.integers(1, 100), world_size=WORLD_SIZES, smallest=PART_SIZES)
def test_cuts_lie_where_vectorised_kernels_see_whole_vectors(rows, row, world_size, smallest):
    tensor = TensorSpec("w", (rows, row), torch.float32)
    plan = partition([tensor], world_size, strategy=partial(split, smallest_part=smallest))
    assert all(shard.flat.start % ALIGNMENT == 0 for shard in plan.shards)
    assert len(plan.shards) == 1 or min(shard.numel for shard in plan.shards) >= smallest
    shares = [shard.stop - shard.start for shard in plan.shards]
    assert max(shares) - min(shares) <= tensor.cut_step or len(shares) == 1


@pytest.mark.parametrize(
    ("shape", "stride", "dim"),
    [
        ((4, 8), None, 0),
        ((4, 8), (1, 4), 1),
        ((1, 8, 4), None, 1),
        ((1, 1), None, 0),
        ((), None, 0),
        ((4, 16, 3, 3), (144, 1, 48, 16), 0),
        ((1, 16, 3, 3), (144, 1, 48, 16), 2),
    ],
)
def test_cuts_lie_along_the_dimension_with_the_largest_stride(shape, stride, dim):
    assert TensorSpec("w", shape, torch.float32, stride=stride).cut_dim == dim


def test_parts_have_an_element():
    with pytest.raises(ValueError, match="at least 1 element, but is 0"):
        partition(vectors(100), 2, strategy=partial(split, smallest_part=0))


def test_split_leaves_whole_what_would_make_small_parts():
    sizes = [2 * SMALLEST_PART - 1, 2 * SMALLEST_PART, 5 * SMALLEST_PART]
    plan = partition(vectors(*sizes), 4, strategy="split")
    assert [len(ranks) for ranks in plan.owners] == [1, 2, 4]


@given(sizes=st.lists(st.integers(0, 5_000), min_size=1, max_size=20), world_size=WORLD_SIZES)
def test_split_keeps_any_number_of_tensors_in_balance(sizes, world_size):
    plan = partition(vectors(*sizes), world_size, strategy=SMALL_PARTS["split"])
    elements = [sum(shard.numel for shard in plan.of_rank(rank)) for rank in range(world_size)]
    # Fewer than twice 64 elements are dealt whole.
    assert max(elements) - min(elements) < 2 * ALIGNMENT


def test_split_places_tensors_in_their_order_on_the_ranks_with_the_least_load():
    specs_of_rows = [TensorSpec(f"t{i}", (rows, 64), torch.float32) for i, rows in enumerate([2, 3, 1, 4])]
    plan = partition(specs_of_rows, 3, strategy=SMALL_PARTS["split"])
    assert plan.owners == ((0, 1), (2, 0, 1), (2,), (0, 1, 2))
    assert plan.loads == (64 * 4.0, 64 * 3.0, 64 * 3.0)


GPT2 = [
    ("wte", (50257, 768)),
    ("wpe", (1024, 768)),
    *[
        (f"h.{layer}.{name}", shape)
        for layer in range(12)
        for name, shape in [
            ("ln_1.weight", (768,)),
            ("ln_1.bias", (768,)),
            ("attn.c_attn.weight", (768, 2304)),
            ("attn.c_attn.bias", (2304,)),
            ("attn.c_proj.weight", (768, 768)),
            ("attn.c_proj.bias", (768,)),
            ("ln_2.weight", (768,)),
            ("ln_2.bias", (768,)),
            ("mlp.c_fc.weight", (768, 3072)),
            ("mlp.c_fc.bias", (3072,)),
            ("mlp.c_proj.weight", (3072, 768)),
            ("mlp.c_proj.bias", (768,)),
        ]
    ],
    ("ln_f.weight", (768,)),
    ("ln_f.bias", (768,)),
]


@pytest.mark.parametrize(("world_size", "bound"), [(8, 1.02), (256, 1.05)])
def test_split_balances_a_language_model(world_size, bound):
    specs_of_gpt2 = [TensorSpec(name, shape, torch.float32) for name, shape in GPT2]
    assert sum(spec.numel for spec in specs_of_gpt2) == 124_439_808
    assert partition(specs_of_gpt2, world_size, strategy="split").imbalance <= bound


@names
def test_one_rank_owns_everything_whole(name):
    plan = partition(vectors(1_000, 3), 1, strategy=SMALL_PARTS[name])
    assert plan.shards == (Shard(0, 0, 0, 0, 1_000, 1), Shard(1, 0, 0, 0, 3, 1))


@names
def test_frozen_tensors_weigh_nothing_but_have_an_owner(name):
    plan = partition(
        [*vectors(640, trainable=False), TensorSpec("w", (640,), torch.float32)], 2, strategy=SMALL_PARTS[name]
    )
    assert sum(plan.loads) == 640
    assert plan.of_tensor(0)


def test_an_unknown_strategy_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="unknown strategy 'best'; choose one of 'whole', 'split', 'level', or a f"):
        partition([], 1, strategy="best")


def test_the_strategy_hybrid_is_withdrawn():
    with pytest.raises(ValueError, match='the strategy "hybrid" was removed: use "level"'):
        partition(vectors(3), 2, strategy="hybrid")


@pytest.mark.parametrize("strategy", [3, None, ["whole"]])
def test_a_strategy_that_is_neither_a_name_nor_a_function_is_refused_with_the_choices(strategy):
    with pytest.raises(TypeError, match="must be one of 'whole', 'split', 'level', or a function, but is"):
        partition(vectors(3), 2, strategy=strategy)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "should return the owners of each of 1 tensors, but returned None"),
        (3, r"but returned 3 \(int\)"),
        ([(0,), (1,)], r"but returned \[\(0,\), \(1,\)\] \(list\)"),
        ([None], "a tuple of ranks for each tensor, but one of them is None"),
        ([1], r"one of them is 1 \(int\)"),
        ([(0.5,)], r"one of them is \(0.5,\) \(tuple\)"),
    ],
)
def test_a_function_that_returns_no_owners_is_refused_by_its_name(returned, words):
    def mine(*_):
        return returned

    with pytest.raises(TypeError, match=f"the strategy 'mine' .*{words}"):
        partition(vectors(3), 2, strategy=mine)
    with pytest.raises(TypeError, match=f"the strategy 'mine' .*{words}"):
        repartition(partition(vectors(3), 2), vectors(3, 3), strategy=mine)


def test_no_ranks_are_refused():
    with pytest.raises(ValueError, match="world_size is 0"):
        partition([], 0)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_a_cost_that_is_no_weight_is_refused_by_the_tensor_s_name(weight):
    with pytest.raises(ValueError, match="cost of tensor 't0'"):
        partition(vectors(3), 2, cost=lambda _: weight)


@pytest.mark.parametrize("weight", ["heavy", None, 1j])
def test_a_cost_that_is_no_number_is_refused_by_the_tensor_s_name(weight):
    with pytest.raises(TypeError, match="cost of tensor 't0' should be a number, but is "):
        partition(vectors(3), 2, cost=lambda _: weight)


def test_a_cost_that_is_neither_a_function_nor_a_dict_is_refused():
    with pytest.raises(TypeError, match=r"the cost must be a function .* or a dict by name, but is 3 \(int\)"):
        partition(vectors(3), 2, cost=3)


def test_a_strategy_may_be_a_function():
    plan = partition(vectors(3, 128), 2, strategy=lambda tensors, loads, cost: [[1], [1, 0]])
    assert plan.loads == (64.0, 67.0)


@pytest.mark.parametrize("owners", [(), (7,), (-1,), (0, 0), (0, 1, 0, 1)])
def test_a_function_that_gives_a_tensor_no_owners_that_can_be_is_refused(owners):
    with pytest.raises(ValueError, match="tensor 0 't0'"):
        partition(vectors(3), 2, strategy=lambda *_: [owners])
    with pytest.raises(ValueError, match="tensor 1 't1'"):
        repartition(partition(vectors(3), 2), vectors(3, 3), strategy=lambda *_: [owners])


@names
@given(old=specs(), new=specs(), frozen=st.lists(st.booleans(), min_size=12, max_size=12), world_size=WORLD_SIZES)
def test_repartition_moves_nothing_whatever_was_frozen_or_unfrozen(name, old, new, frozen, world_size):
    before = partition(old, world_size, strategy=SMALL_PARTS[name])
    changed = [replace(spec, trainable=flag) for spec, flag in zip(old, frozen, strict=False)]
    after = repartition(before, [*changed, *new], strategy=SMALL_PARTS[name])
    assert len(after.tensors) == len(old) + len(new)
    for index in range(len(old)):
        assert after.of_tensor(index) == before.of_tensor(index)
    assert sum(after.loads) == sum(spec.numel for spec in [*changed, *new] if spec.trainable)


def test_repartition_places_on_top_of_the_loads_of_the_rest():
    before = partition(vectors(10, 4), 2)
    after = repartition(before, [*vectors(10, 4), TensorSpec("new", (5,), torch.float32)])
    assert after.of_tensor(2)[0].rank == 1
    assert after.loads == (10.0, 9.0)


@names
@given(tensors=specs(), world_size=WORLD_SIZES)
def test_frozen_tensors_are_placed_after_the_others(name, tensors, world_size):
    alone = [spec for spec in tensors if spec.trainable]
    plan, expected = (partition(each, world_size, strategy=SMALL_PARTS[name]) for each in (tensors, alone))
    assert tuple(o for o, spec in zip(plan.owners, tensors, strict=True) if spec.trainable) == expected.owners
    # As a group of frozen tensors that is added later.
    frozen = [spec for spec in tensors if not spec.trainable]
    late = repartition(expected, [*alone, *frozen], strategy=SMALL_PARTS[name])
    assert (
        tuple(o for o, spec in zip(plan.owners, tensors, strict=True) if not spec.trainable)
        == (late.owners[len(alone) :])
    )


def test_frozen_tensors_fill_up_the_ranks_that_have_less():
    frozen = [spec for size in (3, 9, 6) for spec in vectors(size, trainable=False)]
    plan = partition([*vectors(10, 4), *frozen], 2)
    assert plan.owners == ((0,), (1,), (1,), (1,), (0,))
    assert plan.loads == (10.0, 4.0)
    unfrozen = repartition(plan, [replace(spec, trainable=True) for spec in plan.tensors])
    assert unfrozen.owners == plan.owners
    assert unfrozen.loads == (16.0, 16.0)


def test_a_cost_is_not_asked_for_integers_which_are_never_trained():
    table = TensorSpec("table", (640,), torch.int64, trainable=False)
    plan = partition([table, *vectors(3)], 2, cost=state_bytes(torch.optim.Adam))
    assert plan.weights[0] == 0


def test_repartition_refuses_a_kept_tensor_of_another_size():
    with pytest.raises(ValueError, match="'t0' keeps its owners, but has 3 elements instead of 4"):
        repartition(partition(vectors(4), 2), vectors(3))


def test_repartition_refuses_to_lose_tensors():
    with pytest.raises(ValueError, match="cannot be removed"):
        repartition(partition(vectors(4, 4), 2), vectors(4))


def test_costs_count_elements_and_bytes():
    spec = TensorSpec("w", (3, 2), torch.bfloat16)
    assert (numel(spec), nbytes(spec)) == (6, 12)
