"""What PyTorch's own tests ask of optimizers' state dicts, asked of ours on two ranks, beside the plain optimizer."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.training import DENSE_OPTIMIZERS, assert_bitwise_equal, assert_same_state, set_gradients, small_model
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer

Make = Callable[..., optim.Optimizer]
RANKS = pytest.mark.ranks(2, backend="gloo")


def both(name: str = "AdamW", **more: Any) -> list[tuple[nn.Module, optim.Optimizer]]:
    """A model and its sharded optimizer, and the same with the plain one."""
    kind, settings = DENSE_OPTIMIZERS[name]
    settings = {**settings, **more}
    model, reference = small_model(), small_model()
    return [
        (model, ZeroRedundancyOptimizer(model.named_parameters(), kind, **settings)),
        (reference, kind(reference.named_parameters(), **settings)),
    ]


def step(trained: list[tuple[nn.Module, optim.Optimizer]], *seeds: int) -> None:
    for seed in seeds:
        for model, optimizer in trained:
            set_gradients(model.parameters(), seed)
            optimizer.step()


def whole(optimizer: optim.Optimizer) -> dict[str, Any]:
    """The whole state dict, on every rank."""
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return copy.deepcopy(optimizer.state_dict())
    optimizer.consolidate_state_dict(to=0)
    box = [optimizer.state_dict() if optimizer.rank == 0 else None]
    dist.broadcast_object_list(box)
    assert box[0] is not None
    return box[0]


def check_equal(trained: list[tuple[nn.Module, optim.Optimizer]]) -> None:
    (model, ours), (reference, plain) = trained
    assert_bitwise_equal(model, reference, "parameters")
    assert_same_state(whole(ours), plain.state_dict())


@RANKS
@pytest.mark.parametrize("name", [name for name in DENSE_OPTIMIZERS if name != "Adafactor"])
def test_a_state_dict_of_an_older_release_is_loaded(name: str) -> None:
    """Hyperparameters that came later are missing, and steps may be plain numbers: classes fill them in."""
    trained = both(name)
    step(trained, 1)
    for _, optimizer in trained:
        saved = whole(optimizer)
        for group in saved["param_groups"]:
            for key in ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"):
                group.pop(key, None)
        for entries in saved["state"].values():
            if "step" in entries:
                entries["step"] = float(entries["step"])
        optimizer.load_state_dict(saved)
    step(trained, 2)
    check_equal(trained)


@RANKS
def test_hooks_around_state_dict_may_change_it() -> None:
    results = []
    for _, optimizer in both():
        optimizer.register_state_dict_pre_hook(lambda opt: opt.state.__setitem__("test", 1))

        def after(opt: optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            had = state_dict["state"].pop("test", None)
            return {**state_dict, "had": had}

        first = optimizer.state_dict()["state"]["test"]
        optimizer.register_state_dict_post_hook(after)
        results.append((first, optimizer.state_dict()["had"], sorted(map(str, optimizer.state_dict()["state"]))))
    assert results[0] == results[1]
    assert results[0][:2] == (1, 1)


@RANKS
def test_hooks_around_load_state_dict_are_called_in_their_order() -> None:
    heard: list[list[str]] = []
    for _, optimizer in both():
        mine: list[str] = []
        heard.append(mine)
        changed = optimizer.register_load_state_dict_pre_hook(lambda opt, sd, mine=mine: mine.append("second"))
        optimizer.register_load_state_dict_pre_hook(lambda opt, sd, mine=mine: mine.append("first"), prepend=True)

        def other_rate(opt: optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            groups = [{**group, "lr": 0.003} for group in state_dict["param_groups"]]
            return {**state_dict, "param_groups": groups}

        optimizer.register_load_state_dict_pre_hook(other_rate)
        optimizer.register_load_state_dict_post_hook(
            lambda opt, mine=mine: mine.append(f"after, {opt.param_groups[0]['lr']}")
        )
        optimizer.load_state_dict(optimizer.state_dict())
        changed.remove()
        optimizer.load_state_dict(optimizer.state_dict())
    assert heard[0] == heard[1] == ["first", "second", "after, 0.003", "first", "after, 0.003"]


@RANKS
def test_an_optimizer_cannot_be_copied_and_its_state_can_be_saved() -> None:
    trained = both()
    step(trained, 1)
    (_, ours), (_, plain) = trained
    for act in (copy.deepcopy, copy.copy, pickle.dumps, lambda opt: torch.save(opt, io.BytesIO())):
        with pytest.raises(TypeError, match="cannot be pickled or deep-copied"):
            act(ours)
    file = io.BytesIO()
    torch.save(whole(ours), file)
    file.seek(0)
    plain.load_state_dict(torch.load(file, weights_only=True))
    step(trained, 2)
    check_equal(trained)


@RANKS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_state_is_cast_to_the_parameters(dtype: torch.dtype) -> None:
    trained = both()
    step(trained, 1)
    saved = whole(trained[1][1])
    for entries in saved["state"].values():
        entries.update({key: value.to(dtype) for key, value in entries.items() if key != "step"})
    for _, optimizer in trained:
        optimizer.load_state_dict(copy.deepcopy(saved))
    assert all(entries["exp_avg"].dtype is torch.float32 for entries in trained[0][1].state.values())
    step(trained, 2)
    check_equal(trained)


@RANKS
def test_names_of_an_added_group_are_saved_and_may_be_missing() -> None:
    trained = both()
    for model, optimizer in trained:
        model.extra = nn.Linear(3, 3)
        with torch.no_grad():
            model.extra.weight.fill_(1.0), model.extra.bias.fill_(1.0)
        named = [("extra.weight", model.extra.weight), ("extra.bias", model.extra.bias)]
        optimizer.add_param_group({"params": named, "lr": 0.5})
    step(trained, 1)
    states = [whole(optimizer) for _, optimizer in trained]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert states[0]["param_groups"][1]["param_names"] == ["extra.weight", "extra.bias"]
    for (_, optimizer), state in zip(trained, states, strict=True):
        for group in state["param_groups"]:
            del group["param_names"]
        optimizer.load_state_dict(state)
        for wrong in ({**state, "param_groups": state["param_groups"][:1]}, {"state": {}, "param_groups": []}):
            with pytest.raises(ValueError, match="different number of parameter groups"):
                optimizer.load_state_dict(wrong)
    step(trained, 2)
    for (model, _), (reference, _) in [trained]:
        assert_bitwise_equal(model, reference, "parameters")
