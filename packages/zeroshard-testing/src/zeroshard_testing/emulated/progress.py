"""Records the progress of each rank of a group, for errors of a waiting rank: which ranks are missing, and why."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from zeroshard_testing.emulated.order import ranks_text

DESTROYED = "has destroyed the group"
"""The reason of a rank that has destroyed the group."""


class Progress:
    """The progress of each rank of a group, in a store: its number of comparisons, latest entry, and reason to stop.

    Only errors use it. In a group of one rank there is no store, and nothing is written.
    """

    def __init__(self, store: Any, group_rank: int, ranks: Sequence[int]) -> None:  # noqa: ANN401 - see Mover
        self._store, self._rank, self._ranks = store, group_rank, ranks
        self._number, self._text = 0, ""

    def begin(self, text: str) -> None:
        """Record that this rank is about to compare an entry with the other ranks."""
        self._number, self._text = self._number + 1, text
        self.note()

    def note(self, fate: str = "") -> None:
        """Write the progress of this rank, and why it stops, for the other ranks."""
        # Without the store, the errors of other ranks say less.
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(str(self._rank), json.dumps([self._number, self._text, fate]))

    def others_are_gone(self) -> bool:
        """Return True if a rank has destroyed the group, and all known ranks have issued as much as this one."""
        found = self._of_others().values()
        alike = all(fate in ("", DESTROYED) and self._number - number in (0, 1) for number, _, fate in found)
        return alike and any(fate == DESTROYED for _, _, fate in found)

    def explain(self, failure: Exception, *, compares: bool = False) -> str:
        """Return why gloo failed: the ranks that did not compare, or have stopped, and the message of gloo."""
        found = self._of_others()
        behind = {rank for rank, (number, _, _) in found.items() if compares and number < self._number}
        told = []
        for rank, (number, text, fate) in found.items():
            if rank in behind:
                latest = f"its latest is {text.rstrip(',')}" if number else "it has issued none"
                told.append(f"rank {rank} {fate or 'has not come'} ({latest})")
            elif fate and not behind:
                told.append(f"rank {rank} {fate}")
        if behind:
            come = [rank for rank in self._ranks if rank not in behind]
            told.append(f"{ranks_text(come)} {'has' if len(come) == 1 else 'have'} come")
        return "; ".join([*told, f"gloo: {_first_line(failure)}"])

    def _of_others(self) -> dict[int, tuple[int, str, str]]:
        found = {}
        for place, rank in enumerate(self._ranks):
            if place != self._rank:
                found[rank] = (0, "", "")
                with contextlib.suppress(RuntimeError):
                    if self._store is not None and self._store.check([str(place)]):
                        found[rank] = tuple(json.loads(self._store.get(str(place))))
        return found


def _first_line(failure: Exception) -> str:
    """Return the first line of an error, without the position in gloo's source, and without gloo's advice."""
    line = str(failure).partition("\n")[0]
    return (line.partition("] ")[2] if line.startswith("[/") else line).partition(". ")[0]
