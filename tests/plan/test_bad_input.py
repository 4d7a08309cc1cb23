"""Bad input: the same error on every rank, whoever was handed it, and an optimizer that goes on as if nothing was."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.training import assert_bitwise_equal, assert_same_state, cutting, set_gradients, small_model, twins
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError, PeerLostError
from zeroshard_testing import assert_replicas_equal

WHERE = pytest.mark.parametrize("where", ["on all ranks", "on rank 1"])
PARTITIONS = pytest.mark.parametrize("partition", ["whole", "split"])
VIEWS = pytest.mark.parametrize("as_bucket_view", [False, True], ids=["params", "views"])


class Run:
    """A sharded and an unsharded run that have taken two equal steps, and the checkpoint of both."""

    def __init__(
        self,
        optimizer_class: type[optim.Optimizer] = optim.Adam,
        settings: dict[str, Any] | None = None,
        *,
        make: Callable[[], nn.Module] = small_model,
        **how: Any,
    ) -> None:
        self.model, self.reference = twins(make)
        self.sharded = ZeroRedundancyOptimizer(self.model.parameters(), optimizer_class, **how, **(settings or {}))
        self.plain = optimizer_class(self.reference.parameters(), **(settings or {}))
        self.step(2)

    def step(self, steps: int, first: int = 0) -> None:
        for step in range(first, first + steps):
            for module, optimizer in ((self.model, self.sharded), (self.reference, self.plain)):
                set_gradients(module.parameters(), step)
                optimizer.step()

    def local_state(self) -> dict[str, Any]:
        return copy.deepcopy(self.sharded.optim.state_dict())

    def assert_goes_on(self) -> None:
        """Two more steps, and the whole state, are those of the run that was never handed anything bad."""
        self.step(2, first=10)
        assert_bitwise_equal(self.model, self.reference, "after the refused call")
        self.sharded.consolidate_state_dict(to=0)
        if self.sharded.rank == 0:
            assert_same_state(self.sharded.state_dict(), self.plain.state_dict())


def is_mine(where: str, rank: int) -> bool:
    return where == "on all ranks" or rank == 1


def assert_blames(error: BaseException, where: str) -> None:
    """A rank alone is named; what all ranks did is nobody's in particular."""
    assert ("rank 1: " in str(error)) == (where == "on rank 1"), str(error)


def same_twice() -> list[dict[str, Any]]:
    param = nn.Parameter(torch.zeros(3))
    return [{"params": [param]}, {"params": [param]}]


BAD_PARAMS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "None": (lambda: None, TypeError, "iterable"),
    "numbers": (lambda: [1.0, 2.0], TypeError, "float"),
    "text": (lambda: "weights", TypeError, "str"),
    "a tensor among dicts": (lambda: [{"params": []}, nn.Parameter(torch.zeros(1))], TypeError, "one kind"),
    "a name without its tensor": (lambda: [("weight", 3)], TypeError, "one kind"),
    "names for some": (
        lambda: [("w", nn.Parameter(torch.zeros(1))), nn.Parameter(torch.zeros(1))],
        TypeError,
        "one kind",
    ),
    "an exhausted generator": (lambda: (p for p in ()), ValueError, "empty parameter list"),
    "a generator that raises": (lambda: (len(3) for _ in "x"), TypeError, "no len"),  # type: ignore[arg-type]
    "a set": (lambda: set(small_model().parameters()), TypeError, "order"),
    "a set in a group": (lambda: [{"params": set(small_model().parameters())}], TypeError, "order"),
    "a number for a group's params": (lambda: [{"params": 3}], TypeError, "int"),
    "a tensor in two groups": (same_twice, ValueError, "more than one parameter group"),
    "on the meta device": (
        lambda: [("weight", nn.Parameter(torch.zeros(3, device="meta")))],
        ValueError,
        r"parameter 0 of group 0 \('weight'\), of shape \(3,\), is on the meta device and has no values",
    ),
    "a tensor that is no leaf": (lambda: [nn.Parameter(torch.zeros(3)) * 2], ValueError, "non-leaf"),
}


