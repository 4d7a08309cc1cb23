"""Lets an optimizer class ask for one loss in a step: its closure is evaluated once, before the ranks agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import optim

from zeroshard._torch_private import version_of


def with_one_loss(inner: optim.Optimizer, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a step, with a closure that raises if evaluating it again would give another result."""
    if "closure" not in arguments:
        return dict(arguments)
    params = [param for group in inner.param_groups for param in group["params"]]
    before, evaluate = _versions(params), arguments["closure"]
    calls: list[str] = []

    def closure() -> Any:  # noqa: ANN401 - what the user's closure returns
        if calls or _versions(params) != before:
            when = "again in one step" if calls else "after it had changed parameters or gradients"
            raise RuntimeError(
                f"{type(inner).__name__} called its closure {when}. A sharded step evaluates the closure once, before "
                f"it begins, so a class that needs losses or gradients at other points (extragradient, SAM) cannot be "
                f"sharded. Use it unsharded; this step is incomplete: load a checkpoint before you go on"
            )
        calls.append("once")
        return evaluate()

    return {**arguments, "closure": closure}


def _versions(params: Sequence[torch.Tensor]) -> list[int]:
    """Return numbers that change if parameters or gradients are written to or replaced, but not through ``.data``."""
    grads = [param.grad for param in params]
    return [*map(version_of, params), *map(id, grads), *[version_of(grad) for grad in grads if grad is not None]]
