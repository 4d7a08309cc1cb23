"""Bounds of sharded gradients: the peak of a rank to FSDP2's, and processor time to that of DDP's hook."""

from __future__ import annotations

import peaks
import pytest
import sharded_time
from contenders import CONTENDERS
from workloads import MODELS, workload


def row(contender, to_parameters=None, by="messages", model="mlp", ranks=2):
    found = {"contender": contender, "by": by, "model": model, "ranks": ranks}
    return found | ({"error": "no"} if to_parameters is None else {"peaks": [1], "to_parameters": to_parameters})


def test_every_contender_and_model_exists():
    assert {peaks.DDP, *peaks.OTHERS, *peaks.SHARDED} <= {*CONTENDERS}
    assert {*peaks.MODELS, *sharded_time.MOST} <= {*MODELS}


def test_bounds_are_to_fsdp2_and_by_reads_a_bucket_more():
    rows = [row("fsdp2", 2.0), row("fsdp2", 1.0, ranks=4)]
    sizes = workload("mlp", peaks.LAYERS).sizes()

    assert peaks.most_of(row("sharded-split", 3.0), rows) == pytest.approx(2.1)
    assert peaks.most_of(row("sharded-whole", 3.0, ranks=4), rows) == pytest.approx(1.2)
    # A large tensor is a bucket of its own.
    assert peaks.most_of(row("sharded-split", 3.0, by="reads"), rows) == pytest.approx(2.1 + max(sizes) / sum(sizes))


@pytest.mark.parametrize("contender", ["ddp", "owner-split", "fsdp2"])
def test_what_shards_no_gradients_has_no_bound(contender):
    assert peaks.most_of(row(contender, 3.0), [row("fsdp2", 2.0)]) is None


def test_without_fsdp2_there_is_no_bound():
    assert peaks.most_of(row("sharded-split", 3.0), [row("fsdp2")]) is None


def test_the_table_of_peaks_has_a_column_for_each_number_of_ranks():
    rows = [row("ddp", 4.1), row("ddp", 4.2, ranks=4), row("sharded-split", 2.7), row("deepspeed-2")]
    shown = peaks.table([{**each, "most": 2.8 if each["contender"] == "sharded-split" else None} for each in rows])

    assert shown.splitlines()[0] == "| contender | by | mlp N=2 | mlp N=4 |"
    assert "| ddp | messages | 4.10 | 4.20 |" in shown
    assert "| sharded-split | messages | 2.70 (at most 2.80) |  |" in shown
    assert "deepspeed-2: no" in shown


@pytest.mark.parametrize(("lows", "met"), [([1.1, 1.1, 1.3], True), ([1.1, 1.3, 1.3], False), ([1.3], False)])
def test_time_is_met_if_two_of_three_runs_meet_it(lows, met):
    case = {"model": "mlp", "by": "reads", "contender": "sharded-split", "most": 1.15}

    assert sharded_time.met([{**case, "low": low} for low in lows] + [{**case, "most": None, "low": 9.0}]) is met
