"""What the collective path issues and stages for real shapes, at numbers of ranks that no test can have."""

from __future__ import annotations

import math

import pytest
from collective_counts import MODELS, count, fake_group
from zeroshard_comm.collectives import STAGING_BYTES

GPT2 = MODELS["GPT-2 124M"]()
BYTES = 4 * sum(math.prod(shape) for shape in GPT2)
IS_FIRST = pytest.mark.parametrize("is_first", [False, True], ids=["later", "first"])


MANY = pytest.param(1024, 1.25, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(("ranks", "padding"), [(8, 1.01), (64, 1.01), (512, 1.15), MANY])
@IS_FIRST
def test_cut_tensors_take_a_collective_for_each_bucket_and_each_full_buffer(
    ranks: int, padding: float, is_first: bool
) -> None:
    with fake_group(ranks):
        found = count(GPT2, "split", is_first=is_first)
    most = found.buckets + math.ceil(BYTES / STAGING_BYTES)
    assert 0 < found.reduce_scatters <= most
    assert 0 < found.all_gathers <= most
    assert found.staging <= 2 * STAGING_BYTES
    assert found.padding <= padding


@pytest.mark.parametrize("ranks", [8, 1024])
@IS_FIRST
def test_whole_tensors_take_a_group_for_each_bucket_and_no_memory(ranks: int, is_first: bool) -> None:
    with fake_group(ranks):
        found = count(GPT2, "whole", is_first=is_first)
    assert found.reduce_groups == found.buckets
    assert found.broadcast_groups == 1
    assert found.members <= 2 * len(GPT2)
    assert (found.reduce_scatters, found.all_gathers, found.staging) == (0, 0, 0)