@pytest.mark.by_default(
    "2-None-on all ranks | 2-numbers-on rank 1 | 2-text-on all ranks | 2-a tensor among dicts-on rank 1 | "
    "2-a name without its tensor-on all ranks | 2-names for some-on rank 1 | "
    "2-an exhausted generator-on all ranks | 2-a generator that raises-on rank 1 | 2-a set-on all ranks | "
    "2-a set in a group-on rank 1 | 2-a number for a group's params-on all ranks | "
    "2-a tensor in two groups-on rank 1 | 2-on the meta device-on all ranks | "
    "2-a tensor that is no leaf-on rank 1"
)
@pytest.mark.ranks(2, backend="gloo")
@WHERE
@pytest.mark.parametrize("name", BAD_PARAMS)
def test_params_that_cannot_be_used(rank: int, where: str, name: str) -> None:
    make, error, words = BAD_PARAMS[name]
    with pytest.raises(error, match=words) as caught:
        ZeroRedundancyOptimizer(make() if is_mine(where, rank) else small_model().parameters(), optim.Adam)
    assert_blames(caught.value, where)


@pytest.mark.ranks(2, backend="gloo")
@WHERE
def test_a_group_on_the_meta_device(rank: int, where: str) -> None:
    run = Run()
    device = "meta" if is_mine(where, rank) else None
    with pytest.raises(ValueError, match=r"parameter 0 of group 1, .* on the meta device") as caught:
        run.sharded.add_param_group({"params": [nn.Parameter(torch.zeros(3, device=device))]})
    assert_blames(caught.value, where)
    run.assert_goes_on()


BAD_SETTINGS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "learning rate": ({"lr": -1.0}, ValueError, "Invalid learning rate"),
    "unknown argument": ({"no_such": 1}, TypeError, "no_such"),
    "exclusive arguments": ({"fused": True, "foreach": True}, RuntimeError, "fused"),
    "LBFGS": ({"optimizer_class": optim.LBFGS}, ValueError, "LBFGS cannot be sharded"),
    "no optimizer": ({"optimizer_class": 3}, TypeError, "must be an optimizer class"),
    "partition": ({"partition": "diagonal"}, ValueError, "diagonal.*whole"),
    "partition of no kind": ({"partition": 3}, TypeError, "a strategy must be one of 'whole'.* but is 3 \\(int\\)"),
    "cost": ({"cost": lambda spec: "heavy"}, TypeError, "cost of tensor 'param.0' should be a number, but is 'heavy'"),
    "cuts": (
        {"optimizer_class": optim.Adafactor, "partition": cutting("split")},
        ValueError,
        "Adafactor is not known to be",
    ),
}


@pytest.mark.by_default(
    "3-learning rate-on all ranks | 3-unknown argument-on rank 1 | 3-exclusive arguments-on all ranks | "
    "3-LBFGS-on rank 1 | 3-no optimizer-on all ranks | 3-partition-on rank 1 | "
    "3-partition of no kind-on all ranks | 3-cost-on rank 1 | 3-cuts-on all ranks"
)
@pytest.mark.ranks(3, backend="gloo")
@WHERE
@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_settings_that_cannot_be_used(rank: int, where: str, name: str) -> None:
    bad, error, words = BAD_SETTINGS[name]
    model, untouched = twins()
    settings = {"optimizer_class": optim.Adam, "parameters_as_bucket_view": True}
    with pytest.raises(error, match=words) as caught:
        ZeroRedundancyOptimizer(model.parameters(), **(settings | bad if is_mine(where, rank) else settings))
    assert_blames(caught.value, where)
    assert_bitwise_equal(model, untouched, "after the refused construction")
    bases = [param.untyped_storage().nbytes() == param.nbytes for param in model.parameters()]
    assert all(bases), "no parameter lies in a flat buffer"


@pytest.mark.ranks(3, backend="gloo")
@VIEWS
def test_freezing_on_one_rank_can_be_mended(rank: int, as_bucket_view: bool) -> None:
    run = Run(optim.SGD, {"lr": 0.1}, parameters_as_bucket_view=as_bucket_view)
    weight = list(run.model.parameters())[4]
    for _ in range(2):
        weight.requires_grad_(rank != 2)
        set_gradients(run.model.parameters(), 5)
        with pytest.raises(DisagreementError, match=r"tensor 4 'param.4' .*frozen on rank 2"):
            run.sharded.step()
        assert_replicas_equal(run.model.parameters())
    weight.requires_grad_(True)
    run.reference.load_state_dict(run.model.state_dict())
    run.assert_goes_on()


