"""What every rank does: build the contenders, let them take turns, count what they send, compare where they come to."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from contenders import CONTENDERS, DDP, Trainer
from contest import Times, mean_processor_time, take_turns
from progress_bar import calls
from resident import Peaks, peaks_of
from workloads import Batch, tensors, workload

WARM_UP = 2
"""Untimed rounds after the first iteration, which shows whether a contender runs."""
_MEMORY_ITERATIONS, _START_ITERATIONS = 5, 2
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"

Report = dict[str, dict[str, object]]
"""Per contender, what is known of it; ``error`` alone where it does not run."""


def race(
    names: list[str],
    model: str,
    layers: int,
    rounds: int,
    in_a_row: int,
    counts_wire: bool,
    processor_time: bool = False,
) -> Report:
    """Let contenders train in turn. Collective.

    Args:
        names: of the contenders; the parameters of the others are compared with the first that runs.
        model: of the workload.
        layers: of the workload.
        rounds: timed turns of each.
        in_a_row: iterations in each turn, which is shown as their mean.
        counts_wire: whether the interface named in the environment is this rank's alone, so that its counter tells what
            each iteration sends.
        processor_time: whether ``seconds`` are of processor time, see :func:`contest.take_turns`.

    Returns:
        The same on all ranks: per contender ``seconds`` (per round), ``counted`` and ``wire`` (bytes sent by each rank
        in an iteration, None where nothing counts them) and ``difference``, or ``error``.
    """
    work = workload(model, layers)
    batches = work.batches(1 + (WARM_UP + rounds) * in_a_row, dist.get_rank(), dist.get_world_size())
    interface = os.environ[INTERFACE_VARIABLE] if counts_wire else None
    report: Report = {}
    turns: dict[str, _Turns] = {}
    with calls(model, len(names) * (1 + WARM_UP + rounds)) as advance:
        for name in names:
            trainer, error = _first_iteration(lambda name=name: CONTENDERS[name].build(work), batches[0])  # type: ignore[misc]
            if trainer is None:
                report[name] = {"error": error}
                for _ in range(WARM_UP + rounds):
                    advance()
            else:
                turns[name] = _Turns(trainer, batches[1:], in_a_row, interface)
            advance()
        times: Times = take_turns(
            turns, rounds, warm_up=WARM_UP, advance=_counting(turns, advance), processor_time=processor_time
        )
    reference = next(iter(turns.values()), None)
    for name, turn in turns.items():
        assert reference is not None
        counted, wire = (_of_all_ranks(sent[WARM_UP:]) for sent in (turn.counted, turn.wire))
        report[name] = {
            "seconds": [seconds / in_a_row for seconds in times[name]],
            "counted": counted,
            "wire": wire,
            "difference": _difference(turn.trainer, reference.trainer),
        }
    return report


def memory(name: str, model: str, layers: int) -> dict[str, object]:
    """Measure the memory of one contender, on ranks on which nothing else was built but a tiny model. Collective.

    Returns:
        ``peaks``, one dict for each rank, or ``error``.
    """
    work = workload(model, layers)
    error = None
    peaks = None
    try:
        # So that what the first iterations of a process import and set up counts for none.
        _train_tiny(name)
        peaks = peaks_of(
            lambda: CONTENDERS[name].build(work),
            Trainer.iterate,
            work.batches(_MEMORY_ITERATIONS, dist.get_rank(), dist.get_world_size()),
        )
    except Exception as caught:  # noqa: BLE001 - whatever it is, the others go on, and it is shown
        error = _first_line(caught)
    answers: list[tuple[Peaks | None, str | None]] = [(None, None)] * dist.get_world_size()
    dist.all_gather_object(answers, (peaks, error))
    errors = [text for _, text in answers if text is not None]
    return {"error": errors[0]} if errors else {"peaks": [found for found, _ in answers]}


def start(name: str, model: str, layers: int) -> float:
    """Measure what one contender's beginning takes, on ranks on which no optimizer was sharded. Collective.

    Returns:
        Processor time of construction and the first two iterations, in seconds, on the mean over the ranks, less that
        of the construction of model, DDP and Adam alone. What the first iterations of a process import is not in it.
    """
    work = workload(model, layers)
    batches = work.batches(_START_ITERATIONS, dist.get_rank(), dist.get_world_size())
    _train_tiny(DDP)
    alone = mean_processor_time(lambda: CONTENDERS[DDP].build(work))
    trainers = []

    def begin() -> None:
        trainers.append(CONTENDERS[name].build(work))
        for batch in batches:
            trainers[0].iterate(batch)

    return mean_processor_time(begin) - alone


def _train_tiny(name: str) -> None:
    trainer = CONTENDERS[name].build(tensors((1, 1)))
    for _ in range(2):
        trainer.iterate((torch.ones(1, 1),))


class _Turns:
    """The turns of one contender, some iterations for each call, and what each of them sent in the mean."""

    def __init__(self, trainer: Trainer, batches: list[Batch], in_a_row: int, interface: str | None) -> None:
        self.trainer = trainer
        self.counted: list[float] = []
        self.wire: list[float] = []
        self._in_a_row = in_a_row
        self._batches = iter(batches)
        self._counter = None if interface is None else Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
        self._before: tuple[int, int] | None = None

    def __call__(self) -> None:
        batches = list(itertools.islice(self._batches, self._in_a_row))
        self._before = self._counts()
        for batch in batches:
            self.trainer.iterate(batch)

    def count(self) -> None:
        """Note what the iteration that has just ended on all ranks sent, if it was this contender's."""
        if self._before is None:
            return
        counted, wire = self._counts()
        if self.trainer.traffic is not None:
            self.counted.append((counted - self._before[0]) / self._in_a_row)
        if self._counter is not None:
            self.wire.append((wire - self._before[1]) / self._in_a_row)
        self._before = None

    def _counts(self) -> tuple[int, int]:
        counted = 0 if self.trainer.traffic is None else self.trainer.traffic.total().bytes_sent
        return counted, 0 if self._counter is None else int(self._counter.read_text(encoding="ascii"))


