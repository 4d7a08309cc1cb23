"""Which optimizers can be chosen, with which partition, and what they train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from byte_gpt import ByteGPT, Shape
from errors import InputError
from zeroshard import ELEMENTWISE
from zeroshard.plan import choices as syntax
from zeroshard.plan.choices import PARTITIONS, assign, matrix_names, parse

LEARNING_RATES: dict[object, float] = {torch.optim.Muon: 0.02}
"""Where the class's own default is not what it is used with."""

_REFUSED = {
    torch.optim.LBFGS: "cannot be sharded: its direction and line search couple all parameters",
    torch.optim.SparseAdam: "takes sparse gradients alone, and this model has none",
}


@dataclass(frozen=True)
class Group:
    """What one optimizer class trains.

    Attributes:
        optimizer_class: the class.
        arguments: for its constructor.
        params: names and parameters.
    """

    optimizer_class: type[torch.optim.Optimizer]
    arguments: dict[str, Any]
    params: list[tuple[str, torch.nn.Parameter]]


def groups_of(model: ByteGPT, text: str, lr: float | None = None) -> list[Group]:
    """Return the param groups of a model.

    Args:
        model: to be trained.
        text: one class or several, see :mod:`zeroshard.plan.choices`.
        lr: learning rate, for one class alone.

    Raises:
        InputError: naming what can be chosen instead.
    """
    params = dict(model.named_parameters())
    try:
        choices = parse(text)
        taken = assign(choices, list(params), matrix_names(model, head=model.bytes.weight))
    except ValueError as error:
        raise InputError(f"--optimizer {text!r}: {error}") from None
    found = []
    for choice, names in zip(choices, taken, strict=True):
        kind = optimizer_class(choice.name)
        arguments = {"lr": LEARNING_RATES[kind]} if kind in LEARNING_RATES else {}
        arguments |= dict(choice.arguments)
        if lr is not None:
            if len(choices) > 1 or "lr" in dict(choice.arguments):
                raise InputError(f"--lr is for one class without a rate of its own; write {choice.name}(lr={lr})")
            arguments["lr"] = lr
        found.append(Group(kind, arguments, [(name, params[name]) for name in names]))
    return found


def class_names(text: str) -> str:
    """Return the classes of choices, without arguments and patterns, as text for people.

    >>> class_names("Muon(lr=0.02):matrices+AdamW:rest")
    'Muon + AdamW'
    """
    return " + ".join(dict.fromkeys(choice.name.rpartition(".")[-1] for choice in parse(text)))


def assignment_of(groups: Sequence[Group]) -> list[int]:
    """Return for each group which local optimizer steps it: those equal in class and arguments share one."""
    kinds: list[tuple[object, dict[str, Any]]] = []
    for group in groups:
        if (kind := (group.optimizer_class, group.arguments)) not in kinds:
            kinds.append(kind)
    return [kinds.index((group.optimizer_class, group.arguments)) for group in groups]


def plain_optimizers(groups: Sequence[Group]) -> list[torch.optim.Optimizer]:
    """Return an unsharded optimizer for each number of :func:`assignment_of`."""
    assignment = assignment_of(groups)
    found = []
    for number in sorted(set(assignment)):
        own = [group for group, other in zip(groups, assignment, strict=True) if other == number]
        params = [{"params": [param for _, param in group.params]} for group in own]
        found.append(own[0].optimizer_class(params, **own[0].arguments))
    return found


def optimizer_names() -> list[str]:
    """Return the names of all classes of ``torch.optim`` that can be chosen."""
    found = vars(torch.optim).items()
    return sorted(name for name, value in found if _is_optimizer(value) and value not in _REFUSED)


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return a class of ``torch.optim``, or of another package by its full name.

    Raises:
        InputError: naming what can be chosen instead.
    """
    names = ", ".join(optimizer_names())
    try:
        found = syntax.optimizer_class(name)
    except ValueError as error:
        raise InputError(f"{error}; choose one of {names}") from None
    for refused, why in _REFUSED.items():
        if issubclass(found, refused):
            raise InputError(f"{name} {why}; choose one of {names}")
    return found


def check_optimizer(text: str, partition: str | None, lr: float | None = None) -> str:
    """Return the partition to use, which is ``"level"`` for several classes and else ``"whole"`` if None is given.

    Raises:
        InputError: if the optimizers cannot be chosen, or not with this partition, naming what can be.
    """
    with torch.device("meta"):
        groups = groups_of(ByteGPT(Shape(), seed=0), text, lr)
    try:
        plain_optimizers(groups)
    except Exception as error:  # noqa: BLE001 - whatever a constructor raises
        raise InputError(f"--optimizer {text!r}: {' '.join(str(error).split()) or type(error).__name__}") from None
    chosen = partition or ("level" if len(groups) > 1 else "whole")
    if chosen not in PARTITIONS:
        raise InputError(f"there is no partition {chosen!r}; choose one of {', '.join(PARTITIONS)}")
    for group in groups:
        name = group.optimizer_class.__name__
        if chosen == "split" and group.optimizer_class not in ELEMENTWISE:
            raise InputError(
                f"--partition {chosen} cuts tensors, but {name} may look at a whole tensor to update one element; "
                f"choose --partition {'level' if len(groups) > 1 else 'whole'}"
            )
    return chosen


def _is_optimizer(value: object) -> TypeGuard[type[torch.optim.Optimizer]]:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