class Refusing(optim.SGD):
    """Refuses tensors of three axes when a group is added, as Muon refuses all but matrices."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        if any(param.dim() == 3 for param in params):
            raise ValueError("no tensors of three axes, please")
        super().add_param_group({**param_group, "params": params})


@pytest.mark.ranks(3, backend="gloo")
@VIEWS
def test_a_group_whose_tensors_the_class_refuses_on_their_owner_alone(rank: int, as_bucket_view: bool) -> None:
    run = Run(Refusing, {"lr": 0.1}, parameters_as_bucket_view=as_bucket_view)
    before = run.local_state()
    with pytest.raises(ValueError, match=r"rank \d: Refusing: no tensors of three axes"):
        run.sharded.add_param_group({"params": [nn.Parameter(torch.ones(2, 2, 2))]})
    assert run.local_state() == before
    assert len(run.sharded.param_groups) == 1
    run.assert_goes_on()


@pytest.mark.ranks(2, backend="gloo")
@WHERE
def test_a_group_of_what_is_there_already(rank: int, where: str) -> None:
    run = Run()
    known, fresh = next(run.model.parameters()), nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="more than one parameter group") as caught:
        run.sharded.add_param_group({"params": [fresh, known] if is_mine(where, rank) else [fresh]})
    assert_blames(caught.value, where)
    assert len(run.sharded.param_groups) == len(run.sharded.optim.param_groups) == 1
    run.assert_goes_on()


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
    "None for a tensor": (
        at("state", 2, "exp_avg", put=None),
        ValueError,
        "'exp_avg' is a NoneType, expected a",
    ),
    "None for a number": (at("state", 2, "step", put=None), ValueError, "'step' is a NoneType, expected a single"),
    "text keys, as in JSON": (with_text_keys, ValueError, "text where param_groups has numbers: '0', '1', .* JSON"),
    "one text key": (lambda s: s["state"].update({"3": s["state"].pop(3)}), ValueError, "has numbers: '3', which JSON"),
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
}


@pytest.mark.by_default(
    "2-state is a list-whole-on all ranks | 2-state of a tensor is a list-split-on rank 1 | "
    "2-no groups-whole-on all ranks | 2-a group is text-split-on rank 1 | "
    "2-a group without params-whole-on all ranks | 2-params is a number-split-on rank 1 | "
    "2-a parameter twice-whole-on all ranks | 2-a parameter too many-split-on rank 1 | "
    "2-None for a tensor-whole-on all ranks | 2-None for a number-split-on rank 1 | "
    "2-text keys, as in JSON-whole-on all ranks | 2-one text key-split-on rank 1 | "
    "2-names for numbers-whole-on all ranks | 2-no values-split-on rank 1 | "
    "2-a number without a value-whole-on all ranks | 2-text for a number-split-on rank 1"
)
@pytest.mark.ranks(2, backend="gloo")
@WHERE
@pytest.mark.parametrize("partition", ["whole", "split"])
@pytest.mark.parametrize("name", DAMAGE)
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
    "Muon, missing": (optim.Muon, at("state", 1, drop=True), "missing entry, there is no state for it"),
}


@pytest.mark.by_default(
    "2-Adafactor, missing-on all ranks | 2-Adafactor, extra-on rank 1 | 2-Adafactor, misshapen-on all ranks | "
    "2-Muon, misshapen-on rank 1 | 2-Muon, missing-on all ranks"
)
@pytest.mark.ranks(2, backend="gloo")
@WHERE
@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_a_damaged_checkpoint_of_a_class_that_is_not_elementwise(rank: int, where: str, name: str) -> None:
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
def test_checkpoints_of_different_runs(rank: int, what: str) -> None:
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
    with pytest.raises(DisagreementError, match="rank 1 differs from rank 0: they were handed different checkpoints"):
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
    with pytest.raises(DisagreementError, match="rank 1 differs from rank 0: they were handed different checkpoints"):
        run.sharded.load_state_dict(given)
    group.update(note=Note(rank), notes=[Note(rank), {"at": (Note(rank), 1 + rank)}])
    with pytest.raises(DisagreementError, match="rank 1 differs from rank 0: they were handed different checkpoints"):
        run.sharded.load_state_dict(given)


class FailsToLoad(optim.SGD):
    """Takes its state, and then finds something wrong with it, where it owns anything of three axes."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if any(param.dim() == 3 for group in self.param_groups for param in group["params"]):
            raise ArithmeticError("this state does not add up")


