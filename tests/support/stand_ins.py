"""Stand-ins for what others write: wrappers of frameworks, and schedule-free optimizers. All of it is our own.

Each has the one trait of theirs that is named in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import optim


class CopyingWrapper:
    """Stands in for Lightning's and Fabric's: has a subclass of the optimizer's class, and copies its ``__dict__``."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.__dict__ = {k: v for k, v in optimizer.__dict__.items() if k not in ("state_dict", "step")}
        self.__class__ = type("Copying" + type(optimizer).__name__, (type(self), type(optimizer)), {})


class DelegatingWrapper:
    """Stands in for those that take on the optimizer's class and look up in it what they lack."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.wrapped = optimizer
        self.__class__ = type("Delegating" + type(optimizer).__name__, (type(self), type(optimizer)), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["wrapped"], name)


class ForwardingWrapper(optim.Optimizer):
    """Stands in for Accelerate's: an Optimizer without a constructor of its own, which hands everything on."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["optimizer"], name)

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: Any) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> Any:
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def train(self) -> None:
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()

    def eval(self) -> None:
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()


WRAPPERS = (CopyingWrapper, DelegatingWrapper, ForwardingWrapper)


class ScheduleFree(optim.Optimizer):
    """Stands in for schedule-free SGD, written by us: parameters are y in training, an average in evaluation."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "train_mode": False, "steps": 0})

    def train(self) -> None:
        for group in self.entered(True):
            self.move(group, 1 - group["beta"])

    def eval(self) -> None:
        for group in self.entered(False):
            self.move(group, 1 - 1 / group["beta"])

    def entered(self, training: bool) -> Iterable[dict[str, Any]]:
        for group in self.param_groups:
            if group["train_mode"] != training:
                group["train_mode"] = training
                yield group

    def is_training(self) -> bool:
        return bool(self.param_groups[0]["train_mode"])

    @torch.no_grad()
    def move(self, group: dict[str, Any], weight: float) -> None:
        for param in group["params"]:
            if self.state[param]:
                param.lerp_(self.state[param]["z"], weight)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if not self.is_training():
            raise RuntimeError("not in training")
        for group in self.param_groups:
            group["steps"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    z = self.state[param].setdefault("z", param.clone())
                    param.lerp_(z, 1 / group["steps"])
                    param.add_(param.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["steps"]) - 1))
                    z.sub_(param.grad, alpha=group["lr"])


class Quantized(torch.Tensor):
    """A tensor that holds one byte for each element, and others that scale them."""

    codes: torch.Tensor
    scales: torch.Tensor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None


class QuantizedSGD(optim.SGD):
    """Stands in for those of torchao, whose state is in tensors of their own kind."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for param in [param for group in self.param_groups for param in group["params"]]:
            if param.grad is not None and not self.state[param]:
                exp_avg: Any = torch.zeros_like(param, requires_grad=False).as_subclass(Quantized)
                exp_avg.codes = torch.zeros_like(param, dtype=torch.uint8, requires_grad=False)
                exp_avg.scales = torch.ones(1 + param.numel() // 256, device=param.device)
                self.state[param]["exp_avg"] = exp_avg