def _counting(turns: dict[str, _Turns], advance: Callable[[], None]) -> Callable[[], None]:
    def counted() -> None:
        for turn in turns.values():
            turn.count()
        advance()

    return counted


def _first_iteration(build: Callable[[], Trainer], batch: Batch) -> tuple[Trainer | None, str | None]:
    """Build a contender and train on one batch; gives it on all ranks, or on none with what the first rank met."""
    trainer = None
    error = None
    try:
        trainer = build()
        trainer.iterate(batch)
    except Exception as caught:  # noqa: BLE001 - whatever it is, the others go on, and it is shown
        error = _first_line(caught)
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    found = next((text for text in errors if text is not None), None)
    if found is None:
        return trainer, None
    del trainer
    gc.collect()
    return None, found


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _of_all_ranks(sent: list[float]) -> list[float] | None:
    """Return the median of each rank's bytes."""
    everyones: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyones, sent)
    return [median(one) for one in everyones] if all(everyones) else None


def _difference(one: Trainer, reference: Trainer) -> float:
    """Return the L2 norm of the difference of all parameters, relative to the reference's norm; the largest rank's."""
    apart = torch.zeros((), dtype=torch.float64)
    norm = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for a, b in zip(one.model.parameters(), reference.model.parameters(), strict=True):
            # One parameter at a time, for a model may be large.
            left, right = _full(a).double(), _full(b).double()
            apart += (left - right).square().sum()
            norm += right.square().sum()
    relative = (apart / norm).sqrt()
    # A comparison with what is no number must not pass for a small one.
    relative = torch.where(relative.isfinite(), relative, torch.full_like(relative, torch.inf))
    dist.all_reduce(relative, op=dist.ReduceOp.MAX)
    return relative.item()


def _full(parameter: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
