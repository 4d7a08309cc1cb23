"""torch.distributed.checkpoint's functions that get and set state dicts, beside DDP and beside a plain model.

The behaviours are those that PyTorch's own tests of these functions ask of a plain optimizer.
"""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ddp_training import HOOKS, Twins
from support.listed_state import assert_listed, assert_same, leaves
from support.training import assert_bitwise_equal, cutting, set_gradients, small_model
from torch import nn, optim
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _patch_model_state_dict,
    _patch_optimizer_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer, full_optimizer_state_dict
from zeroshard.state.placeholder import StatePlaceholder
from zeroshard_testing import raises_on

BOTH = (0, 1)
PARTITIONS = pytest.mark.parametrize("partition", ["whole", "split"])
LAYOUTS = pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
MODELS = pytest.mark.parametrize("wrap", [DistributedDataParallel, lambda model: model], ids=["ddp", "plain"])
REFUSED = r"zeroshard\.full_optimizer_state_dict\(model, optimizer\)"

Build = Callable[[nn.Module, Callable[..., optim.Optimizer]], list[optim.Optimizer]]
"""Builds the optimizers of a model; the function takes parameters, a class and its settings, and gives a sharded one
or a plain one."""


def one(kind: Any = optim.AdamW, params: Any = nn.Module.parameters, **settings: Any) -> Build:
    return lambda model, make: [make(params(model), kind, **settings)]


class Pair:
    """Sharded optimizers beside a wrapped model, and plain ones beside an equal model."""

    def __init__(
        self,
        partition: str,
        build: Build = one(),  # noqa: B008 - a function
        *,
        wrap: Any = DistributedDataParallel,
        model: Callable[[], nn.Module] = small_model,
    ) -> None:
        def shard(params: Any, kind: Any, **settings: Any) -> optim.Optimizer:
            return ZeroRedundancyOptimizer(params, kind, partition=cutting(partition), **settings)

        def plain(params: Any, kind: Any, **settings: Any) -> optim.Optimizer:
            return kind(params, **settings)

        self.another = functools.partial(Pair, partition, build, wrap=wrap, model=model)
        self.module, self.reference = model(), model()
        self.sharded, self.plain = build(self.module, shard), build(self.reference, plain)
        self.model = wrap(self.module)

    def train(self, steps: range, *, unused: Collection[int] = ()) -> None:
        for step in steps:
            for model, optimizers in ((self.module, self.sharded), (self.reference, self.plain)):
                set_gradients(model.parameters(), step, none=unused)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        assert_bitwise_equal(self.module, self.reference, f"after {steps}")

    def values(self) -> dict[str, torch.Tensor]:
        return copy.deepcopy(self.reference.state_dict())

    def go_on_from(self, values: dict[str, torch.Tensor]) -> None:
        self.module.load_state_dict(values, strict=False)
        self.reference.load_state_dict(values, strict=False)

    def get(self, **options: Any) -> tuple[Any, Any]:
        """What ours list on this rank, and what the plain ones have."""
        chosen = StateDictOptions(**options)
        ours = get_optimizer_state_dict(self.model, self.sharded, options=chosen)
        return ours, get_optimizer_state_dict(self.reference, self.plain, options=chosen)

    def set(self, ours: Any, theirs: Any, **options: Any) -> None:
        chosen = StateDictOptions(**options)
        set_optimizer_state_dict(self.model, self.sharded, ours, options=chosen)
        set_optimizer_state_dict(self.reference, self.plain, theirs, options=chosen)


@pytest.mark.by_default("2-False-nested-ddp-whole | 2-True-flat-plain-split")
@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
@MODELS
@LAYOUTS
@pytest.mark.parametrize("cpu_offload", [False, True])
def test_get_lists_by_name_what_a_plain_optimizer_has_and_set_takes_it(
    partition: str, wrap: Any, flat: bool, cpu_offload: bool
) -> None:
    options = {"flatten_optimizer_state_dict": flat, "cpu_offload": cpu_offload}
    pair = Pair(partition, one(weight_decay=0.3), wrap=wrap)
    pair.train(range(2))
    for optimizer in (*pair.sharded, *pair.plain):
        optimizer.param_groups[0]["lr"] = 0.3
    pair.train(range(2, 3))
    given, before = copy.deepcopy(pair.get(**options)), pair.values()
    assert ("state.0.weight.exp_avg" if flat else "state") in given[0]
    assert_listed(*given)
    # Into new optimizers, and back into those that have gone on.
    for other in (pair.another(), pair):
        other.train(range(7, 9))
        other.go_on_from(before)
        other.set(*copy.deepcopy(given), **options)
        assert_listed(*other.get(**options))
        assert other.sharded[0].param_groups[0]["lr"] == 0.3
        other.train(range(3, 6))


