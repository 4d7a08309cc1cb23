"""What is compared with torch's optimizer, and how ratios follow from what launches measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from against_torch import CASES, Case, Figure
from contenders import CONTENDERS
from workloads import MODELS

BENCH = Path(__file__).parents[1] / "bench"


def figure(measure, ours, torchs, most=1.0):
    return Figure(Case(measure, "tensors", 2, "memory", {"owner-whole": most}), "owner-whole", ours, torchs)


def test_times_are_the_median_of_the_launches_ratios():
    assert figure("iteration", [1.0, 6.0, 20.0], [2.0, 4.0, 5.0]).ratio == 1.5


def test_memory_is_the_least_to_the_least():
    assert figure("memory", [30.0, 20.0, 40.0], [10.0, 40.0, 16.0]).ratio == 2.0


@pytest.mark.parametrize(("most", "met"), [(2.0, True), (1.9, False), (None, True)])
def test_a_bound_is_met_or_missed(most, met):
    assert figure("start", [2.0], [1.0], most).met is met


def test_every_case_can_be_measured():
    assert {case.model for case in CASES} <= set(MODELS)
    assert {name for case in CASES for name in case.most} <= set(CONTENDERS)


def test_cases_of_memory_are_the_last_ones():
    measures = [case.measure for case in CASES]

    assert measures == sorted(measures, key=lambda measure: measure == "memory")


def test_what_is_not_measured_is_refused():
    done = subprocess.run(
        [sys.executable, str(BENCH / "against_torch.py"), "speed"], capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert "iteration, start, memory" in done.stderr
