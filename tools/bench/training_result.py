"""What a run of the training benchmark found, as it is kept in JSON, and the figures that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from contest import Times, compared
from pairs import PairedTiming, median_interval

DDP = "ddp"
TORCH_ZERO = ("torch-zero", "torch-zero-views")
AGREEMENT = 1e-4


@dataclass(frozen=True)
class Entry:
    """What is known of one contender.

    Attributes:
        name: of the contender.
        what: in words.
        failure: why it has no times, None if it has.
        seconds: per round, the slowest rank's.
        counted: bytes per iteration that each rank's optimizer counted as sent, None where it does not count.
        wire: bytes per iteration that left each rank's interface, None where that is not known.
        difference: of its parameters from the first contender's, relative.
        peaks: memory of each rank, see :class:`resident.Peaks`; None where it was not measured.
        memory_failure: why memory could not be measured.
    """

    name: str
    what: str
    failure: str | None = None
    seconds: Sequence[float] = ()
    counted: Sequence[float] | None = None
    wire: Sequence[float] | None = None
    difference: float | None = None
    peaks: Sequence[dict[str, int]] | None = None
    memory_failure: str | None = None

    @property
    def agrees(self) -> bool:
        """Whether it came to the same parameters as the first; true for one that did not run."""
        return self.difference is None or self.difference < AGREEMENT


@dataclass(frozen=True)
class Result:
    """A run.

    Attributes:
        command: that made it.
        machine: see :func:`spawned.machine`.
        model: in words.
        batch: of each rank, in words.
        parameter_bytes: of the model.
        ranks: number of ranks.
        rounds: timed iterations of each contender.
        link: rate of every rank's interface; None for loopback.
        entries: one for each contender, in order.
    """

    command: str
    machine: dict[str, object]
    model: str
    batch: str
    parameter_bytes: int
    ranks: int
    rounds: int
    link: str | None
    entries: Sequence[Entry]

    @property
    def heading(self) -> str:
        """What was run, in few words."""
        network = "loopback" if self.link is None else f"links of {self.link}"
        return f"{self.model}, {self.ranks} ranks, {network}"

    @property
    def size(self) -> str:
        """How large it is."""
        return f"{self.parameter_bytes / 1e6:.1f} MB of parameters, {self.batch} per rank"

    @property
    def title(self) -> str:
        """What was run, in one line."""
        return f"{self.heading} ({self.size}), {self.rounds} rounds"

    @property
    def all_reduce_bytes(self) -> float:
        """What each rank sends in a ring all-reduce of all gradients."""
        return 2 * self.parameter_bytes * (self.ranks - 1) / self.ranks

    @property
    def times(self) -> Times:
        """Per contender that ran, its times."""
        return {entry.name: list(entry.seconds) for entry in self.entries if entry.seconds}

    @property
    def torch_zero(self) -> str | None:
        """The better of torch's two modes, by median; None if neither ran."""
        ran = [name for name in TORCH_ZERO if name in self.times]
        return min(ran, key=lambda name: median(self.times[name]), default=None)

    @property
    def disagreeing(self) -> list[str]:
        """Contenders that came to other parameters than the first one."""
        return [entry.name for entry in self.entries if not entry.agrees]

    def ratio(self, entry: Entry, to: str | None) -> PairedTiming | None:
        """Return the ratio of an entry's times to another's, round by round; None where either has none."""
        times = self.times
        return compared(times, entry.name, to) if to in times and entry.name in times else None

    def as_json(self) -> dict[str, Any]:
        """Return everything as what JSON can hold, with the figures that follow from it."""
        return {"program": "training", **asdict(self), "figures": {e.name: self._figures(e) for e in self.entries}}

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> Result:
        """Return the result that :meth:`as_json` gave.

        Raises:
            ValueError: if it is no such thing.
        """
        if found.get("program") != "training":
            raise ValueError("it was not written by tools/bench/training.py")
        fields = {name: value for name, value in found.items() if name not in ("program", "figures", "entries")}
        return cls(**fields, entries=[Entry(**entry) for entry in found["entries"]])

    def _figures(self, entry: Entry) -> dict[str, object]:
        if not entry.seconds:
            return {}
        to_zero, to_ddp = (self.ratio(entry, name) for name in (self.torch_zero, DDP))
        return {
            "median_seconds": median(entry.seconds),
            "interval_seconds": median_interval(list(entry.seconds)),
            "torch_zero": self.torch_zero,
            "to_torch_zero": to_zero and asdict(to_zero),
            "to_ddp": to_ddp and asdict(to_ddp),
            "wire_per_all_reduce": entry.wire and mean(entry.wire) / self.all_reduce_bytes,
        }
