"""What ranks hold and send, by the plan alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from zeroshard_core import GroupBytes, Plan, TensorSpec, partition, predict

ADAM = GroupBytes(lambda spec: 2 * spec.nbytes + 4, gradients=lambda _: 0, update=lambda spec: spec.nbytes)
LARGE, SMALL = TensorSpec("large", (1024, 64), torch.float32), TensorSpec("small", (64,), torch.bfloat16)
FROZEN = TensorSpec("frozen", (500, 2), torch.float32, trainable=False)
TENSORS = (LARGE, SMALL, FROZEN)


def test_everything_is_held_by_each_rank_but_the_state_of_others():
    for ranks, strategy in ((1, "whole"), (3, "whole"), (4, "split")):
        plan = partition(TENSORS, ranks, strategy=strategy)
        found = predict(plan, [ADAM], buffers=7, staging=11)
        for rank, held in enumerate(found.ranks):
            owned = [shard for shard in plan.of_rank(rank) if shard.tensor != 2]
            nbytes = sum(shard.numel * TENSORS[shard.tensor].dtype.itemsize for shard in owned)
            assert (held.parameters, held.buffers, held.gradients) == (262144 + 128 + 4000, 7, 262144 + 128)
            assert held.state == 2 * nbytes + 4 * len(owned)
            assert held.staging == 11
            parts = (held.parameters, held.buffers, held.gradients, held.state, held.staging, held.temporaries)
            assert held.total == sum(parts)
        assert found.largest.total == max(rank.total for rank in found.ranks)


def test_transient_buckets_are_freed_before_an_update_and_gradients_are_those_that_a_rank_owns():
    plan = partition(TENSORS, 2, strategy="split")
    kept, sharded = predict(plan, [ADAM]), predict(plan, [ADAM], transient=[10**6, 1])
    owned = [sum(s.numel * TENSORS[s.tensor].dtype.itemsize for s in plan.of_rank(r) if s.tensor != 2) for r in (0, 1)]
    assert [rank.gradients for rank in sharded.ranks] == owned
    others = [rank.total - rank.temporaries - rank.gradients for rank in kept.ranks]
    assert sharded.ranks[0].total == others[0] + owned[0] + 10**6
    assert sharded.ranks[1].total == others[1] + owned[1] + kept.ranks[1].temporaries
    assert sharded.sent == kept.sent


def test_a_part_is_weighed_as_a_tensor_of_its_own():
    seen = []
    plan = Plan(2, (replace(LARGE, shape=(64, 1024), stride=(1, 64)),), ((1, 0),), (1.0, 1.0))
    predict(plan, [replace(ADAM, state=lambda spec: seen.append((spec.shape, spec.stride)) or 0)])
    assert seen == [((64, 512), None)] * 2


def test_temporaries_add_up_where_an_update_works_on_all_tensors_at_a_time():
    plan = partition((LARGE, replace(LARGE, group=1), replace(SMALL, group=1)), 1)
    one_by_one = predict(plan, [ADAM, ADAM]).ranks[0]
    at_a_time = predict(plan, [ADAM, replace(ADAM, is_foreach=True)]).ranks[0]
    assert (one_by_one.temporaries, at_a_time.temporaries) == (LARGE.nbytes, LARGE.nbytes + SMALL.nbytes)
    # Copies of gradients are there all the time.
    copying = replace(ADAM, gradients=lambda spec: 4 * spec.numel)
    both = predict(plan, [copying, copying]).ranks[0]
    assert both.temporaries == LARGE.nbytes + 4 * (2 * LARGE.numel + SMALL.numel)


def test_an_update_of_float32_sends_twice_the_parameters_over_all_ranks():
    plan = partition((LARGE, SMALL), 4, strategy="split")
    with_hook, without = predict(plan, [ADAM]), predict(plan, [ADAM], reduces_to_owner=False)
    nbytes = LARGE.nbytes + SMALL.nbytes
    assert sum(with_hook.sent_in_backward) == sum(with_hook.sent_in_step) == 3 * nbytes
    assert without.sent_in_backward == (2 * nbytes * 3 // 4,) * 4
    assert without.sent_in_step == with_hook.sent_in_step
    assert predict(partition((LARGE, SMALL), 1), [ADAM]).sent == (0,)


@pytest.mark.parametrize("hook", [True, False])
def test_gradients_of_another_dtype_count_by_its_size(hook):
    plan = partition((replace(LARGE, dtype=torch.bfloat16),), 2, strategy="split")
    usual = predict(plan, [ADAM], reduces_to_owner=hook)
    wide = predict(plan, [ADAM], reduces_to_owner=hook, grad_dtype=torch.float32)
    assert wide.ranks[0].gradients == 2 * usual.ranks[0].gradients
    assert wide.sent_in_backward == tuple(2 * sent for sent in usual.sent_in_backward)
    assert wide.sent_in_step == usual.sent_in_step
