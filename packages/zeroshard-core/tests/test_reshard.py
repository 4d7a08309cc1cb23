"""Moves turn the ownership of one plan into that of another, and no list of moves is shorter."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plan_strategies import SMALL_PARTS, plans, specs
from zeroshard_core import Move, TensorSpec, moves, partition

WEIGHT = TensorSpec("weight", (256,), torch.float32)


@st.composite
def pairs(draw):
    tensors = draw(specs())
    return draw(plans(tensors=tensors)), draw(plans(tensors=tensors))


def owners(plan):
    return [
        [next(s.rank for s in plan.of_tensor(index) if s.start <= row < s.stop) for row in range(spec.rows)]
        for index, spec in enumerate(plan.tensors)
    ]


@given(pairs())
def test_moves_applied_to_the_old_ownership_give_the_new_one(pair):
    old, new = pair
    now, wanted = owners(old), owners(new)
    for move in moves(old, new):
        for row in range(move.start, move.stop):
            assert now[move.tensor][row] == move.source
            now[move.tensor][row] = move.target
    assert now == wanted


@given(pairs())
def test_moves_are_the_fewest(pair):
    old, new = pair
    found = moves(old, new)
    fewest = 0
    for now, wanted in zip(owners(old), owners(new), strict=True):
        journeys = [(a, b) if a != b else None for a, b in zip(now, wanted, strict=True)]
        fewest += sum(
            1 for before, after in zip([None, *journeys], journeys, strict=False) if after and after != before
        )
    assert sum(1 for move in found if move.stop > move.start) == fewest


@given(plans())
def test_nothing_moves_to_an_equal_plan(plan):
    assert moves(plan, plan) == ()


def test_state_of_a_tensor_without_elements_moves_with_its_owner():
    empty = TensorSpec("empty", (0,), torch.float32)
    old = partition([WEIGHT, empty], 2)
    new = partition([WEIGHT, empty], 1)
    assert moves(old, new) == (Move(1, 0, 0, 1, 0),)


def test_a_smaller_world_takes_over_what_the_others_had():
    old, new = (partition([WEIGHT], ranks, strategy=SMALL_PARTS["split"]) for ranks in (4, 2))
    assert moves(old, new) == (Move(0, 64, 128, 1, 0), Move(0, 128, 192, 2, 1), Move(0, 192, 256, 3, 1))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([WEIGHT, WEIGHT], "old plan is for 1 tensors, the new one for 2"),
        ([replace(WEIGHT, shape=(128, 2))], r"'weight'.*shape \(256,\) here, \(128, 2\) there"),
        ([replace(WEIGHT, dtype=torch.float16)], "'weight'.*dtype torch.float32 here, torch.float16 there"),
        ([replace(WEIGHT, stride=(1,))], "'weight'.*stride None here"),
    ],
)
def test_plans_for_other_tensors_are_refused(tensors, message):
    with pytest.raises(ValueError, match=message):
        moves(partition([WEIGHT], 2), partition(tensors, 2))


def test_a_tensor_may_have_another_name():
    assert moves(partition([WEIGHT], 1), partition([replace(WEIGHT, name="module.weight")], 1)) == ()
