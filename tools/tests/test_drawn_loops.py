"""The driver that draws loops: what it draws and finds; every loop is equal, or refused as the table says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from drawn_loops.expected import Outcome, problem
from drawn_loops.loop import FLAGS, MODES, SCHEDULERS, draw
from drawn_loops.running import run

PLAIN = replace(draw(0), mode="reduce_to_owner", heads="both", flags=(), frozen=(), scheduler="")
TWICE = replace(PLAIN, iterations=(("backward", "step"), ("backward", "step")))


def problems(count):
    outcomes = {loop: run(loop) for loop in map(draw, range(count))}
    return [
        f"{problem(loop, outcome)}: {outcome} {loop}" for loop, outcome in outcomes.items() if problem(loop, outcome)
    ]


def test_some_loops_are_equal_or_refused():
    assert problems(20) == []


@pytest.mark.exhaustive
def test_many_loops_are_equal_or_refused():
    assert problems(300) == []


def test_a_loop_is_a_function_of_its_seed_and_loops_are_of_every_kind():
    loops = [draw(seed) for seed in range(300)]
    assert loops == [draw(seed) for seed in range(300)]
    assert {loop.mode for loop in loops} == {*MODES}
    assert {loop.scheduler for loop in loops} == {*SCHEDULERS}
    assert {flag for loop in loops for flag in loop.flags} == {*FLAGS, "find_unused_parameters"}
    assert len({act.partition(" ")[0] for loop in loops for act in sum(loop.iterations, ())}) == 18


@pytest.mark.parametrize("mode", MODES[2:])
def test_a_difference_is_found(mode):
    # It is documented that a hook that steps in backward cannot see this.
    found = run(replace(PLAIN, mode=mode, iterations=(("backward", "write 0", "step"),)))
    assert (found.kind, found.text) == ("differs", "parameter 0 after 2 step")


def test_a_refusal_is_on_a_row_by_its_message_and_a_loop_that_must_be_refused_is_not_equal():
    refused = Outcome("refused", "2 backward", "tensor 0 still has the gradient of the last step: call zero_grad()")
    assert problem(TWICE, refused) == ""
    assert problem(TWICE, replace(refused, text="something else")) == "refused, and on no row"
    assert problem(TWICE, Outcome("equal")).startswith("not refused: with a hook: backward after step()")
    assert problem(replace(TWICE, mode="no hook"), Outcome("equal")) == ""
    assert problem(replace(TWICE, mode="no hook"), Outcome("differs")) == "differs"
    assert problem(replace(TWICE, mode="no hook"), refused) == "refused, and on no row"
