"""Checkpoints that are damaged, or that differ between ranks: the same error on every rank, and nothing has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.combinations import WHERE, each_of
from support.refusals import Run, assert_blames, is_mine
from support.training import assert_bitwise_equal, assert_same_state, cutting
from torch import nn, optim
from zeroshard_comm import DisagreementError

Damage = Callable[[dict[str, Any]], None]


def at(*path: Any, put: Any = None, drop: bool = False) -> Damage:
    """Change one place of a checkpoint."""

    def change(state_dict: dict[str, Any]) -> None:
        holder: Any = state_dict
        for key in path[:-1]:
            holder = holder[key]
        if drop:
            del holder[path[-1]]
        else:
            holder[path[-1]] = put

    return change


def with_text_keys(state_dict: dict[str, Any]) -> None:
    state_dict["state"] = {str(key): entries for key, entries in state_dict["state"].items()}


def with_names_for_params(state_dict: dict[str, Any]) -> None:
    for group in state_dict["param_groups"]:
        group["params"] = [f"weight {key}" for key in group["params"]]


DAMAGE: dict[str, tuple[Damage, type[Exception], str]] = {
    "state is a list": (at("state", put=[]), TypeError, "'state' must be a dict, but is a list"),
    "state of a tensor is a list": (at("state", 2, put=[1]), ValueError, "parameter 2 'param.2': state is a list"),
    "no groups": (at("param_groups", put=None), TypeError, "'param_groups' must be a list"),
    "a group is text": (at("param_groups", 0, put="x"), TypeError, "group 0 must be a dict, but is a str"),
    "a group without params": (at("param_groups", 0, "params", drop=True), ValueError, "group 0 lacks 'params'"),
    "params is a number": (at("param_groups", 0, "params", put=9), TypeError, "'params' of group 0 must be a list"),
    "a parameter twice": (at("param_groups", 0, "params", put=[0] * 9), ValueError, "names parameter 0 twice"),
    "a parameter too many": (at("param_groups", 0, "params", put=[*range(10)]), ValueError, "10 parameters there"),
    "None for a tensor": (at("state", 2, "exp_avg", put=None), ValueError, "'exp_avg' is a NoneType, expected a"),
    "None for a number": (at("state", 2, "step", put=None), ValueError, "'step' is a NoneType, expected a single"),
    "text keys, as in JSON": (with_text_keys, ValueError, "strings, but param_groups has integers: '0', '1', .* JSON"),
    "one text key": (lambda s: s["state"].update({"3": s["state"].pop(3)}), ValueError, "has integers: '3'. JSON"),
    "names for numbers": (with_names_for_params, ValueError, "state for parameter 0, which no param_group names"),
    "no values": (
        at("state", 2, "exp_avg", put=torch.zeros(64, device="meta")),
        ValueError,
        "parameter 2 'param.2': entry 'exp_avg' is on the meta device",
    ),
    "a number without a value": (
        at("state", 7, "step", put=torch.zeros((), device="meta")),
        ValueError,
        "parameter 7 'param.7': entry 'step' is on the meta device",
    ),
    "text for a number": (at("state", 2, "step", put="x"), ValueError, "'step' is a str, expected a single number"),
    "no state at all": (at("state", drop=True), TypeError, "expects a dict"),
    "a tensor's state missing": (at("state", 2, drop=True), ValueError, "parameter 2 'param.2': missing entry"),
    "an entry missing": (at("state", 2, "exp_avg", drop=True), ValueError, "'param.2': missing entry 'exp_avg'"),
    "state of an unknown parameter": (at("state", 77, put={}), ValueError, "extra entry: state for parameter 77"),
    "an unknown entry": (at("state", 2, "foo", put=torch.zeros(3)), ValueError, "extra entry 'foo'"),
    "another shape": (at("state", 2, "exp_avg", put=torch.zeros(3)), ValueError, r"shape \(3,\), expected \(64,\)"),
    "a number for a tensor": (at("state", 2, "exp_avg", put=torch.tensor(1.0)), ValueError, r"\(\), expected \(64,\)"),
    "text for a tensor": (at("state", 2, "exp_avg", put="x"), ValueError, "is a str, expected a tensor"),
    "a tensor for a number": (at("state", 2, "step", put=torch.zeros(5)), ValueError, "expected a single number"),
    "another layout": (at("state", 0, "exp_avg", put=torch.eye(64, 40).to_sparse()), ValueError, "sparse_coo tensor"),
    "emptied by torch's class": (at("state", 1, put=None), ValueError, "its state is None"),
    "a parameter missing": (at("param_groups", 0, "params", 8, drop=True), ValueError, "doesn't match the size"),
    "a group missing": (at("param_groups", 0, drop=True), ValueError, "different number of parameter groups"),
}


@pytest.mark.ranks(2, backend="gloo")
@each_of("name", DAMAGE, partition=["whole", "split"], where=WHERE)
def test_a_damaged_checkpoint_changes_nothing(rank: int, where: str, partition: str, name: str) -> None:
    damage, error, words = DAMAGE[name]
    run = Run(partition=cutting(partition))
    given = copy.deepcopy(run.plain.state_dict())
    given["param_groups"][0]["lr"] = 0.7
    if is_mine(where, rank):
        damage(given)
    groups = copy.deepcopy(run.sharded.param_groups)
    before = run.local_state()
    with pytest.raises(error, match=words) as caught:
        run.sharded.load_state_dict(given)
    assert_blames(caught.value, where)
    assert_same_state(run.local_state(), before)
    assert [group["lr"] for group in run.sharded.param_groups] == [group["lr"] for group in groups]
    run.assert_goes_on()


def matrices() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4 + i, 5 + i, bias=False) for i in range(4)))


NOT_ELEMENTWISE: dict[str, tuple[type[optim.Optimizer], Damage, str]] = {
    "Adafactor, missing": (optim.Adafactor, at("state", 1, "row_var", drop=True), "missing entry 'row_var'"),
    "Adafactor, extra": (optim.Adafactor, at("state", 1, "variance", put=torch.zeros(6, 5)), "extra entry 'variance'"),
    "Adafactor, misshapen": (
        optim.Adafactor,
        at("state", 1, "col_var", put=torch.zeros(5, 1)),
        r"'col_var' has shape \(5, 1\), expected \(1, 5\)",
    ),
    "Muon, misshapen": (optim.Muon, at("state", 1, "momentum_buffer", put=torch.zeros(5, 6)), r"expected \(6, 5\)"),
    "Muon, missing": (optim.Muon, at("state", 1, drop=True), "missing entry: it has no state"),
}


@pytest.mark.ranks(2, backend="gloo")
@each_of("name", NOT_ELEMENTWISE, where=WHERE)
def test_a_damaged_checkpoint_of_a_class_that_is_not_elementwise_changes_nothing(
    rank: int, where: str, name: str
) -> None:
    optimizer_class, damage, words = NOT_ELEMENTWISE[name]
    run = Run(optimizer_class, make=matrices)
    given = copy.deepcopy(run.plain.state_dict())
    if is_mine(where, rank):
        damage(given)
    before = run.local_state()
    with pytest.raises(ValueError, match=words) as caught:
        run.sharded.load_state_dict(given)
    assert_blames(caught.value, where)
    assert_same_state(run.local_state(), before)
    run.assert_goes_on()


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("what", ["learning rate", "step count", "dtype"])
def test_checkpoints_of_different_runs_are_told_apart(rank: int, what: str) -> None:
    run = Run()
    given = copy.deepcopy(run.plain.state_dict())
    if rank == 1:
        entries = given["state"][3]
        if what == "learning rate":
            given["param_groups"][0]["lr"] = 0.7
        elif what == "step count":
            entries["step"] += 1
        else:
            entries["exp_avg"] = entries["exp_avg"].double()
    with pytest.raises(DisagreementError, match="rank 1 differs from rank 0: they were passed different checkpoints"):
        run.sharded.load_state_dict(given)
    run.assert_goes_on()


class Note:
    """An object whose repr differs between two ranks, as one that names an address does."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __repr__(self) -> str:
        return f"<Note at {self.rank}>"


