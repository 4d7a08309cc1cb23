"""Loops that were drawn end as one process would, or are refused on every rank; no other way."""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.groups import group_of
from support.join_training import BOUND, PARTITIONS, Loop, Uneven

REFUSED = "waits for the backward of its first forward"
Act = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Drawn:
    """A training that was drawn; the acts of each iteration."""

    calls: list[int]
    partition: str
    divide: bool
    views: bool
    iterations: list[list[Act]]

    def script(self, loop: Loop, number: int) -> None:
        for turn, (name, how) in enumerate(self.iterations[number]):
            first = [number + 100 * turn] if name in ("backward", "forward") else []
            getattr(loop, name)(*first, **how)


@st.composite
def trainings(draw: st.DrawFn, world_size: int) -> Drawn:
    """Draw calls that can be made in that order."""
    iterations: list[list[Act]] = []
    for _ in range(draw(st.integers(3, 7))):
        acts: list[Act] = []
        for _ in range(draw(st.integers(1, 3))):
            if draw(st.integers(0, 5)) == 0:
                acts.append(("forward", {"with_grad": draw(st.booleans())}))
            acts.append(("backward", {"forwards": draw(st.sampled_from([1, 1, 2]))}))
            act = draw(st.sampled_from(["step", "step", "zero", "some", "clip", "scale", "none"]))
            if act in ("step", "clip"):
                acts.append((act, {}))
            elif act in ("zero", "some"):
                acts.append(("zero", {"to_none": draw(st.booleans()), "some": act == "some"}))
            elif act == "scale":
                acts.append(("scale", {"factor": 0.5}))
        iterations.append(acts)
    most = sum(1 + (name == "backward") for acts in iterations for name, _ in acts)
    # A rank leaves its loop after any call.
    calls = draw(st.lists(st.integers(min(4, most), most) | st.just(0), min_size=world_size, max_size=world_size))
    partition = draw(st.sampled_from(PARTITIONS))
    return Drawn(calls, partition, draw(st.booleans()), draw(st.booleans()), iterations)


def is_right(drawn: Drawn, world_size: int) -> bool:
    """Whether a loop ends right; if not, all ranks have refused it."""
    uneven = Uneven(
        [len(drawn.iterations)] * world_size,
        calls=drawn.calls,
        divide=drawn.divide,
        partition=drawn.partition,
        ddp={"gradient_as_bucket_view": drawn.views},
        group=group_of(seconds=10),
    )
    outcome = ""
    try:
        uneven.train(drawn.script)
    except Exception as error:  # noqa: BLE001 - all ranks look at it
        outcome = f"{type(error).__name__}: {error}"
    if not outcome:
        uneven.refer(drawn.script)
        outcome = "right" if uneven.distance() <= BOUND else f"parameters are {uneven.distance():.3g} off"
    # So that all ranks draw the same next.
    outcomes: list[str] = [""] * world_size
    dist.all_gather_object(outcomes, outcome)
    is_refused = all(re.search(REFUSED, each.partition(": ")[2]) for each in outcomes)
    assert is_refused or outcomes == ["right"] * world_size, (outcomes, drawn)
    return not is_refused


def check(world_size: int, examples: int) -> None:
    found: list[bool] = []

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(trainings(world_size))
    def try_one(drawn: Drawn) -> None:
        found.append(is_right(drawn, world_size))

    try_one()
    assert len(found) >= examples
    assert sum(found) > 0.6 * len(found), f"{sum(found)} of {len(found)} were not refused"


@pytest.mark.ranks(3, backend="gloo")
def test_some_loops_end_as_in_one_process(world_size: int) -> None:
    check(world_size, 12)


@pytest.mark.exhaustive
@pytest.mark.ranks(2, 3, backend="gloo", timeout=600)
def test_more_loops_end_as_in_one_process(world_size: int) -> None:
    check(world_size, 120)
