"""A partition gives every element one owner, and balances what the owners bear."""

import gc
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plan_strategies import WORLD_SIZES, specs
from torch.distributed.optim import ZeroRedundancyOptimizer
from zeroshard_core import ALIGNMENT, STRATEGIES, Shard, TensorSpec, nbytes, numel, partition, repartition, shard_loads

NAMES = sorted(STRATEGIES)
names = pytest.mark.parametrize("name", NAMES)


def vectors(*sizes, **fields):
    return [TensorSpec(f"t{i}", (size,), torch.float32, **fields) for i, size in enumerate(sizes)]


def owners(plan):
    """The owner of every element of every tensor, counted anew."""
    found = [[None] * spec.numel for spec in plan.tensors]
    for shard in plan.shards:
        for element in range(shard.start, shard.stop):
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
    plan = partition(tensors, world_size, strategy=name)
    assert all(0 <= owner < world_size for tensor in owners(plan) for owner in tensor)
    assert all(plan.of_tensor(index) for index in range(len(tensors)))


@names
@given(tensors=specs(), world_size=WORLD_SIZES)
def test_loads_are_what_a_recount_of_elements_gives(name, tensors, world_size):
    plan = partition(tensors, world_size, strategy=name)
    count = Counter(
        owner for spec, tensor in zip(tensors, owners(plan), strict=True) if spec.trainable for owner in tensor
    )
    assert plan.loads == tuple(count[rank] for rank in range(world_size))


@names
@given(tensors=specs(), world_size=WORLD_SIZES)
def test_loads_follow_the_cost(name, tensors, world_size):
    plan = partition(tensors, world_size, strategy=name, cost=nbytes)
    assert plan.loads == shard_loads(tensors, plan.shards, world_size, nbytes)
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
    assert partition(one_group, world_size).optimality_gap <= 1 - 1 / world_size + 1e-9


@names
@given(tensors=specs(), world_size=WORLD_SIZES)
def test_cuts_lie_at_multiples_of_the_alignment(name, tensors, world_size):
    plan = partition(tensors, world_size, strategy=name)
    assert all(shard.start % ALIGNMENT == 0 for shard in plan.shards)


@given(size=st.integers(0, 5_000), world_size=WORLD_SIZES)
def test_split_gives_all_ranks_their_share_of_a_tensor_in_rank_order(size, world_size):
    plan = partition(vectors(size), world_size, strategy="split")
    shares = [shard.numel for shard in plan.shards]
    if size < ALIGNMENT * world_size:
        assert shares == [size]
    else:
        assert [shard.rank for shard in plan.shards] == list(range(world_size))
        assert max(shares) - min(shares) <= ALIGNMENT


@given(sizes=st.lists(st.integers(0, 5_000), min_size=1, max_size=20), world_size=WORLD_SIZES, trainable=st.booleans())
def test_split_keeps_any_number_of_tensors_in_balance(sizes, world_size, trainable):
    whole_multiples = [size // ALIGNMENT * ALIGNMENT for size in sizes if size >= ALIGNMENT * world_size]
    plan = partition(vectors(*whole_multiples, trainable=trainable), world_size, strategy="split")
    elements = [sum(shard.numel for shard in plan.of_rank(rank)) for rank in range(world_size)]
    assert max(elements) - min(elements) <= ALIGNMENT


def test_split_deals_equal_small_tensors_in_rotation():
    plan = partition(vectors(*[10] * 7), 3, strategy="split")
    assert [shard.rank for shard in plan.shards] == [0, 1, 2, 0, 1, 2, 0]


def test_split_deals_frozen_small_tensors_in_rotation_too():
    plan = partition(vectors(*[10] * 7, trainable=False), 3, strategy="split")
    assert [shard.rank for shard in plan.shards] == [0, 1, 2, 0, 1, 2, 0]


def test_split_evens_out_with_small_tensors_what_large_ones_left():
    plan = partition(vectors(64 * 3, 64), 2, strategy="split")
    assert plan.loads == (128.0, 128.0)


def test_hybrid_cuts_what_is_larger_than_a_fair_share():
    plan = partition(vectors(10_000, 100, 100, 100, 100), 4, strategy="hybrid")
    assert [plan.is_cut(index) for index in range(5)] == [True, False, False, False, False]
    assert plan.imbalance < 1.01


@given(tensors=specs(), world_size=WORLD_SIZES)
def test_hybrid_is_whole_where_everything_fits(tensors, world_size):
    plan = partition(tensors, world_size, strategy="hybrid")
    if not any(plan.is_cut(index) for index in range(len(tensors))):
        assert plan == partition(tensors, world_size)


def test_hybrid_looks_again_at_what_remains_after_a_cut():
    # 4,000 of 20,000 elements are less than a rank's 5,000, but a rank has 1,000 left beside its part of the first.
    plan = partition(vectors(16_000, 4_000), 4, strategy="hybrid")
    assert plan.is_cut(0)
    assert plan.is_cut(1)


def test_hybrid_cuts_nothing_too_small_to_be_cut_evenly():
    plan = partition(vectors(255), 4, strategy="hybrid")
    assert not plan.is_cut(0)


@names
def test_one_rank_owns_everything_whole(name):
    plan = partition(vectors(1_000, 3), 1, strategy=name)
    assert plan.shards == (Shard(0, 0, 1_000, 0), Shard(1, 0, 3, 0))


@names
def test_frozen_tensors_weigh_nothing_but_have_an_owner(name):
    plan = partition([*vectors(640, trainable=False), TensorSpec("w", (640,), torch.float32)], 2, strategy=name)
    assert sum(plan.loads) == 640
    assert plan.of_tensor(0)


def test_an_unknown_strategy_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="unknown strategy 'best'; choose one of 'whole', 'split', 'hybrid'"):
        partition([], 1, strategy="best")


