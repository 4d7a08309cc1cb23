"""Compares what optimizers, partitions and numbers of ranks take, and says what fits and what to type."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import nn
from zeroshard_core import Plan, RankBytes

from zeroshard.byte_units import format_bytes
from zeroshard.plan.choices import MATRICES, REST, Choice, assign, optimizer_class, parse
from zeroshard.plan.predict import Planner
from zeroshard.planner.models import InputError, Model

DDP, FSDP2 = "DDP", "FSDP2"


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
    def peak(self) -> int:
        """The bytes that the rank that holds most holds at the highest."""
        return self.largest.total

    @property
    def is_arithmetic(self) -> bool:
        """True for an alternative, which is computed by the same arithmetic, but not run."""
        return self.plan is None and self.ranks != ()


def compare(planner: Planner, optimizers: str, count: int, partitions: Sequence[str], *, hook: bool) -> Iterator[Row]:
    """Predict for a number of ranks: DDP, torch's ZeRO and FSDP2 by arithmetic, and each partition.

    Partitions come with gradients in DDP, and then with sharded gradients.
    """
    plain = planner.plain
    yield Row(optimizers, DDP, count, (plain,) * count, (2 * plain.gradients * (count - 1) // count,) * count)
    if planner.is_plain:
        whole = planner.predict(count, "whole", reduces_to_owner=False)
        yield Row(optimizers, "torch ZeRO", count, whole.ranks, whole.sent)
    shared = {kind: -(-getattr(plain, kind) // count) for kind in ("parameters", "gradients", "state", "temporaries")}
    gathered = (2 * plain.parameters + plain.gradients) * (count - 1) // count
    yield Row(optimizers, FSDP2, count, (replace(plain, **shared),) * count, (gathered,) * count)
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
            raise ValueError("the model is a list of param groups: name one class, for groups without one of their own")
        else:
            groups = [{**group, "params": [made[param] for param in group["params"]]} for group in model.groups]
        planner = Planner(groups, classes[0], buffers=model.buffers, order=made.values(), **settings, **common)
        _ = planner.plain
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a class may raise any exception
        what = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        cure = f"; Muon takes matrices alone: -o 'Muon:{MATRICES}+AdamW:{REST}'" if "supports 2D" in str(error) else ""
        raise InputError(f"-o {optimizers!r}: {what}{' '.join(str(error).split())}{cure}") from None
    return planner


def by_peak(row: Row) -> tuple[float, int, bool]:
    """Sorts rows by their peak in four digits, as printed, then by the rule for partitions; refused rows come last."""
    order = (FSDP2, DDP, "split", "level", "whole", "torch ZeRO")
    return (float(f"{row.peak:.4g}") if row.ranks else float("inf")), order.index(row.partition), not row.sharded


def advised(rows: Sequence[Row], memory: int | None) -> Row:
    """Return the row with the least peak that fits into ``memory``, among partitions and DDP; FSDP2's if none fits."""
    own = [row for row in rows if row.ranks and (row.plan is not None or row.partition == DDP)]
    fitting = [row for row in own if memory is None or row.peak <= memory]
    return min(fitting, key=by_peak) if fitting else next(row for row in rows if row.partition == FSDP2)


def verdict(chosen: Row, rows: Sequence[Row], memory: int | None, written: str) -> str:
    """Say which rows of one number of ranks fit into ``memory`` (``written`` by a user), and what ``chosen`` leaves."""
    plain = next(row for row in rows if row.partition == DDP)
    ranks = "One rank" if chosen.count == 1 else f"{chosen.count} ranks"
    peak = format_bytes(chosen.peak)
    if memory is None:
        less = "" if chosen is plain else f", {1 - chosen.peak / plain.peak:.0%} less than DDP"
        fsdp2 = next(row for row in rows if row.partition == FSDP2)
        least = f"{chosen.name} has the least peak of zeroshard and DDP, {peak}{less}"
        return f"{ranks}: {least}. FSDP2 shards parameters too: {format_bytes(fsdp2.peak)}."
    ordered = sorted((row for row in rows if row.ranks), key=by_peak)
    fitting, other = ([row.name for row in ordered if (row.peak <= memory) is fits] for fits in (True, False))
    told = f"Nothing fits: {chosen.name} takes {peak}."
    if fitting:
        left = f"{chosen.name} leaves {format_bytes(memory - chosen.peak)} for activations"
        told = f"{left}. Fits: {', '.join(fitting)}." + f" Does not fit: {', '.join(other)}." * bool(other)
    return f"{ranks} of {written}: {told}"


def call_of(
    row: Row, memory: int | None, *, hook: bool, master_weights: bool, dtype: str | None, groups: str | None
) -> str:
    """Return the lines of a script that build what an advised row describes; ``groups`` is a call that makes them."""
    if row.partition == FSDP2:
        if memory is not None and (row.peak > memory or row.count == 1):
            return "Use more ranks, or a smaller dtype."
        return "None of these partitions fits. Use FSDP2, torch.distributed.fsdp.fully_shard()."
    if row.partition == DDP:
        alone, other = "on one rank there is nothing to shard", "none of these partitions takes less than DDP"
        return f"Use the plain optimizer: {alone if row.count == 1 else other}."
    choices = parse(row.optimizers)
    arguments: dict[str, Any] = {} if len(choices) > 1 else dict(choices[0].arguments)
    lines = [f"model = model.to(torch.{dtype})"] if dtype else []
    if groups is not None:
        lines += [f"groups = {groups}"]
    elif len(choices) > 1:
        known = {MATRICES: "what --show lists", REST: "all others"}
        names = [each.pattern if each.pattern in known else f"params_{index}" for index, each in enumerate(choices)]
        told = [known.get(each.pattern, f"what {each.pattern!r} matches, and nothing above") for each in choices]
        lines += [*(f"# {name}: {what}" for name, what in zip(names, told, strict=True)), "groups = ["]
        for name, choice in zip(names, choices, strict=True):
            own = "".join(f', "{key}": {value!r}' for key, value in choice.arguments)
            lines += [f'    {{"params": {name},', f'     "optimizer_class": {_class_of(choice)}{own}}},']
        lines += ["]"]
    arguments |= {"partition": row.partition, **({"master_weights": True} if master_weights else {})}
    params = "model.named_parameters()" if groups is None and len(choices) == 1 else "groups"
    lines += [f"optimizer = ZeroRedundancyOptimizer(\n    {params}, {_class_of(choices[-1])},"]
    lines += ["    " + ", ".join(f"{key}={value!r}" for key, value in arguments.items()) + ")"]
    if row.sharded:
        lines += ["sharding = shard_gradients(model, optimizer)  # in place of DDP"]
    elif hook:
        lines += ["register_reduce_to_owner(ddp, optimizer)  # a hook of DDP"]
    return "\n".join(lines)


def _class_of(choice: Choice) -> str:
    return choice.name if "." in choice.name else f"torch.optim.{choice.name}"
