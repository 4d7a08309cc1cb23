"""The driver that draws loops: what it draws and finds; every loop is equal, or refused as the table says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import drawn_loops.loop as loop_module
import pytest
from drawn_loops.expected import Outcome, problem
from drawn_loops.loop import FAMILIES, FLAGS, MODES, SCHEDULERS, SHARDED, draw
from drawn_loops.running import run

PLAIN = replace(draw(0), mode="reduce_to_owner", heads="both", flags=(), frozen=(), scheduler="")
TWICE = replace(PLAIN, iterations=(("backward", "step"), ("backward", "step")))


FEW = [("", "", 20), ("", SHARDED, 12), *((family, "", 2) for family in FAMILIES)]
MANY = [("", "", 300), ("", SHARDED, 300)]
MANY += [(family, mode, count) for family in FAMILIES for mode, count in (("", 40), (SHARDED, 12))]


@pytest.mark.parametrize(
    ("family", "mode", "count"), [*FEW, *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in MANY)]
)
def test_loops_are_equal_or_refused_as_the_table_says(family, mode, count):
    for loop in (draw(seed, family) for seed in range(count)):
        trained = replace(loop, mode=mode or loop.mode)
        outcome = run(trained)
        assert problem(trained, outcome) == "", f"{outcome} {trained}"


def test_a_loop_is_a_function_of_its_seed_and_loops_are_of_every_kind():
    loops = [draw(seed) for seed in range(300)]
    assert loops == [draw(seed) for seed in range(300)]
    assert {loop.mode for loop in loops} == {*MODES}
    assert {loop.scheduler for loop in loops} == {*SCHEDULERS}
    assert {flag for loop in loops for flag in loop.flags} == {*FLAGS, "find_unused_parameters"}
    assert len({act.partition(" ")[0] for loop in loops for act in sum(loop.iterations, ())}) == 18


def test_loops_without_a_family_are_those_of_the_file_of_results():
    lines = (Path(loop_module.__file__).parent / "before.jsonl").read_text(encoding="utf-8").splitlines()
    assert [str(draw(seed)) for seed in range(300)] == [json.loads(line)["loop"] for line in lines]


def test_loops_of_a_family_do_one_thing_on_purpose_in_every_mode():
    usual = {act.partition(" ")[0] for seed in range(300) for act in sum(draw(seed).iterations, ())}
    found = {}
    for family in FAMILIES:
        loops = [draw(seed, family) for seed in range(40)]
        assert loops == [draw(seed, family) for seed in range(40)]
        assert {loop.mode for loop in loops} == {*MODES}
        found[family] = {act.partition(" ")[0] for loop in loops for act in sum(loop.iterations, ())} - usual
    own = {"attributes": {"mul"}, "grad data": {"grad"}, "closures": {"closure"}, "counters": {"resume"}}
    own |= {"data": {"data", "clamp"}, "dicts": {"rate"}}
    assert found == {family: own.get(family, set()) for family in FAMILIES}


@pytest.mark.parametrize("mode", MODES[2:])
def test_a_difference_is_found(mode):
    # It is documented that a hook that steps in backward cannot see this.
    found = run(replace(PLAIN, mode=mode, iterations=(("backward", "write 0", "step"),)))
    assert (found.kind, found.text) == ("differs", "parameter 0 after 2 step")


def test_sharded_gradients_are_added_up_and_refused_where_a_layer_is_unfrozen_meanwhile():
    sharded = replace(PLAIN, mode=SHARDED)
    added = replace(sharded, iterations=(("backward", "backward", "step", "zero none", "backward", "step"),))
    assert problem(added, run(added)) == ""
    assert run(added) == Outcome("equal")
    # In its second forward DDP replaces the views that are gradients then.
    window = ("backward", "local", "backward", "step", "zero none")
    assert run(replace(sharded, flags=("gradient_as_bucket_view",), iterations=(window, window))) == Outcome("equal")
    unfrozen = replace(sharded, frozen=("stem0",), iterations=(("backward", "unfreeze stem0", "backward", "step"),))
    found = run(unfrozen)
    assert (found.kind, found.act) == ("refused", "2 backward")
    assert problem(unfrozen, found) == ""
    assert problem(unfrozen, Outcome("equal")).startswith("not refused: sharded: freezing or unfreezing")


def test_a_refusal_is_on_a_row_by_its_message_and_a_loop_that_must_be_refused_is_not_equal():
    refused = Outcome("refused", "2 backward", "tensor 0 still has the gradient of the last step: call zero_grad()")
    assert problem(TWICE, refused) == ""
    assert problem(TWICE, replace(refused, text="something else")) == "refused, and on no row"
    assert problem(TWICE, Outcome("equal")).startswith("not refused: with a hook: backward after step()")
    assert problem(replace(TWICE, mode="no hook"), Outcome("equal")) == ""
    assert problem(replace(TWICE, mode="no hook"), Outcome("differs")) == "differs"
    assert problem(replace(TWICE, mode="no hook"), refused) == "refused, and on no row"


def test_a_class_that_couples_tensors_and_another_tensor_in_a_parameters_place_must_be_refused_without_a_hook_too():
    loop = replace(TWICE, mode="no hook", partition="whole")
    assert problem(replace(loop, optimizer="ClipAll"), Outcome("equal")) == "not refused: a class that couples tensors"
    assert problem(replace(loop, optimizer="ClipEach"), Outcome("equal")) == ""
    typed = replace(loop, optimizer="ByType")
    assert problem(typed, Outcome("equal")) == ""
    for changed in (replace(typed, partition="split"), replace(typed, mode=MODES[3])):
        assert problem(changed, Outcome("equal")).startswith("not refused: a type of parameter")
