"""Derives the error that every rank raises after a difference, from the reports of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Explain = Callable[[str, str, int, int], "str | None"]
"""From two ranks' details, and the two ranks, to a text that names the first difference; None if it finds none."""

OWN = "own"
"""In place of the name of an error: every rank has the same one, and raises its own."""


@dataclass(frozen=True, slots=True)
class Reason:
    """A rank's report after a difference: its operation, its position, and its details."""

    rank: int
    operation: str
    position: str
    digest: int | None
    detail: str
    error_type: str = ""
    error: str = ""

    @property
    def call(self) -> str:
        """The operation and the position."""
        return f"{self.operation} {self.position}".rstrip()


def verdict(reasons: Sequence[Reason], explain: Explain | None) -> tuple[str, str]:
    """The one error that every rank raises, by the reasons of all ranks: its type, or :data:`OWN`, and its message."""
    calls = dict.fromkeys(reason.call for reason in reasons)
    failed = [reason for reason in reasons if reason.error_type]
    if failed:
        first = failed[0]
        alike = [
            reason.rank for reason in failed if (reason.error_type, reason.error) == (first.error_type, first.error)
        ]
        if len(alike) == len(reasons):
            return OWN, ""
        return first.error_type, f"{_ranks(alike)}: {first.error}"
    if len(calls) > 1:
        told = "; ".join(f"{_ranks([r.rank for r in reasons if r.call == call])} called {call}" for call in calls)
        return "DifferentCallsError", f"{told}. Every rank of the group must make the same calls in the same order."
    telling = [reason for reason in reasons if reason.digest is not None]
    reference = telling[0]
    others = [reason for reason in telling if reason.digest != reference.digest]
    words = None
    if explain is not None:
        words = explain(reference.detail, others[0].detail, reference.rank, others[0].rank)
    return "DisagreementError", (
        f"{reference.operation}: {_ranks([reason.rank for reason in others])} "
        f"{'differs' if len(others) == 1 else 'differ'} from rank {reference.rank}: "
        f"{words or 'what they hold is not the same'}. "
        f"Build the same model and optimizer on every rank, and change them alike."
    )


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}{f' and {len(ranks) - 8} more' if len(ranks) > 8 else ''}"
