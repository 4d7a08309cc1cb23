"""Contenders train in turn: the time of an iteration or of a step, what each sends, and whether they agree."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from bench.contenders import CONTENDERS, Trainer
from bench.links import linked, sent_bytes
from bench.results import Row
from bench.spawned import on_ranks
from bench.turns import WARM_UP, mean_of_ranks, ratio, take_turns
from bench.workloads import MODELS, Batch, Workload

AGREEMENT = 1e-4
"""Contenders agree if the difference of their parameters, relative to their norm, is less."""


@dataclass(frozen=True)
class Race:
    """What is run: contenders by name, the workload and its layers, and how many turns of each are timed.

    Times are of the clock or of the processor. With ``only_step`` a turn is of ``step()`` alone, with the gradients of
    the first iteration.
    """

    names: list[str]
    model: str
    layers: int
    rounds: int
    processor_time: bool = False
    only_step: bool = False


def measure(race: Race, ranks: int, base: str, link: str | None = None) -> list[Row]:
    """Let contenders train in turn on fresh ranks, on a link if there is a rate, and return a row for each.

    Times are compared with those of ``base``, a contender or the first part of its name: then with those of the
    contender with this first part and the same partition.
    """
    with linked(ranks, link) if link else nullcontext(()) as namespaces:
        found = on_ranks(on_rank, ranks, race, namespaces=namespaces)
    return rows(found, base, 2 * MODELS[race.model](race.layers).parameter_bytes() * (ranks - 1) / ranks)


def rows(found: Mapping[str, Mapping[str, Any]], base: str, all_reduce_bytes: float) -> list[Row]:
    """Return a row for each contender, from what :func:`on_rank` returns and the bytes of a ring all-reduce."""
    made: list[Row] = []
    for name, one in found.items():
        if "error" in one:
            made.append({"contender": name, "error": one["error"]})
            continue
        other = base if base in CONTENDERS else f"{base}-{name.rpartition('-')[2]}"
        times, others = one["seconds"], found.get(other, {}).get("seconds")
        row: Row = {"contender": name, "ms": 1e3 * median(times), f"/ {base}": others and ratio(times, others)}
        row |= {"sent MB": one["counted"] and one["counted"] / 1e6, "link MB": one["wire"] and one["wire"] / 1e6}
        row |= {"/ ring": one["wire"] and one["wire"] / all_reduce_bytes, "apart": one["apart"]}
        made.append(row)
    return made


def disagreeing(made: Iterable[Row]) -> list[str]:
    """Return the contenders that came to other parameters than the first."""
    return [row["contender"] for row in made if not row.get("apart", 0.0) < AGREEMENT]


def on_rank(race: Race) -> dict[str, dict[str, Any]]:
    """Let contenders train in turn; returns the same on all ranks. Collective.

    Per contender it gives ``seconds`` of an iteration in each round; bytes that a rank sends in an iteration, by the
    optimizer's own count (``counted``) and the interface's (``wire``), None where nothing counts them; and ``apart``,
    the difference of its parameters from those of the first. One that does not run has only an ``error``.
    """
    work = MODELS[race.model](race.layers)
    batches = work.batches(1 + (WARM_UP + race.rounds + 1) * work.in_a_row, dist.get_rank())
    found: dict[str, dict[str, Any]] = {}
    trainers: dict[str, Trainer] = {}
    for name in race.names:
        trainer, error = first_iteration(name, work, batches[0])
        found[name] = {} if trainer else {"error": error}
        trainers |= {name: trainer} if trainer else {}
    turns = {name: _turn(trainer, batches[1:], work, race.only_step) for name, trainer in trainers.items()}
    times = mean_of_ranks(take_turns(turns, race.rounds, work.title, processor_time=race.processor_time))
    reference = next(iter(trainers.values()), None)
    for name, trainer in trainers.items():
        assert reference is not None
        counted, wire = _sent(turns[name], trainer)
        found[name] |= {"counted": counted and counted / work.in_a_row, "wire": wire and wire / work.in_a_row}
        found[name] |= {"seconds": [seconds / work.in_a_row for seconds in times[name]]}
        found[name] |= {"apart": _difference(trainer, reference)}
    return found


def first_iteration(name: str, work: Workload, batch: Batch) -> tuple[Trainer | None, str | None]:
    """Build a contender and train on one batch; gives it on all ranks, or on none with what the first rank met."""
    trainer = error = None
    try:
        trainer = CONTENDERS[name](work)
        trainer.iterate(batch)
    except Exception as caught:  # noqa: BLE001 - whatever it is, the others go on, and it is shown
        error = f"{type(caught).__name__}: {' '.join(str(caught).splitlines()[:1])}"
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    found = next((text for text in errors if text is not None), None)
    if found is not None:
        trainer = None
        gc.collect()
    return trainer, found


def _turn(trainer: Trainer, batches: list[Batch], work: Workload, only_step: bool) -> Callable[[], None]:
    remaining = iter(batches)

    def turn() -> None:
        for batch in islice(remaining, work.in_a_row):
            trainer.step() if only_step else trainer.iterate(batch)

    return turn


def _sent(turn: Callable[[], None], trainer: Trainer) -> tuple[float | None, float | None]:
    """Return what a rank sends in one more turn, on the mean over the ranks."""

    def counts() -> torch.Tensor:
        dist.barrier()
        counted = math.nan if trainer.traffic is None else trainer.traffic.total().bytes_sent
        return torch.tensor([counted, sent_bytes()], dtype=torch.float64)

    before = counts()
    turn()
    sent = counts() - before
    dist.all_reduce(sent)
    counted, wire = (None if math.isnan(each) else each / dist.get_world_size() for each in sent.tolist())
    return counted, wire


def _difference(one: Trainer, reference: Trainer) -> float:
    """Return the L2 norm of the difference of all parameters, relative to the reference's norm; the largest rank's."""
    from torch.distributed.tensor import DTensor

    apart, norm = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for pair in zip(one.model.parameters(), reference.model.parameters(), strict=True):
            # One parameter at a time, since a model may be large.
            a, b = (each.full_tensor().double() if isinstance(each, DTensor) else each.double() for each in pair)
            apart += (a - b).square().sum()
            norm += b.square().sum()
    # A comparison with what is no number must not pass for a small one.
    relative = (apart / norm).sqrt().nan_to_num(nan=torch.inf)
    dist.all_reduce(relative, op=dist.ReduceOp.MAX)
    return float(relative)
