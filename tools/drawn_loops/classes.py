"""Optimizer classes like those of users: sharding must see what they read, write and call, or refuse it."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import torch
from torch import nn, optim


class Special(nn.Parameter):
    """A type of parameters, as geoopt has."""


class Simple(optim.Optimizer):
    """Descends with momentum and weight decay; subclasses scale the rate of each tensor."""

    elementwise = True
    scale = staticmethod(lambda *_: 1.0)

    def __init__(self, params: Any, lr: float, ids: Set[int] = frozenset()) -> None:  # noqa: ANN401 - tensors or groups
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "momentum": 0.5})
        self.ids = ids

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 - a loss
        """Step all tensors that have a gradient."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    moved = self.state[param].setdefault("moved", torch.zeros_like(param))
                    moved.mul_(group["momentum"]).add_(param.grad).add_(param, alpha=group["weight_decay"])
                    param.add_(moved, alpha=-group["lr"] * self.scale(self, group, param))
        return loss


class Twice(Simple):
    """Evaluates its closure again after a step, as extragradient methods do."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 - a loss
        """Step twice."""
        super().step(closure)
        return super().step(closure)


class Counting(Simple):
    """Counts steps in its groups and skips empty ones, as apex and Transformer Engine do."""

    scale = staticmethod(lambda _, group, __: 1.0 / group["step"])

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 - a loss
        """Count, and step."""
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
        return super().step(closure)


def _clipped(params: list[torch.Tensor]) -> float:
    norms = [param.grad.norm() for param in params if param.grad is not None]
    return 1 / max(1.0, 10 * float(torch.stack(norms).norm()))


_SCALES: dict[str, Callable[[Any, dict[str, Any], Any], float]] = {
    # As in modded-nanogpt, in geoopt, and in bitsandbytes where a user overrides its settings.
    "ByAttribute": lambda _, __, param: getattr(param, "lr_mul", 1.0),
    "ByType": lambda _, __, param: 0.5 if isinstance(param, Special) else 1.0,
    "ById": lambda optimizer, _, param: 0.5 if id(param) in optimizer.ids else 1.0,
    # By the norm of each gradient, and of all, as detectron2's full-model clipping does.
    "ClipEach": lambda _, __, param: _clipped([param]),
    "ClipAll": lambda optimizer, _, __: _clipped(
        [each for group in optimizer.param_groups for each in group["params"]]
    ),
}
CLASSES: dict[str, type[Simple]] = {made.__name__: made for made in (Simple, Twice, Counting)}
CLASSES |= {
    name: type(name, (Simple,), {"scale": staticmethod(scale), "elementwise": not name.startswith("Clip")})
    for name, scale in _SCALES.items()
}