# ---------------------------------------------------------------- all of it on one rank


@pytest.mark.by_default("2-nested-whole | 2-flat-split")
@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
@LAYOUTS
def test_a_full_state_dict_of_one_rank_refuses_to_be_read(rank: int, partition: str, flat: bool) -> None:
    pair = Pair(partition)
    pair.train(range(2))
    options = {"full_state_dict": True, "flatten_optimizer_state_dict": flat}
    ours, theirs = pair.get(**options)
    assert_listed(ours, theirs)
    expected, lacking = dict(leaves(theirs)), 0
    for path, value in leaves(ours):
        if isinstance(value, StatePlaceholder):
            lacking += 1
            save = functools.partial(torch.save, value, io.BytesIO())
            for read in (value.tolist, value.numpy, value.sum, value.norm, save):
                with pytest.raises(RuntimeError, match=REFUSED):
                    read()
        elif isinstance(value, torch.Tensor):
            # Never one rank's part as if it were all.
            assert torch.equal(value, expected[path])
    assert lacking > 0
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.save(ours, io.BytesIO())
    # With cpu_offload torch leaves the others out.
    on_rank_0 = pair.get(**options, cpu_offload=True)[0]
    with raises_on(RuntimeError, ranks=0, match=REFUSED):
        torch.save(on_rank_0, io.BytesIO())
    assert rank == 0 or on_rank_0 == {}


@pytest.mark.by_default("2-0-ddp-whole | 2-1-plain-split")
@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
@MODELS
@pytest.mark.parametrize("to", BOTH)
def test_full_optimizer_state_dict_is_what_torch_gets_of_a_plain_optimizer(
    rank: int, partition: str, wrap: Any, to: int
) -> None:
    pair = Pair(partition, wrap=wrap)
    # Also of state that does not exist yet.
    for steps in (range(0), range(2)):
        pair.train(steps)
        full = full_optimizer_state_dict(pair.model, pair.sharded[0], to=to)
        # Until the next step torch's function returns it on that rank, and placeholders alone elsewhere.
        ours, theirs = pair.get(full_state_dict=True)
        assert_listed(ours, theirs)
        for found in (full, ours) if rank == to else ():
            assert_same(found, theirs)
            torch.save(found, io.BytesIO())
        assert rank == to or full == {}


@pytest.mark.by_default(
    "2-every rank-nested-ddp-whole | 2-broadcast-flat-plain-split | 2-without full_state_dict-nested-ddp-whole"
)
@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
@MODELS
@LAYOUTS
@pytest.mark.parametrize("way", ["every rank", "broadcast", "without full_state_dict"])
def test_the_whole_state_is_loaded(rank: int, partition: str, wrap: Any, flat: bool, way: str) -> None:
    pair = Pair(partition, one(betas=(0.8, 0.9)), wrap=wrap)
    pair.train(range(3))
    theirs = pair.get(flatten_optimizer_state_dict=flat)[1]
    given = copy.deepcopy(theirs) if rank == 0 or way != "broadcast" else {}
    # Of flattened state these options do not ask: torch cannot flatten and distribute in one call.
    options = StateDictOptions(
        full_state_dict=way != "without full_state_dict", broadcast_from_rank0=way == "broadcast"
    )
    # Into an optimizer without state, and into one that has gone on.
    for other in (Pair(partition, wrap=wrap), pair):
        other.go_on_from(pair.values())
        set_optimizer_state_dict(other.model, other.sharded, given, options=options)
        set_optimizer_state_dict(other.reference, other.plain, copy.deepcopy(theirs))
        assert rank != 0 or dict(leaves(given)).keys() == dict(leaves(theirs)).keys()
        assert_listed(*other.get())
        other.train(range(3, 5))


# ---------------------------------------------------------------- models and optimizers of all kinds


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 16)
        self.decoder = nn.Linear(16, 50)
        self.decoder.weight = self.embedding.weight