@pytest.mark.ranks(2, backend="gloo")
def test_equal_checkpoints_with_objects_are_equal(rank: int) -> None:
    run = Run()
    given = copy.deepcopy(run.plain.state_dict())
    group = given["param_groups"][0]
    group.update(note=Note(rank), notes=[Note(rank), {"at": (Note(rank), 1)}], names={"b", "a"}, dtype=torch.float32)
    run.sharded.load_state_dict(given)
    run.step(2, first=10)
    assert_bitwise_equal(run.model, run.reference, "after the load")
    group["note"] = Note(rank) if rank == 0 else "text"
    with pytest.raises(DisagreementError, match="rank 1 differs from rank 0: they were passed different checkpoints"):
        run.sharded.load_state_dict(given)
    group.update(note=Note(rank), notes=[Note(rank), {"at": (Note(rank), 1 + rank)}])
    with pytest.raises(DisagreementError, match="rank 1 differs from rank 0: they were passed different checkpoints"):
        run.sharded.load_state_dict(given)


class FailsToLoad(optim.SGD):
    """Takes its state, and then finds something wrong with it, where it owns anything of three axes."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if any(param.dim() == 3 for group in self.param_groups for param in group["params"]):
            raise ArithmeticError("this state does not add up")


@pytest.mark.ranks(2, backend="gloo")
def test_a_class_that_fails_in_the_middle_of_a_load_on_one_rank_changes_nothing(rank: int) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.ParameterList([nn.Parameter(torch.randn(2, 2, 2)), nn.Parameter(torch.randn(8))])

    run = Run(FailsToLoad, {"lr": 0.1, "momentum": 0.9}, make=build)
    before = run.local_state()
    given = copy.deepcopy(run.plain.state_dict())
    given["param_groups"][0]["lr"] = 0.7
    for entries in given["state"].values():
        entries["momentum_buffer"].zero_()
    with pytest.raises(ArithmeticError, match="rank 0: this state does not add up"):
        run.sharded.load_state_dict(given)
    assert_same_state(run.local_state(), before)
    assert run.sharded.param_groups[0]["lr"] == run.sharded.optim.param_groups[0]["lr"] == 0.1
    run.assert_goes_on()
