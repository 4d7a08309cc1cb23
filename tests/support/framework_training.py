"""A byte-level GPT that a framework trains on the standard library's sources, twice: sharded, and plainly."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.example_scripts import script
from support.tied_gpt import TiedGPT
from support.training import assert_bitwise_equal, assert_same_state
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_testing import assert_replicas_equal

STEPS = 10
SEQUENCES = 4
"""Of each rank's batch."""

SHAPE = {"context": 32, "width": 64, "layers": 2, "heads": 2}


def needs(package: str) -> pytest.MarkDecorator:
    """Return a mark that skips, by name and without importing it, the tests of a framework that is not installed."""
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"{package} is not installed; nox -s frameworks installs it")


two_ranks = pytest.mark.ranks(2, backend="gloo")

ROUNDING = 1e-12
"""In float64, another order of additions changes results by some 1e-16."""


def forget_accelerator() -> None:
    """Let the next Accelerator of this process be the first one."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@dataclass(frozen=True)
class Run:
    """What one training left: the model, and the loss of each step on this rank."""

    model: nn.Module
    losses: list[float]


def assert_equal_to_unsharded(train: Callable[[bool], Run], steps: int = STEPS, rounding: float = 0.0) -> None:
    """Train sharded and plainly, by ``train(is_sharded)``, and compare losses and parameters: bitwise by default."""
    ours, theirs = train(True), train(False)
    assert len(ours.losses) == steps
    if rounding:
        torch.testing.assert_close(ours.losses, theirs.losses, rtol=0, atol=rounding)
        torch.testing.assert_close(ours.model.state_dict(), theirs.model.state_dict(), rtol=0, atol=rounding)
    else:
        assert ours.losses == theirs.losses
        assert_bitwise_equal(ours.model, theirs.model, f"after {steps} steps")
    assert_replicas_equal(ours.model.parameters())


def assert_unreadable(path: Path) -> None:
    """Check that torch.save, which empties a file before it pickles, has left none that could pass for a checkpoint."""
    with pytest.raises(RuntimeError):
        torch.load(path)


def new_model() -> nn.Module:
    """The same weights on every rank and in every run."""
    return TiedGPT(**SHAPE)


def adamw(model: nn.Module, is_sharded: bool) -> optim.Optimizer:
    """AdamW over all parameters, with decay for the blocks alone: sharded, or torch's own."""
    blocks = [param for name, param in model.named_parameters() if "blocks" in name]
    others = [param for name, param in model.named_parameters() if "blocks" not in name]
    groups = [{"params": blocks, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return ZeroRedundancyOptimizer(groups, optim.AdamW, lr=3e-3) if is_sharded else optim.AdamW(groups, lr=3e-3)


MUON_ROUNDING = {"whole": 0.0, "level": 1e-12}
"""How far training with Muon may be from plain training, by partition. A norm adds up parts in another order."""


def muon_model(partition: str) -> nn.Module:
    """One whose embedding of positions ``"level"`` cuts; it is then in float64."""
    model = TiedGPT(**SHAPE | {"context": 1024})
    return model.double() if MUON_ROUNDING[partition] else model


def muon_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The param groups of the page about Muon; the head is tied to the embedding."""
    groups: list[dict[str, Any]] = script("muon").param_groups(model, model.get_submodule("bytes"))
    return groups


def assert_shared(optimizer: ZeroRedundancyOptimizer, partition: str) -> None:
    """Check that Muon and AdamW share the optimizer as the partition says."""
    assert [type(each) for each in optimizer.local_optimizers] == [optim.Muon, optim.AdamW]
    assert any(map(optimizer.plan.is_cut, range(len(optimizer.plan.tensors)))) == (partition == "level")


def assert_same_muon_state(ours: dict[str, Any], theirs: dict[str, Any], partition: str) -> None:
    """Compare what two optimizers have saved."""
    assert len(theirs["param_groups"]) == 2
    if not MUON_ROUNDING[partition]:
        return assert_same_state(ours, theirs)
    assert ours["param_groups"] == theirs["param_groups"]
    return torch.testing.assert_close(ours["state"], theirs["state"], rtol=0, atol=MUON_ROUNDING[partition])


class MuonAndAdamW(optim.Optimizer):
    """Two plain optimizers, for the first group and the others, that a framework holds as one."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        plain = [{key: value for key, value in group.items() if key != "optimizer_class"} for group in groups]
        self.both = optim.Muon(plain[:1]), optim.AdamW(plain[1:])
        super().__init__([group for each in self.both for group in each.param_groups], {"lr": math.nan})
        self._share()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for each in self.both:
            each.step()
        return loss

    def _share(self) -> None:
        for each, groups in zip(self.both, (self.param_groups[:1], self.param_groups[1:]), strict=True):
            each.param_groups, each.state = groups, self.state


def warmup(optimizer: optim.Optimizer) -> optim.lr_scheduler.LRScheduler:
    """A learning rate that grows at each step."""
    return optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / STEPS)


def call_our_methods(wrapper: Any) -> None:
    """Call on a framework's wrapper what it knows nothing of, and load the state that is there already."""
    ours = wrapper.optimizer
    assert isinstance(wrapper, ZeroRedundancyOptimizer)
    assert wrapper is not ours
    assert wrapper.plan is ours.plan
    wrapper.load_state_dict(ours.state_dict())
    wrapper.consolidate_state_dict(to=1)
    wrapper.clip_grad_norm_(float("inf"))
    wrapper.register_step_pre_hook(lambda *_: None).remove()


class Windows(script("small_gpt").Windows):
    """Windows of a text: as many as all ranks see in ten steps."""

    def __init__(self) -> None:
        super().__init__(STEPS * SEQUENCES * dist.get_world_size())
