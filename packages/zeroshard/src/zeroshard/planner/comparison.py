"""What is compared: optimizers, partitions and numbers of ranks, with what each takes; and a sentence of advice."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from zeroshard_core import Plan, RankBytes

from zeroshard.plan.choices import REST, assign, optimizer_class, parse
from zeroshard.plan.predict import Planner
from zeroshard.planner.models import InputError, Model

PARTITIONS = ("whole", "split", "hybrid", "level")
SMALL_STATE = 0.05


@dataclass(frozen=True)
class Row:
    """One line of the comparison.

    Attributes:
        optimizers: as given.
        partition: its name; or what else could be used, by the same arithmetic: DDP, torch's ZeRO, FSDP2.
        count: number of ranks.
        ranks: what each rank holds; empty if it is refused.
        sent: bytes that each rank sends in an iteration.
        plan: who owns what; None for the others.
        note: why it is refused, or what else to know.
    """

    optimizers: str
    partition: str
    count: int
    ranks: tuple[RankBytes, ...] = ()
    sent: tuple[int, ...] = ()
    plan: Plan | None = None
    note: str = ""

    @property
    def largest(self) -> RankBytes:
        """What the rank holds that holds most."""
        return max(self.ranks, key=lambda rank: rank.total)


def compare(planner: Planner, optimizers: str, count: int, partitions: Sequence[str], *, hook: bool) -> Iterator[Row]:
    """Predict for a number of ranks: DDP, torch's ZeRO and FSDP2 by arithmetic, and each partition."""
    plain, whole = planner.predict(1).ranks[0], planner.predict(count, "whole", reduces_to_owner=False)
    yield Row(optimizers, "DDP", count, (plain,) * count, whole.sent_in_backward)
    if planner.is_plain:
        yield Row(optimizers, "torch ZeRO", count, tuple(replace(rank, staging=0) for rank in whole.ranks), whole.sent)
    kinds = ("parameters", "gradients", "state", "temporaries")
    shared = {kind: -(-getattr(plain, kind) // count) for kind in kinds}
    gathered = (2 * plain.parameters + plain.gradients) * (count - 1) // count
    yield Row(optimizers, "FSDP2", count, (replace(plain, **shared),) * count, (gathered,) * count)
    for partition in partitions:
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = planner.predict(count, partition, reduces_to_owner=hook)
        except ValueError as error:
            if planner.is_elementwise or partition not in ("split", "hybrid"):
                raise
            yield Row(optimizers, partition, count, note=str(error))
        else:
            note = "; ".join(str(each.message) for each in caught)
            yield Row(optimizers, partition, count, found.ranks, found.sent, found.plan, note)


def planner_of(model: Model, optimizers: str, dtype: torch.dtype | None, **settings: Any) -> Planner:  # noqa: ANN401
    """Return what predicts for a model in a dtype, if one is given, and optimizers; InputError if they do not go."""
    try:
        made = {param: _converted(param, dtype) for param in model.params.values()}
        choices = parse(optimizers)
        classes, common = [optimizer_class(choice.name) for choice in choices], dict(choices[0].arguments)
        if model.groups is None:
            taken = assign(choices, list(model.params), model.matrices)
            groups = [
                {
                    "params": [(name, made[model.params[name]]) for name in names],
                    "optimizer_class": cls,
                    "optimizer_defaults": dict(choice.arguments),
                }
                for cls, names, choice in zip(classes, taken, choices, strict=True)
            ]
            common = {}
        elif len(choices) > 1 or choices[0].pattern != REST:
            raise ValueError("param groups have their own classes; name one class, which the others get")
        else:
            groups = [{**group, "params": [made[param] for param in group["params"]]} for group in model.groups]
        planner = Planner(groups, classes[0], buffers=model.buffers, order=made.values(), **settings, **common)
        planner.predict(1)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a class raises
        what = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise InputError(f"-o {optimizers!r}: {what}{' '.join(str(error).split())}") from None
    return planner


def _converted(param: nn.Parameter, dtype: torch.dtype | None) -> nn.Parameter:
    kept = dtype is None or not param.dtype.is_floating_point
    made = torch.empty(param.shape, dtype=param.dtype if kept else dtype, device="meta")
    return nn.Parameter(made, requires_grad=param.requires_grad)


@dataclass(frozen=True)
class Case:
    """What advice depends on.

    Attributes:
        plain: what a rank of DDP holds.
        least: bytes on the rank that holds most, by the best partition.
        count: number of ranks.
        is_elementwise: whether all tensors may be cut.
        memory: of a device, in bytes; None if not given.
    """

    plain: RankBytes
    least: int
    count: int
    is_elementwise: bool
    memory: int | None = None

    @property
    def state_share(self) -> float:
        """The state's share of parameters, gradients and state."""
        return self.plain.state / (self.plain.parameters + self.plain.gradients + self.plain.state)


RULES: tuple[tuple[Callable[[Case], bool], str], ...] = (
    (lambda case: case.count == 1, "Use the plain optimizer: on one rank there is nothing to shard."),
    (
        lambda case: case.memory is not None and case.least > case.memory,
        "No ZeRO-1 partition helps: each rank keeps all parameters and gradients, and exceeds the memory. Use FSDP2.",
    ),
    (
        lambda case: case.state_share < SMALL_STATE,
        f"Use plain DDP: the optimizer state is less than {SMALL_STATE:.0%} of parameters, gradients and state.",
    ),
    (
        lambda case: not case.is_elementwise,
        "Use partition='level': tensors of a class that is not elementwise stay whole, others fill up the ranks.",
    ),
    (lambda _: True, "Use partition='split': it divides the state evenly."),
)
"""Conditions, in order, and what is advised where they hold."""


def advise(planner: Planner, rows: Sequence[Row], memory: int | None) -> str:
    """Return the advice of the first rule that applies for the largest number of ranks in the rows of a planner."""
    count = max(row.count for row in rows)
    least = min((row.largest.total for row in rows if row.count == count and row.plan is not None), default=0)
    case = Case(planner.predict(1).ranks[0], least, count, planner.is_elementwise, memory)
    return f"On {count} ranks: " * (count > 1) + first_advice(case)


def first_advice(case: Case) -> str:
    """Return the advice of the first rule that applies."""
    return next(text for applies, text in RULES if applies(case))
