"""What the rank tests train: small models, replicated gradients, and the unsharded optimizer as the reference."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

# First steps and DistributedDataParallel import it: seconds, in a fresh process, of which some groups have few.
import torch._dynamo.compiled_autograd
from torch import nn, optim
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_core import Strategy, split
from zeroshard_testing import assert_replicas_equal

EVERYWHERE = ["gloo", "emulated"]
"""Backends of tests that run on the CPU and, with the fixture ``tensors_on_the_device``, on the emulated device."""

# Every class of torch.optim that can be sharded and takes dense gradients, with settings that use all of its state.
DENSE_OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "ASGD": (optim.ASGD, {"t0": 2, "weight_decay": 0.01}),
    "Adadelta": (optim.Adadelta, {"weight_decay": 0.01}),
    "Adafactor": (optim.Adafactor, {"weight_decay": 0.01}),
    "Adagrad": (optim.Adagrad, {"lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    "Adam": (optim.Adam, {"weight_decay": 0.01}),
    "Adam-amsgrad": (optim.Adam, {"amsgrad": True}),
    "AdamW": (optim.AdamW, {}),
    "AdamW-foreach": (optim.AdamW, {"foreach": True}),
    "AdamW-fused": (optim.AdamW, {"fused": True}),
    "Adamax": (optim.Adamax, {"weight_decay": 0.01}),
    "NAdam": (optim.NAdam, {"weight_decay": 0.01}),
    "RAdam": (optim.RAdam, {"weight_decay": 0.01}),
    "RMSprop": (optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "Rprop": (optim.Rprop, {}),
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD-momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
}
ELEMENTWISE_OPTIMIZERS = {name: item for name, item in DENSE_OPTIMIZERS.items() if name != "Adafactor"}


def consolidate_torchs(optimizer: TorchZero, to: int) -> None:
    """Consolidate the state of torch's class, and wait, since it does not: on a device it copies to pinned memory."""
    optimizer.consolidate_state_dict(to=to)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def cutting(partition: str) -> str | Strategy:
    """Return the strategy of this name, made to cut small models too, of which it would leave every tensor whole."""
    return functools.partial(split, smallest_part=64) if partition == "split" else partition


def small_model() -> nn.Sequential:
    """Tensors of many sizes, some larger than one rank's share, some of one element; the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(40, 64), nn.LayerNorm(64), nn.Linear(64, 300), nn.Linear(300, 7), nn.Linear(7, 1, bias=False)
    )


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 8, 3))


def set_gradients(params: Iterable[torch.Tensor], seed: int, *, none: Collection[int] = ()) -> None:
    """Give every trainable parameter the gradient that belongs to ``seed``, and those at positions in ``none`` none."""
    generator = torch.Generator().manual_seed(seed)
    for position, param in enumerate(params):
        values = torch.randn(param.shape, generator=generator, device="cpu").to(param.dtype)
        param.grad = None
        if param.requires_grad and position not in none:
            # preserve_format: as autograd would lay it out
            param.grad = torch.empty_like(param).copy_(values)


def twins(make: Callable[[], nn.Module] = small_model) -> tuple[nn.Module, nn.Module]:
    """Two equal models: one for the sharded optimizer, one for the reference."""
    model = make()
    return model, copy.deepcopy(model)


def twin_optimizers(
    pair: tuple[nn.Module, nn.Module],
    optimizer_class: Callable[..., optim.Optimizer],
    partition: str = "whole",
    as_bucket_view: bool = False,
    **settings: Any,
) -> tuple[ZeroRedundancyOptimizer, optim.Optimizer]:
    """Return a sharded optimizer of the first model, and the plain one of the other."""
    how = {"partition": cutting(partition), "parameters_as_bucket_view": as_bucket_view}
    sharded = ZeroRedundancyOptimizer(pair[0].parameters(), optimizer_class, **how, **settings)
    return sharded, optimizer_class(pair[1].parameters(), **settings)


def train(model: nn.Module, optimizer: optim.Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        set_gradients(model.parameters(), step)
        optimizer.step()


def train_all(trained: Iterable[tuple[nn.Module, optim.Optimizer]], steps: Iterable[int]) -> None:
    pairs = list(trained)
    for step in steps:
        for module, optimizer in pairs:
            train(module, optimizer, [step])


def train_equally(
    pair: tuple[nn.Module, nn.Module],
    optimizers: tuple[optim.Optimizer, optim.Optimizer],
    steps: Iterable[int],
    before_step: Callable[[nn.Module], object] = lambda module: None,
) -> None:
    """Step both models with the same gradients, the first by a sharded optimizer, and compare them after each step."""
    for step in steps:
        for module, optimizer in zip(pair, optimizers, strict=True):
            set_gradients(module.parameters(), step)
            before_step(module)
            optimizer.step()
        assert_bitwise_equal(*pair, f"after step {step}")
        assert_replicas_equal(pair[0].parameters())


def two_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Named parameters in two groups: matrices, and the rest with hyperparameters of their own."""
    named = list(module.named_parameters())
    return [
        {"params": [item for item in named if item[1].dim() > 1], "weight_decay": 0.1},
        {"params": [item for item in named if item[1].dim() <= 1], "lr": 0.02, "betas": (0.8, 0.9)},
    ]


def assert_bitwise_equal(actual: nn.Module, expected: nn.Module, when: str) -> None:
    """Compare all parameters bitwise, NaN equal to NaN, naming the first that differs."""
    for (name, ours), (_, theirs) in zip(actual.named_parameters(), expected.named_parameters(), strict=True):
        same = torch.equal(
            ours.detach().contiguous().view(-1).view(torch.uint8),
            theirs.detach().contiguous().view(-1).view(torch.uint8),
        )
        assert same, f"{name} differs from the unsharded run by {(ours - theirs).abs().max():.3g} {when}"


def assert_same_state(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare two optimizer state_dicts bitwise: the same keys, shapes, dtypes and values."""
    assert actual["param_groups"] == expected["param_groups"]
    assert actual["state"].keys() == expected["state"].keys()
    for index, entries in expected["state"].items():
        assert actual["state"][index].keys() == entries.keys()
        for key, value in entries.items():
            ours = actual["state"][index][key]
            if isinstance(value, torch.Tensor):
                assert (ours.shape, ours.dtype) == (value.shape, value.dtype), (index, key)
                assert torch.equal(ours.cpu(), value.cpu()), (index, key)
            else:
                assert ours == value, (index, key)