@pytest.mark.parametrize("strategy", [3, None, ["whole"]])
def test_a_strategy_that_is_neither_a_name_nor_a_function_is_refused_with_the_choices(strategy):
    with pytest.raises(TypeError, match="must be one of 'whole', 'split', 'hybrid', or a function, but is"):
        partition(vectors(3), 2, strategy=strategy)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "should return Shards, but returned None"),
        (3, r"should return Shards, but returned 3 \(int\)"),
        ([None], "one of them is None"),
        ([(0, 0, 3, 1)], r"one of them is \(0, 0, 3, 1\) \(tuple\)"),
    ],
)
def test_a_function_that_returns_no_shards_is_refused_by_its_name(returned, words):
    def mine(*_):
        return returned

    with pytest.raises(TypeError, match=f"the strategy 'mine' .*{words}"):
        partition(vectors(3), 2, strategy=mine)
    with pytest.raises(TypeError, match=f"the strategy 'mine' .*{words}"):
        repartition(partition(vectors(3), 2), vectors(3), place=[0], strategy=mine)


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


def test_a_cost_that_is_no_function_is_refused():
    with pytest.raises(TypeError, match=r"the cost must be a function .* but is 3 \(int\)"):
        partition(vectors(3), 2, cost=3)


def test_a_strategy_may_be_a_function():
    plan = partition(
        vectors(3, 4), 2, strategy=lambda tensors, loads, cost: reversed([Shard(0, 0, 3, 1), Shard(1, 0, 4, 1)])
    )
    assert plan.loads == (0.0, 7.0)


@pytest.mark.parametrize(
    "shards", [[], [Shard(0, 0, 2, 0)], [Shard(0, 0, 3, 7)], [Shard(5, 0, 3, 0)], [Shard(-1, 0, 3, 0)]]
)
def test_a_function_that_leaves_elements_without_an_owner_is_refused(shards):
    with pytest.raises(ValueError, match="tensor"):
        partition(vectors(3), 2, strategy=lambda *_: shards)
    with pytest.raises(ValueError, match="tensor"):
        repartition(partition(vectors(3), 2), vectors(3), place=[0], strategy=lambda *_: shards)


@names
@given(old=specs(), new=specs(), world_size=WORLD_SIZES, data=st.data())
def test_repartition_moves_only_what_is_to_be_placed(name, old, new, world_size, data):
    before = partition(old, world_size, strategy=name)
    place = data.draw(st.sets(st.integers(0, len(old) - 1))) if old else set()
    after = repartition(before, [*old, *new], place=place, strategy=name)
    assert len(after.tensors) == len(old) + len(new)
    for index in set(range(len(old))) - place:
        assert after.of_tensor(index) == before.of_tensor(index)


def test_repartition_places_on_top_of_the_loads_of_the_rest():
    before = partition(vectors(10, 4), 2)
    after = repartition(before, [*vectors(10, 4), TensorSpec("new", (5,), torch.float32)], place=[])
    assert after.of_tensor(2)[0].rank == 1
    assert after.loads == (10.0, 9.0)


def test_repartition_places_an_unfrozen_tensor_where_there_is_room():
    frozen = [*vectors(10, 4), TensorSpec("late", (6,), torch.float32, trainable=False)]
    thawed = [*frozen[:2], replace(frozen[2], trainable=True)]
    after = repartition(partition(frozen, 2), thawed, place=[2])
    assert after.loads == (10.0, 10.0)


def test_repartition_refuses_a_kept_tensor_of_another_size():
    with pytest.raises(ValueError, match="'t0' keeps its owners, but has 3 elements instead of 4"):
        repartition(partition(vectors(4), 2), vectors(3), place=[])


def test_repartition_refuses_to_lose_tensors():
    with pytest.raises(ValueError, match="cannot be taken away"):
        repartition(partition(vectors(4, 4), 2), vectors(4), place=[])


def test_repartition_refuses_an_index_that_is_not_there():
    with pytest.raises(IndexError, match="tensor 1 is to be placed"):
        repartition(partition(vectors(4), 2), vectors(4), place=[1])


def test_costs_count_elements_and_bytes():
    spec = TensorSpec("w", (3, 2), torch.bfloat16)
    assert (numel(spec), nbytes(spec)) == (6, 12)


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_afterwards_as_it_was(enabled):
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        partition(vectors(3), 2)
        with pytest.raises(ValueError, match="cost"):
            partition(vectors(3), 2, cost=lambda _: -1)
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
