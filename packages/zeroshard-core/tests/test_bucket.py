"""Buckets have a place for every tensor, and runs that say who owns it."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plan_strategies import plans
from zeroshard_core import Run, Slot, TensorSpec, bucket_layouts, owned_runs, partition


def vectors(*sizes, **fields):
    return [TensorSpec(f"t{i}", (size,), torch.float32, **fields) for i, size in enumerate(sizes)]


@given(plan=plans(), alignment=st.integers(1, 70))
def test_every_tensor_has_one_aligned_place_of_its_own(plan, alignment):
    layouts = bucket_layouts(plan, alignment=alignment)
    placed = [slot.tensor for layout in layouts for slot in layout.slots]
    assert sorted(placed) == list(range(len(plan.tensors)))
    for layout in layouts:
        end = 0
        for slot in layout.slots:
            assert slot.offset % alignment == 0
            assert slot.offset >= end
            assert slot.numel == plan.tensors[slot.tensor].numel
            end = slot.offset + slot.numel
        assert layout.numel == end


@given(plan=plans())
def test_there_is_one_bucket_per_device_and_dtype_by_first_appearance(plan):
    kinds = list(dict.fromkeys((spec.device, spec.dtype) for spec in plan.tensors))
    assert [(layout.device, layout.dtype) for layout in bucket_layouts(plan)] == kinds


@given(plan=plans())
def test_runs_name_the_owner_of_every_element(plan):
    for layout in bucket_layouts(plan):
        owner = {e: run.rank for run in owned_runs(layout, plan) for e in range(run.start, run.stop)}
        for slot in layout.slots:
            for shard in plan.of_tensor(slot.tensor):
                assert all(owner[slot.offset + e] == shard.rank for e in range(shard.flat.start, shard.flat.stop))


@given(plan=plans())
def test_runs_are_as_long_as_they_can_be_and_do_not_overlap(plan):
    for layout in bucket_layouts(plan):
        runs = owned_runs(layout, plan)
        for before, after in pairwise(runs):
            assert before.stop <= after.start
            assert before.rank != after.rank


@given(plan=plans())
def test_whole_tensors_of_one_owner_lie_in_one_run(plan):
    whole = partition(plan.tensors, plan.world_size)
    for layout in bucket_layouts(whole):
        ranks = [run.rank for run in owned_runs(layout, whole)]
        assert len(ranks) == len(set(ranks))


def test_padding_lies_in_a_run_only_between_tensors_of_one_owner():
    plan = partition(vectors(10, 6, 5), 2)
    (layout,) = bucket_layouts(plan)
    assert layout.slots == (Slot(0, 0, 10), Slot(1, 64, 6), Slot(2, 128, 5))
    assert owned_runs(layout, plan) == (Run(0, 0, 10), Run(1, 64, 133))


def test_a_subset_of_tensors_can_be_laid_out():
    plan = partition(vectors(10, 6, 5), 2)
    (layout,) = bucket_layouts(plan, tensors=[2, 0])
    assert [slot.tensor for slot in layout.slots] == [0, 2]
    assert bucket_layouts(plan, tensors=[]) == ()


def test_a_tensor_that_is_not_there_is_refused():
    with pytest.raises(IndexError, match="no tensor 3"):
        bucket_layouts(partition(vectors(1), 1), tensors=[3])


def test_an_alignment_below_one_is_refused():
    with pytest.raises(ValueError, match="alignment"):
        bucket_layouts(partition(vectors(1), 1), alignment=0)
