"""Renders the findings of the checker: which code accessed the memory, and which allocated it, by Python stack."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from zeroshard_testing.stacks import OWN_CODE, is_below_the_test

PASSING_ON = ("/contextlib.py", "/typing_extensions.py")
"""Suffixes of files whose functions only call a user's: context managers, deprecated functions."""
_MOST_FRAMES = 8
_TORCH = "/torch/"


@dataclass(frozen=True)
class Place:
    """An operation, such as ``"aten::add_ in autograd node AddBackward0"``, and its stack, innermost frame first.

    A frame is a file, a line and a function. A thread of autograd that runs no Python has the main thread's stack.
    """

    title: str
    frames: Sequence[tuple[str, int, str]]
    is_of_main_thread: bool = False

    @property
    def call_site(self) -> str:
        """The innermost frame outside torch, else in torch, such as ``"train.py:12"``; empty if there is none."""
        return next((f"{path}:{line}" for path, line, _ in self._shown_frames()), "")

    def __str__(self) -> str:
        shown = self._shown_frames()
        lines = [f"      {path}:{line} in {function}" for path, line, function in shown[:_MOST_FRAMES]]
        if len(shown) > _MOST_FRAMES:
            lines.append(f"      and {len(shown) - _MOST_FRAMES} more")
        thread = "\n      while the main thread is at" if self.is_of_main_thread and lines else ""
        return "\n".join([f"{self.title}{thread}", *lines])

    def _shown_frames(self) -> list[tuple[str, int, str]]:
        above = takewhile(lambda frame: not is_below_the_test(frame[0]), self.frames)
        frames = [frame for frame in above if not frame[0].startswith(OWN_CODE) and not frame[0].endswith(PASSING_ON)]
        return [frame for frame in frames if _TORCH not in frame[0]] or frames


@dataclass(frozen=True)
class Finding:
    """A finding of the checker: ``kind`` is ``"race"`` or ``"freed in use"``, ``text`` says what is not ordered."""

    kind: str
    text: str
    later: Place | None
    earlier: Place | None
    born: Place | None

    def __str__(self) -> str:
        names = ("then: ", "first:", "memory:") if self.kind == "race" else ("freed:", "used: ", "memory:")
        places = zip(names, (self.later, self.earlier, self.born), strict=True)
        return "\n".join([f"{self.kind}: {self.text}", *(f"    {name} {place}" for name, place in places if place)])

    @property
    def key(self) -> tuple[str, ...]:
        """The call sites that identify a finding: of two accesses, or of the use that lacks a ``record_stream``."""
        # Timing decides which thread frees memory of a backward, and before which allocation.
        both = (self.later, self.earlier) if self.kind == "race" else (self.earlier,)
        places = (place for place in both if place)
        return (self.kind, *(text for place in places for text in (place.title, place.call_site)))


def read_findings(reports: Iterable[tuple[Any, ...]]) -> list[Finding]:
    """Return the findings of the extension's reports (kind, text, and three places or None), each once."""
    found = [Finding(kind, text, *(one and Place(*one) for one in places)) for kind, text, *places in reports]
    return list({finding.key: finding for finding in reversed(found)}.values())[::-1]


def to_text(findings: Sequence[Finding], most: int = 5) -> str:
    """Return the text of an error for findings: the first finding, and the number of others."""
    count = "1 access is" if len(findings) == 1 else f"{len(findings)} accesses are"
    more = [f"... and {len(findings) - most} more"] if len(findings) > most else []
    return "\n\n".join([f"{count} not ordered", *map(str, findings[:most]), *more])
