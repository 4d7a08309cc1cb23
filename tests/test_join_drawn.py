"""Loops that were drawn end as one process would, or are refused on every rank; no other way."""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from join_training import BOUND, HOOKS, PARTITIONS, Loop, Uneven

REFUSED = (
    r"whose part of them no rank knows|waits for the backward of its first forward|in a window of no_sync\(\)|"
    "cannot repeat what was done to the gradient of tensor"
)
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
def trainings(draw: st.DrawFn, hook: str, world_size: int) -> Drawn:
    """Draw calls that can be made in that order."""
    iterations: list[list[Act]] = []
    early = hook in HOOKS[2:]
    local = reduced = stepped = False
    to_none = st.booleans()
    for _ in range(draw(st.integers(3, 7))):
        acts: list[Act] = []
        for _ in range(draw(st.integers(1, 3))):
            if stepped and hook != "none":
                acts.append(("zero", {"to_none": draw(to_none)}))
                local = reduced = stepped = False
            alone = draw(st.integers(0, 5)) == 0
            if alone:
                acts.append(("forward", {"with_grad": draw(st.booleans())}))
            # A forward that has no backward leaves its preparations to the next.
            reduces = alone or draw(st.integers(0, 2)) > 0
            if reduced and (not reduces or draw(st.booleans())) and draw(st.integers(0, 7)) > 0:
                # Else it is refused, mostly.
                acts.append(("zero", {"to_none": draw(to_none)}))
                local = reduced = stepped = False
            acts.append(("backward", {"reduces": reduces, "forwards": draw(st.sampled_from([1, 1, 2]))}))
            local, reduced = not reduces, reduces or reduced
            if early and reduces:
                stepped = True
                acts.append(("step", {}))
            act = draw(st.sampled_from(["step", "step", "zero", "some", "clip", "scale", "none"]))
            if act == "zero":
                acts.append(("zero", {"to_none": draw(to_none)}))
                local = reduced = stepped = False
            elif act == "some" and not (hook == "none" and local) and not early:
                acts.append(("zero", {"to_none": draw(to_none), "some": True}))
            elif act in ("step", "clip") and reduced and not local and not early and not (stepped and act == "clip"):
                acts.append((act, {}))
                stepped = stepped or act == "step"
            elif act == "scale" and hook == "none" and not local:
                acts.append(("scale", {"factor": 0.5}))
        iterations.append(acts)
    most = sum(1 + (name == "backward") for acts in iterations for name, _ in acts)
    # A rank leaves its loop after any call.
    calls = draw(st.lists(st.integers(min(4, most), most) | st.just(0), min_size=world_size, max_size=world_size))
    partition = draw(st.sampled_from(PARTITIONS))
    return Drawn(calls, partition, draw(st.booleans()), draw(st.booleans()), iterations)


def is_right(drawn: Drawn, hook: str, world_size: int) -> bool:
    """Whether a loop ends right; if not, all ranks have refused it."""
    uneven = Uneven(
        [len(drawn.iterations)] * world_size,
        hook,
        calls=drawn.calls,
        divide=drawn.divide,
        partition=drawn.partition,
        ddp={"gradient_as_bucket_view": drawn.views},
        group=dist.new_group(timeout=timedelta(seconds=10)),
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


def check(world_size: int, hook: str, examples: int) -> None:
    found: list[bool] = []

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(trainings(hook, world_size))
    def try_one(drawn: Drawn) -> None:
        found.append(is_right(drawn, hook, world_size))

    try_one()
    assert len(found) >= examples
    assert sum(found) > 0.6 * len(found), f"{sum(found)} of {len(found)} were not refused"


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize(
    "hook",
    [hook if place % 2 else pytest.param(hook, marks=pytest.mark.exhaustive) for place, hook in enumerate(HOOKS)],
)
def test_some(world_size: int, hook: str) -> None:
    check(world_size, hook, 6)


@pytest.mark.exhaustive
@pytest.mark.ranks(2, 3, backend="gloo", timeout=600)
@pytest.mark.parametrize("hook", HOOKS)
def test_more(world_size: int, hook: str) -> None:
    check(world_size, hook, 60)