class Nested(optim.Optimizer):
    """Keeps numbers, dicts, and tensors of another shape than the parameter's."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["count"] = 0
                    state["sums"] = {"row": torch.zeros(len(param)), "inner": {"all": torch.zeros_like(param), "n": 0}}
                state["count"] += 1
                state["sums"]["inner"]["n"] += 2
                state["sums"]["inner"]["all"] += param.grad
                state["sums"]["row"] += param.grad.reshape(len(param), -1).mean(dim=1)
                param.sub_(state["sums"]["inner"]["all"], alpha=group["lr"] / state["count"])


def frozen() -> nn.Module:
    model = small_model()
    model[0].requires_grad_(False)
    model[3].bias.requires_grad_(False)
    return model


def checkpointing() -> nn.Module:
    model = small_model()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    return model


def of_two_groups(model: Any) -> list[dict[str, Any]]:
    return [
        {"params": model[2].parameters(), "lr": 0.2},
        {"params": [*model[3].parameters(), *model[0].parameters()], "weight_decay": 0.9},
    ]


def two(model: Any, make: Any) -> list[optim.Optimizer]:
    others = [*model[3].parameters(), *model[0].parameters()]
    return [make(model[2].parameters(), optim.AdamW), make(others, optim.SGD, lr=0.1, momentum=0.9)]


def sharded_and_plain(model: Any, make: Any) -> list[optim.Optimizer]:
    others = [*model[3].parameters(), *model[0].parameters()]
    return [make(others, optim.AdamW), optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)]


def plain_and_sharded(model: Any, make: Any) -> list[optim.Optimizer]:
    return sharded_and_plain(model, make)[::-1]


ALL_KINDS: dict[str, dict[str, Any]] = {
    "shared": {"model": Tied},
    "frozen": {"model": frozen},
    "groups": {"build": one(params=of_two_groups, lr=0.1)},
    "empty group": {"build": one(params=lambda model: [{"params": model.parameters()}, {"params": []}])},
    "names": {"build": one(params=lambda model: model.named_parameters())},
    "stateless": {"build": one(optim.SGD, lr=0.1)},
    "momentum": {"build": one(optim.SGD, lr=0.1, momentum=0.9)},
    "tensor lr": {"build": one(lr=torch.tensor(0.1))},
    "two": {"build": two},
    "sharded and plain": {"build": sharded_and_plain},
    "plain and sharded": {"build": plain_and_sharded},
    "nested state": {"build": one(Nested)},
    "activation checkpointing": {"model": checkpointing},
    "compiled ddp": {"wrap": lambda model: torch.compile(DistributedDataParallel(model))},
    "ddp of compiled": {"wrap": lambda model: DistributedDataParallel(torch.compile(model))},
}


@pytest.mark.by_default(
    "2-shared | 2-frozen | 2-groups | 2-empty group | 2-names | 2-stateless | 2-momentum | 2-tensor lr | 2-two | "
    "2-sharded and plain | 2-plain and sharded | 2-nested state | 2-activation checkpointing | 2-compiled ddp"
)
@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.exhaustive] * (kind == "ddp of compiled")) for kind in ALL_KINDS]
)
def test_all_kinds_of_models_and_optimizers(kind: str) -> None:
    replicated = ("2.weight", "2.bias") if "plain" in kind else ()
    # Torch does not flatten an empty group, and what is not elementwise is not cut.
    for partition, flat in (("whole", False), ("split", kind != "empty group")):
        pair = Pair("whole" if kind == "nested state" else partition, **ALL_KINDS[kind])
        options = {"flatten_optimizer_state_dict": flat}
        # Before any step torch makes one with learning rate 0.
        for steps in (range(0), range(2)):
            pair.train(steps)
            given = copy.deepcopy(pair.get(**options))
            assert_listed(*given, replicated)
            other = pair.another()
            other.go_on_from(pair.values())
            other.set(*given, **options)
            assert_listed(*other.get(**options), replicated)
            other.train(range(2, 4))


# ---------------------------------------------------------------- what is missing, extra, or does not fit


def without(state_dict: dict[str, Any], name: str) -> dict[str, Any]:
    """Leave out the state of a parameter, as a checkpoint of a model without it does."""
    return {**state_dict, "state": {key: entries for key, entries in state_dict["state"].items() if key != name}}


@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
def test_a_missing_parameter_is_an_error_or_begins_anew(rank: int, partition: str) -> None:
    pair = Pair(partition)
    pair.train(range(2))
    found, theirs = copy.deepcopy(pair.get())
    values, missing = pair.values(), without(theirs, "2.weight")
    ways = [
        (without(found, "2.weight"), {}),
        (missing, {}),
        (missing, {"full_state_dict": True}),
        (missing if rank == 0 else {}, {"full_state_dict": True, "broadcast_from_rank0": True}),
    ]
    for given, options in ways:
        other = pair.another()
        other.go_on_from(values)
        if "broadcast_from_rank0" not in options:
            # There torch raises on rank 0 alone, and the others wait for it.
            with raises_on(RuntimeError, ranks=BOTH, match=r"Missing optimizer state for parameter '2\.weight'"):
                set_optimizer_state_dict(other.model, other.sharded, given, options=StateDictOptions(**options))
        full = bool(options)
        set_optimizer_state_dict(
            other.model, other.sharded, copy.deepcopy(given), options=StateDictOptions(**options, strict=False)
        )
        set_optimizer_state_dict(
            other.reference,
            other.plain,
            copy.deepcopy(missing),
            options=StateDictOptions(full_state_dict=full, strict=False),
        )
        ours, expected = other.get()
        # With full_state_dict torch keeps what the optimizer has of it.
        assert ("2.weight" in ours["state"]) == full
        assert_listed(ours, expected)
        other.train(range(2, 4))


@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
def test_parameters_that_the_model_does_not_have_are_left_out(partition: str) -> None:
    pair = Pair(partition, model=lambda: nn.Sequential(*small_model(), nn.Linear(1, 1)))
    pair.train(range(2))
    for flat in (False, True):
        given = pair.get(flatten_optimizer_state_dict=flat)[1]
        other = Pair(partition)
        other.go_on_from(pair.values())
        other.set(copy.deepcopy(given), copy.deepcopy(given), flatten_optimizer_state_dict=flat)
        ours, theirs = other.get()
        assert "5.weight" not in ours["state"]
        assert_listed(ours, theirs)
        other.train(range(2, 4))


@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
def test_entries_that_do_not_fit_are_an_error_on_every_rank(partition: str) -> None:
    pair = Pair(partition)
    pair.train(range(2))
    whole = copy.deepcopy(pair.get()[1])
    for name in ("0.weight", "3.bias"):
        entries = whole["state"][name]
        for wrong, match in (
            ({key: value for key, value in entries.items() if key != "exp_avg"}, "missing entry 'exp_avg'"),
            ({**entries, "other": torch.ones(2)}, "extra entry 'other'"),
            ({**entries, "exp_avg": torch.ones(3, 3)}, r"entry 'exp_avg' has shape \(3, 3\)"),
        ):
            given = {**whole, "state": {**whole["state"], name: wrong}}
            with raises_on(ValueError, ranks=BOTH, match=rf"'{name}': {match}"):
                set_optimizer_state_dict(pair.model, pair.sharded, given)
    assert_listed(*pair.get())
    pair.train(range(2, 4))


@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
def test_parameters_that_are_unused_or_frozen_after_steps(rank: int, partition: str) -> None:
    def trained() -> Pair:
        pair = Pair(partition)
        pair.train(range(2), unused=(4, 7))
        for model in (pair.module, pair.reference):
            model[0].requires_grad_(False)
        return pair

    pair, other = trained(), trained()
    for flat in (False, True):
        assert_listed(*pair.get(flatten_optimizer_state_dict=flat))
    given = copy.deepcopy(pair.get())
    with raises_on(RuntimeError, ranks=BOTH, match=r"Missing optimizer state for parameter '2\.weight'"):
        set_optimizer_state_dict(other.model, other.sharded, given[0])
    other.set(*given, strict=False)
    assert_listed(*other.get())
    full = full_optimizer_state_dict(pair.model, pair.sharded[0])
    if rank == 0:
        assert full["state"].keys() == pair.get()[1]["state"].keys()
        assert_same(full, pair.get()[1])
    # While all of it is on one rank, every rank lists an empty state of what was never stepped, or strict would differ.
    found, theirs = copy.deepcopy(pair.get())
    assert found["state"].keys() == dict(pair.module.named_parameters()).keys()
    assert found["state"]["2.weight"] == {}
    set_optimizer_state_dict(pair.model, pair.sharded, found)
    set_optimizer_state_dict(pair.reference, pair.plain, theirs, options=StateDictOptions(strict=False))
    assert_listed(*pair.get())
    given = [full]
    dist.broadcast_object_list(given)
    for broadcast in (False, True):
        ours = copy.deepcopy(given[0]) if rank == 0 or not broadcast else {}
        other.set(ours, copy.deepcopy(given[0]), full_state_dict=True, broadcast_from_rank0=broadcast, strict=False)
        assert_listed(*other.get())
    other.train(range(2, 4), unused=(7,))


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize(
    "way",
    [
        "every rank",
        pytest.param("broadcast", marks=pytest.mark.xfail(strict=True, reason="torch gives them to rank 0 alone")),
    ],
)
def test_hyperparameters_that_a_scheduler_has_added(rank: int, way: str) -> None:
    pair = Pair("whole")
    for optimizer in (*pair.sharded, *pair.plain):
        optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.95**epoch)
    theirs = copy.deepcopy(pair.get()[1])
    other, is_broadcast = pair.another(), way == "broadcast"
    other.set(
        copy.deepcopy(theirs) if rank == 0 or not is_broadcast else {},
        theirs,
        full_state_dict=is_broadcast,
        broadcast_from_rank0=is_broadcast,
    )
    assert other.sharded[0].param_groups[0]["initial_lr"] == 0.001
    other.train(range(2))


# ---------------------------------------------------------------- state before the first step, and steps in backward


@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
def test_after_init_state_nothing_is_stepped(partition: str) -> None:
    pair, steps = Pair(partition), []
    pair.sharded[0].register_step_post_hook(lambda *_: steps.append("ours"))
    assert_listed(*pair.get())
    # Torch makes state by a step with learning rate 0, on every rank.
    assert steps == ["ours"]
    other = pair.another()
    other.sharded[0].register_step_post_hook(lambda *_: steps.append("other"))
    other.sharded[0].init_state()
    assert_listed(*other.get())
    set_optimizer_state_dict(other.model, other.sharded, pair.get()[0])
    assert steps == ["ours"]
    for each in (pair, other):
        assert_bitwise_equal(each.module, small_model(), "before the first step")
        each.train(range(2))


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("hook", HOOKS)
def test_optimizers_with_a_communication_hook(hook: str) -> None:
    twins = Twins(hook, partition="split")

    def get(**options: Any) -> list[Any]:
        return [get_optimizer_state_dict(*side, options=StateDictOptions(**options)) for side in twins.sides]

    # Torch makes state by a step without a backward, also if steps are made in backward.
    assert_listed(*get())
    for flat in (False, True):
        for seed in range(2):
            twins.iterate(seed)
        given = copy.deepcopy(get(flatten_optimizer_state_dict=flat))
        values = copy.deepcopy(twins.plain_ddp.state_dict())
        twins.iterate(2)
        for (ddp, optimizer), state_dict in zip(twins.sides, given, strict=True):
            ddp.load_state_dict(values)
            optimizer.zero_grad()
            set_optimizer_state_dict(ddp, optimizer, state_dict)
        assert_listed(*get())
        for seed in range(3, 5):
            twins.iterate(seed)
        twins.check("after the load")


# ---------------------------------------------------------------- handed to torch.distributed.checkpoint as they are


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("patched", [False, True], ids=["by index", "by name"])
def test_models_and_optimizers_are_saved_and_loaded_as_objects(patched: bool, ranks_tmp_path: Path) -> None:
    def objects(pair: Pair) -> dict[str, Any]:
        if patched:
            _patch_model_state_dict(pair.model)
            _patch_optimizer_state_dict(pair.model, optimizers=tuple(pair.sharded))
        pair.sharded[0].init_state()
        return {"model": pair.model, "optimizer": pair.sharded[0]}

    pair = Pair("split")
    pair.train(range(3))
    theirs = copy.deepcopy(pair.get()[1])
    dcp.save(objects(pair), checkpoint_id=ranks_tmp_path)
    values = pair.values()
    pair.train(range(3, 6))
    for partition in ("split", "whole"):
        other = Pair(partition)
        other.reference.load_state_dict(values)
        set_optimizer_state_dict(other.reference, other.plain, copy.deepcopy(theirs))
        found = objects(other)
        dcp.load({"model": found["model"]}, checkpoint_id=ranks_tmp_path)
        assert_bitwise_equal(other.module, other.reference, "after the model alone was loaded")
        dcp.load(found, checkpoint_id=ranks_tmp_path)
        assert_listed(*other.get())
        other.train(range(3, 6))
        assert_bitwise_equal(other.module, pair.reference, f"by {partition}")
