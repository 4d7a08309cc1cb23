"""Buckets have a place for every tensor."""

import pytest
import torch
from hypothesis import given
from plan_strategies import plans
from zeroshard_core import ALIGNMENT, Slot, TensorSpec, bucket_layouts, partition


def vectors(*sizes, **fields):
    return [TensorSpec(f"t{i}", (size,), torch.float32, **fields) for i, size in enumerate(sizes)]


@given(plan=plans())
def test_every_tensor_has_one_aligned_place_of_its_own(plan):
    layouts = bucket_layouts(plan)
    placed = [slot.tensor for layout in layouts for slot in layout.slots]
    assert sorted(placed) == list(range(len(plan.tensors)))
    for layout in layouts:
        end = 0
        for slot in layout.slots:
            assert slot.offset % ALIGNMENT == 0
            assert slot.offset >= end
            assert slot.numel == plan.tensors[slot.tensor].numel
            end = slot.offset + slot.numel
        assert layout.numel == end


@given(plan=plans())
def test_there_is_one_bucket_per_device_and_dtype_by_first_appearance(plan):
    kinds = list(dict.fromkeys((spec.device, spec.dtype) for spec in plan.tensors))
    assert [(layout.device, layout.dtype) for layout in bucket_layouts(plan)] == kinds


def test_tensors_of_one_owner_lie_side_by_side_at_aligned_places():
    plan = partition(vectors(10, 6, 5), 2)
    (layout,) = bucket_layouts(plan)
    assert layout.slots == (Slot(0, 0, 10), Slot(1, 64, 6), Slot(2, 128, 5))


def test_a_subset_of_tensors_can_be_laid_out():
    plan = partition(vectors(10, 6, 5), 2)
    (layout,) = bucket_layouts(plan, tensors=[2, 0])
    assert [slot.tensor for slot in layout.slots] == [0, 2]
    assert bucket_layouts(plan, tensors=[]) == ()


def test_a_tensor_that_is_not_there_is_refused():
    with pytest.raises(IndexError, match="no tensor 3"):
        bucket_layouts(partition(vectors(1), 1), tensors=[3])
