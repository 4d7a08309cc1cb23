"""Predictions for a model: what is probed, what is refused, and which device they are for."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim
from zeroshard import Planner, predict

MODEL = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Linear(256, 4))
MATRICES = [MODEL[0].weight, MODEL[2].weight]
REST = [MODEL[0].bias, *MODEL[1].parameters(), MODEL[2].bias]


def test_nothing_is_allocated_for_a_large_model() -> None:
    with torch.device("meta"):
        large = nn.Linear(1 << 20, 1 << 20, bias=False)
    found = predict(large, optim.AdamW, ranks=8, partition="split")
    assert found.largest.state == (2 << 42) // 8 + 4
    assert found.largest.parameters == 1 << 42


def test_a_model_has_buffers_and_groups_have_those_that_are_told() -> None:
    assert predict(MODEL, optim.SGD, ranks=2).largest.buffers == 2 * 4 * 256 + 8
    assert predict(MODEL.parameters(), optim.SGD, ranks=2, buffers=9).largest.buffers == 9


def test_each_class_is_probed_for_its_own_group() -> None:
    groups = [{"params": MATRICES, "optimizer_class": optim.Muon}, {"params": REST}]
    [alone] = predict(groups, optim.AdamW, ranks=1, partition="level").ranks
    elements, others = 256 * 256 + 4 * 256, 3 * 256 + 4
    assert alone.state == 4 * elements + 8 * others + 4 * len(REST)


@pytest.mark.parametrize(
    ("settings", "temporaries"),
    [
        ({"backend": "gloo"}, 8 * 256 * 256),
        ({"backend": "gloo", "foreach": True}, 4 * sum(p.numel() for p in MODEL.parameters())),
        ({"backend": "nccl"}, 4 * sum(p.numel() for p in MODEL.parameters())),
        ({"backend": "nccl", "foreach": False}, 8 * 256 * 256),
        ({"backend": "nccl", "fused": True}, 0),
    ],
    ids=str,
)
def test_temporaries_are_those_of_torchs_implementation(settings: dict[str, object], temporaries: int) -> None:
    assert predict(MODEL, optim.AdamW, ranks=1, **settings).largest.temporaries == temporaries


def test_master_weights_are_state_and_their_gradients_copies() -> None:
    half = nn.Linear(256, 256, bias=False).bfloat16()
    plain, master = (
        predict(half, optim.AdamW, ranks=1, backend="nccl", master_weights=flag).largest for flag in (False, True)
    )
    numel = 256 * 256
    assert (plain.state, master.state) == (2 * 2 * numel + 4, 3 * 4 * numel + 4)
    # A copy of the gradient, unless it is in float32, and foreach's own temporaries.
    assert (plain.temporaries, master.temporaries) == (2 * numel, 2 * 4 * numel)
    wide = predict(half, optim.AdamW, ranks=1, backend="nccl", master_weights=True, grad_dtype=torch.float32).largest
    assert (wide.temporaries, wide.gradients) == (4 * numel, 4 * numel)


def test_collectives_need_staging_and_messages_do_not() -> None:
    def staging(**settings: object) -> int:
        return predict(MODEL, optim.SGD, ranks=2, **settings).largest.staging

    nbytes = 4 * sum(p.numel() for p in MODEL.parameters())
    assert staging(backend="gloo", partition="split") == staging(backend="nccl", partition="whole") == 0
    with_hook = staging(backend="nccl", partition="split")
    # Two buffers for all, and a row for half of it; rows may be a little uneven.
    assert 2.5 * nbytes <= with_hook <= 2.6 * nbytes
    assert staging(backend="nccl", partition="split", reduces_to_owner=False) == pytest.approx(with_hook / 2.5)


def test_staging_does_not_grow_with_the_model_but_for_the_row_that_a_rank_owns() -> None:
    with torch.device("meta"):
        large = nn.Linear(1 << 14, 1 << 14, bias=False)
    found = predict(large, optim.SGD, ranks=4, partition="split").largest
    assert found.staging == 2 * 64 * 1024**2 + found.parameters // 4


def test_staging_buffers_are_taken_in_turn_and_both_by_a_hook_that_interleaves() -> None:
    # Given a whole tensor that travels with the parts of its bucket, but does not fit in with those of all buckets,
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(1152, 128, bias=False) for _ in range(3)], nn.Linear(2048, 128, bias=False))
    *cut, whole = model.parameters()
    groups = [{"params": [whole], "optimizer_class": optim.Muon}, {"params": cut}]
    planner = Planner(groups, optim.AdamW, backend="nccl", order=model.parameters())
    in_turn, interleaved = (planner.predict(3, "level", interleaves=flag).largest.staging for flag in (False, True))
    # then one of the two buffers is as large as that bucket needs, or both.
    assert in_turn < interleaved
    without = planner.predict(3, "level", reduces_to_owner=False).largest.staging
    assert 2 * without < in_turn


@pytest.mark.parametrize(
    ("bucket_mb", "peak"),
    [
        # Two gradients on their way and the last one, each where backward has made it, and half of the first five;
        (1, 3 + 2.5),
        # two buckets of two on their way, the last two gradients, and half of the first four;
        (2.5, 6 + 2),
        # all gradients, and the bucket of all.
        (25, 12),
    ],
)
def test_sharded_gradients_are_the_parts_that_a_rank_owns_and_buckets_in_flight(bucket_mb: float, peak: float) -> None:
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(6)])
    settings = {"ranks": 2, "partition": "split", "shards_gradients": True, "bucket_mb": bucket_mb}
    sharded = predict(model, optim.SGD, **settings)
    hooked = predict(model, optim.SGD, ranks=2, partition="split")
    assert (sharded.sent, sharded.plan) == (hooked.sent, hooked.plan)
    here = sharded.largest
    assert here.gradients == hooked.largest.gradients // 2 == 3 * 2**20
    assert here.gradients + here.transient == peak * 2**20
    assert here.total == here.parameters + peak * 2**20


def test_a_planner_probes_once_for_all_numbers_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    class Counted(optim.AdamW):
        def __init__(self, params: object, **settings: object) -> None:
            built.append(1)
            super().__init__(params, **settings)

    planner = Planner(MODEL, Counted, elementwise=True)
    planner.predict(1)
    once = len(built)
    for partition in ("whole", "level"):
        planner.predict(1, partition)
    assert len(built) == once


@pytest.mark.parametrize(
    ("params", "cls", "partition", "told"),
    [
        (MODEL, optim.Muon, "whole", "Muon only supports 2D parameters"),
        (MATRICES, optim.Muon, "split", "Muon is not known to be elementwise"),
        (MODEL, optim.LBFGS, "whole", "LBFGS cannot be sharded"),
        (MODEL, optim.AdamW, "even", "unknown strategy 'even'"),
        ([], optim.AdamW, "whole", "empty parameter list"),
    ],
)
def test_what_the_optimizer_would_refuse_is_refused(params: object, cls: object, partition: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        predict(params, cls, ranks=2, partition=partition)  # type: ignore[arg-type]


def test_a_class_that_cannot_be_built_on_the_meta_device_is_stepped_on_the_cpu() -> None:
    class Real(optim.SGD):
        def __init__(self, params: object, **settings: object) -> None:
            super().__init__(params, **settings)
            if any(param.is_meta for group in self.param_groups for param in group["params"]):
                raise RuntimeError("values are needed")

    found = predict(MODEL, Real, ranks=1, lr=0.1, momentum=0.9)
    assert found.largest.state == found.largest.parameters


def test_at_least_one_rank_is_needed() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        predict(MODEL, optim.AdamW, ranks=0)