@pytest.mark.ranks(2, backend="gloo")
def test_a_class_that_fails_in_the_middle_of_a_load_on_one_rank(rank: int) -> None:
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


@pytest.mark.by_default(
    "3--1-on all ranks | 3-3-on rank 1 | 3-1.0-on all ranks | 3-0-on rank 1 | 3-None-on all ranks | "
    "3-True-on rank 1 | 3-to6-on all ranks"
)
@pytest.mark.ranks(3, backend="gloo")
@WHERE
@pytest.mark.parametrize("to", [-1, 3, 1.0, "0", None, True, torch.tensor([0, 1])])
def test_consolidating_to_a_rank_that_is_not(rank: int, where: str, to: Any) -> None:
    run = Run()
    # Another target on one rank is a bad one first, and a different call only then.
    with pytest.raises(ValueError, match="`to` must be a group rank from 0 to 2") as caught:
        run.sharded.consolidate_state_dict(to=to if is_mine(where, rank) else 0)
    assert_blames(caught.value, where)
    run.assert_goes_on()


@pytest.mark.ranks(2, backend="gloo")
def test_consolidating_to_a_rank_that_is_an_integer_of_another_kind(rank: int) -> None:
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
@WHERE
def test_a_group_appended_past_the_optimizer_is_no_checkpoint(rank: int, where: str) -> None:
    run = Run()
    if is_mine(where, rank):
        run.sharded.param_groups.append({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ValueError, match="there are 2 param groups where there should be 1") as caught:
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


@pytest.mark.by_default(
    "2-add_param_group-consolidate_state_dict | 2-add_param_group-load_state_dict | "
    "2-consolidate_state_dict-add_param_group | 2-load_state_dict-add_param_group"
)
@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize(("first", "second"), [(a, b) for a in CALLS for b in CALLS if a != b])
def test_calls_that_differ_are_named(rank: int, first: str, second: str) -> None:
    run = Run()
    with pytest.raises(DisagreementError, match=rf"rank 0 called {first}\(.*rank 1 called {second}\("):
        CALLS[first if rank == 0 else second](run)
    assert len(run.sharded.param_groups) == 1
    run.assert_goes_on()


@pytest.mark.by_default("2-params-whole | 2-views-split")
@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
@VIEWS
def test_members_exchanged_on_one_rank(rank: int, partition: str, as_bucket_view: bool) -> None:
    run = Run(partition=cutting(partition), parameters_as_bucket_view=as_bucket_view)
    members = run.sharded.param_groups[0]["params"]
    if rank == 1:
        members[0], members[1] = members[1], members[0]
    set_gradients(run.model.parameters(), 5)
    with pytest.raises(RuntimeError, match=r"^rank 1: the members of param_groups"):
        run.sharded.step()
    assert_replicas_equal(run.model.parameters())
    if rank == 1:
        members[0], members[1] = members[1], members[0]
    run.step(1, first=6)
    assert_replicas_equal(run.model.parameters())


# The other rank waits for a step that does not come, until its timeout.
@pytest.mark.ranks(2, backend="gloo", isolation="process", checks="no:messages")
@WHERE
def test_what_a_step_pre_hook_raises_is_raised_where_it_occurs(rank: int, where: str) -> None:
    model, reference = twins()
    group = dist.new_group(timeout=timedelta(seconds=2))
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, process_group=group)
    set_gradients(model.parameters(), 0)

    def fail(*_: object) -> None:
        if is_mine(where, rank):
            raise ZeroDivisionError("no step today")

    handle = sharded.register_step_pre_hook(fail)
    with pytest.raises(ZeroDivisionError if is_mine(where, rank) else PeerLostError) as caught:
        sharded.step()
    assert not is_mine(where, rank) or str(caught.value) == "no step today"
    assert_bitwise_equal(model, reference, "after a hook has raised before the step")
    handle.remove()
    if where == "on all ranks":
        sharded.step()
        assert_replicas_equal(model.parameters())
    dist.barrier()


@pytest.mark.ranks(2, backend="gloo")
def test_the_object_cannot_be_pickled() -> None:
    run = Run()
    with pytest.raises(TypeError, match="cannot be pickled or deep-copied"):
        pickle.dumps(run.sharded)
    run.assert_goes_on()
