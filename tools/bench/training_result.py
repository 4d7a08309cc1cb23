"""What a run of the training benchmark found, as it is kept in JSON, and the figures that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
        kept: figures of contenders whose rounds were not kept, see :meth:`as_json`.
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
    kept: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

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
        ran = {entry.name: self.median(entry) for entry in self.entries if entry.name in TORCH_ZERO}
        return min((name for name, found in ran.items() if found), key=lambda name: ran[name] or 0.0, default=None)

    @property
    def disagreeing(self) -> list[str]:
        """Contenders that came to other parameters than the first one."""
        return [entry.name for entry in self.entries if not entry.agrees]

    def median(self, entry: Entry) -> float | None:
        """Return an entry's median time, in seconds; None where it has none."""
        return median(entry.seconds) if entry.seconds else self.kept.get(entry.name, {}).get("median_seconds")

    def ratio(self, entry: Entry, to: str | None) -> PairedTiming | None:
        """Return the ratio of an entry's times to another's, round by round; None where either has none.

        Where rounds were not kept, only ratios to DDP and to the better of torch's two modes are known.
        """
        times = self.times
        if to in times and entry.name in times:
            return compared(times, entry.name, to)
        kept = self.kept.get(entry.name, {}).get("to_ddp" if to == DDP else "to_torch_zero")
        return PairedTiming(**kept) if kept is not None and to is not None else None

    def as_json(self) -> dict[str, Any]:
        """Return everything as what JSON can hold, with the figures that follow from it."""
        found = {name: value for name, value in asdict(self).items() if name != "kept"}
        return {"program": "training", **found, "figures": {e.name: self._figures(e) for e in self.entries}}

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> Result:
        """Return the result that :meth:`as_json` gave.

        Raises:
            ValueError: if it is no such thing.
        """
        if found.get("program") != "training":
            raise ValueError("it was not written by tools/bench/training.py")
        fields = {name: value for name, value in found.items() if name not in ("program", "figures", "entries")}
        entries = [Entry(**entry) for entry in found["entries"]]
        kept = {entry.name: found["figures"][entry.name] for entry in entries if not entry.seconds}
        return cls(**fields, entries=entries, kept=kept)

    def _figures(self, entry: Entry) -> dict[str, object]:
        if not entry.seconds:
            return dict(self.kept.get(entry.name, {}))
        to_zero, to_ddp = (self.ratio(entry, name) for name in (self.torch_zero, DDP))
        return {
            "median_seconds": median(entry.seconds),
            "interval_seconds": median_interval(list(entry.seconds)),
            "torch_zero": self.torch_zero,
            "to_torch_zero": to_zero and asdict(to_zero),
            "to_ddp": to_ddp and asdict(to_ddp),
            "wire_per_all_reduce": entry.wire and mean(entry.wire) / self.all_reduce_bytes,
        }
