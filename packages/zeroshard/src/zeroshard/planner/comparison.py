"""Compares what optimizers, partitions and numbers of ranks take, and gives a sentence of advice."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import nn
from zeroshard_core import Plan, RankBytes

from zeroshard.plan.choices import REST, assign, optimizer_class, parse
from zeroshard.plan.predict import Planner
from zeroshard.planner.models import InputError, Model


@dataclass(frozen=True)
class Row:
    """One line of the comparison: what each rank holds, and the bytes that it sends in an iteration.

    An alternative to partitions (DDP, torch's ZeRO, FSDP2) has no plan. A partition that is refused has a note that
    says why, and neither a plan nor ranks. ``sharded`` says that gradients are sharded, as by ``shard_gradients()``.
    """

    optimizers: str
    partition: str
    count: int
    ranks: tuple[RankBytes, ...] = ()
    sent: tuple[int, ...] = ()
    plan: Plan | None = None
    note: str = ""
    sharded: bool = False

    @property
    def name(self) -> str:
        """The name of the row."""
        return f"{self.partition}+grads" if self.sharded else self.partition

    @property
    def largest(self) -> RankBytes:
        """The bytes of the rank that holds most."""
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def is_arithmetic(self) -> bool:
        """True for an alternative, which is computed by the same arithmetic, but not run."""
        return self.plan is None and self.ranks != ()


def compare(planner: Planner, optimizers: str, count: int, partitions: Sequence[str], *, hook: bool) -> Iterator[Row]:
    """Predict for a number of ranks: DDP, torch's ZeRO and FSDP2 by arithmetic, and each partition.

    Partitions come with gradients in DDP, and then with sharded gradients.
    """
    plain = planner.plain
    yield Row(optimizers, "DDP", count, (plain,) * count, (2 * plain.gradients * (count - 1) // count,) * count)
    if planner.is_plain:
        whole = planner.predict(count, "whole", reduces_to_owner=False)
        yield Row(optimizers, "torch ZeRO", count, whole.ranks, whole.sent)
    shared = {kind: -(-getattr(plain, kind) // count) for kind in ("parameters", "gradients", "state", "temporaries")}
    gathered = (2 * plain.parameters + plain.gradients) * (count - 1) // count
    yield Row(optimizers, "FSDP2", count, (replace(plain, **shared),) * count, (gathered,) * count)
    for sharded, partition in product((False, True), partitions):
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = planner.predict(count, partition, reduces_to_owner=hook, shards_gradients=sharded)
        except ValueError as error:
            if planner.is_elementwise or partition != "split":
                raise
            if not sharded:
                yield Row(optimizers, partition, count, note=str(error))
        else:
            note = "; ".join(str(each.message) for each in caught)
            yield Row(optimizers, partition, count, found.ranks, found.sent, planner.weighed(found.plan), note, sharded)


def planner_of(model: Model, optimizers: str, *, dtype: str | None, grad_dtype: str | None, **settings: Any) -> Planner:  # noqa: ANN401 - the planner's
    """Return the planner of a model, in ``dtype`` if it is not None, and optimizers; InputError if they do not fit."""
    given = getattr(torch, dtype) if dtype else None
    settings["grad_dtype"] = getattr(torch, grad_dtype) if grad_dtype else None
    try:
        made = {
            p: nn.Parameter(p.detach().to("meta", given if p.is_floating_point() else None), p.requires_grad)
            for p in model.params.values()
        }
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
        _ = planner.plain
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a class may raise any exception
        what = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise InputError(f"-o {optimizers!r}: {what}{' '.join(str(error).split())}") from None
    return planner


def advise(planner: Planner, rows: Sequence[Row], memory: int | None) -> str:
    """Return the advice of the first rule that applies for the largest number of ranks in the rows of a planner."""
    count = max(row.count for row in rows)
    planned = [row for row in rows if row.count == count and row.plan is not None]
    least, sharded = (
        min((row.largest.total for row in planned if row.sharded is flag), default=0) for flag in (False, True)
    )
    of_rules = rules(planner.plain, least, sharded, count, memory, elementwise=planner.is_elementwise)
    return f"On {count} ranks: " * (count > 1) + next(text for applies, text in of_rules if applies)


def rules(
    plain: RankBytes, least: int, sharded: int, count: int, memory: int | None, *, elementwise: bool
) -> list[tuple[bool, str]]:
    """Return each advice and whether it applies, in order.

    The best partition takes ``least`` bytes if gradients stay in DDP, and ``sharded`` bytes if they are sharded.
    """
    small = plain.state < 0.05 * (plain.parameters + plain.gradients + plain.state)
    too_much = memory is not None and plain.parameters + plain.gradients > memory and sharded > memory
    needs_sharding = memory is not None and sharded <= memory < min(least, plain.total)
    return [
        (count == 1, "Use the plain optimizer: on one rank there is nothing to shard."),
        (too_much, "No partition helps: each rank keeps all parameters. Use FSDP2."),
        (needs_sharding, "Use shard_gradients() in place of DDP: nothing else fits."),
        (small, "Use plain DDP: the optimizer state is less than 5% of parameters, gradients and state."),
        (least >= plain.total, "Use plain DDP: no partition of these takes less memory."),
        (not elementwise, "Use partition='level': what may be cut fills up the ranks, other tensors stay whole."),
        (True, "Use partition='split': it divides the state evenly."),
    ]
