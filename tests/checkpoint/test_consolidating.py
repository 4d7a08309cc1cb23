"""``consolidate_state_dict()`` where it cannot be called, or where ranks do not fit together."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.combinations import WHERE, each_of
from support.refusals import Run, assert_blames, is_mine
from support.training import EVERYWHERE, assert_same_state, cutting, train_all, twins
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError
from zeroshard_testing import assert_replicas_equal


@pytest.mark.ranks(3, backend="gloo")
@each_of("to", [-1, 3, 1.0, "0", None, True, torch.tensor([0, 1])], where=WHERE)
def test_a_target_that_is_no_rank_is_refused(rank: int, where: str, to: Any) -> None:
    run = Run()
    # Another target on one rank is a bad one first, and a different call only then.
    with pytest.raises(ValueError, match="`to` must be a group rank from 0 to 2") as caught:
        run.sharded.consolidate_state_dict(to=to if is_mine(where, rank) else 0)
    assert_blames(caught.value, where)
    run.assert_goes_on()


@pytest.mark.ranks(2, backend="gloo")
def test_a_target_may_be_an_integer_of_another_kind(rank: int) -> None:
    run = Run()
    run.sharded.consolidate_state_dict(to=torch.tensor(1) if rank == 0 else 1)
    if rank == 1:
        assert_same_state(run.sharded.state_dict(), run.plain.state_dict())


@pytest.mark.ranks(2, backend="gloo")
def test_a_hyperparameter_that_cannot_be_copied_is_an_error_on_every_rank() -> None:
    run = Run()
    run.sharded.param_groups[0]["lock"] = threading.Lock()
    with pytest.raises(TypeError, match="lock"):
        run.sharded.consolidate_state_dict(to=0)
    del run.sharded.param_groups[0]["lock"]
    run.assert_goes_on()


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("where", WHERE)
def test_a_group_appended_past_the_optimizer_is_no_checkpoint(rank: int, where: str) -> None:
    run = Run()
    if is_mine(where, rank):
        run.sharded.param_groups.append({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ValueError, match="expected 1 param groups, but there are 2") as caught:
        run.sharded.consolidate_state_dict(to=0)
    assert_blames(caught.value, where)
    if is_mine(where, rank):
        run.sharded.param_groups.pop()
    run.assert_goes_on()


CALLS: dict[str, Callable[[Run], None]] = {
    "add_param_group": lambda run: run.sharded.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}),
    "consolidate_state_dict": lambda run: run.sharded.consolidate_state_dict(to=0),
    "load_state_dict": lambda run: run.sharded.load_state_dict(run.plain.state_dict()),
}


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize(("first", "second"), [*itertools.pairwise([*CALLS, "add_param_group"])])
def test_calls_that_differ_are_named(rank: int, first: str, second: str) -> None:
    run = Run()
    with pytest.raises(DisagreementError, match=rf"rank 0 called {first}\(.*rank 1 called {second}\("):
        CALLS[first if rank == 0 else second](run)
    assert len(run.sharded.param_groups) == 1
    run.assert_goes_on()


@pytest.mark.ranks(3, backend=EVERYWHERE)
@pytest.mark.parametrize("change", ["another dtype", "an entry more", "an entry less"])
def test_parts_of_a_tensor_that_do_not_fit_together_are_named(rank: int, change: str) -> None:
    model, _ = twins()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, partition=cutting("split"))
    train_all([(model, sharded)], range(1))
    if rank == 1:
        for entries in sharded.optim.state.values():
            if change == "another dtype":
                entries["exp_avg"] = entries["exp_avg"].double()
            elif change == "an entry more":
                entries["extra"] = 1
            else:
                del entries["exp_avg"]
    key, here, there = {
        "another dtype": ("exp_avg", 0, 1),
        "an entry more": ("extra", 1, 0),
        "an entry less": ("exp_avg", 0, 1),
    }[change]
    with pytest.raises(
        ValueError, match=f"tensor . '.*' has the state entry '{key}' on rank {here}, but rank {there}, .*dtype"
    ):
        sharded.consolidate_state_dict()
    assert_replicas_equal(model.parameters())
