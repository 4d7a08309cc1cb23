"""torch.distributed.checkpoint's functions that get and set state dicts, beside DDP and beside a plain model.

The behaviors are those that PyTorch's own tests of these functions ask of a plain optimizer.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.combinations import FLAG, PARTITIONS, each_of
from support.ddp_training import HOOKS, Twins
from support.listed_state import assert_listed
from support.state_dict_functions import Pair, one, unwrapped
from support.training import assert_bitwise_equal, small_model
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


@pytest.mark.ranks(2, backend="gloo")
@each_of("partition", ["whole", "split"], wrap=[DistributedDataParallel, unwrapped], flat=FLAG, cpu_offload=FLAG)
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


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("kind", [*ALL_KINDS, pytest.param("ddp of compiled", marks=pytest.mark.exhaustive)])
def test_state_of_all_kinds_of_models_and_optimizers_is_listed_and_set(kind: str) -> None:
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
def test_state_is_listed_and_set_under_a_communication_hook(hook: str) -> None:
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
