"""From runs to the table: plain data, its cells, and its Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness_table.running import Verdict
from harness_table.trials import KINDS

START, END = "<!-- table -->", "<!-- /table -->"

_NOTES = {
    Verdict.FAILED_AT_LIMIT: "at its limit",
    Verdict.FAILED_WITHOUT_END: "without end",
    Verdict.HANGS: "hanging",
}


@dataclass(frozen=True)
class Found:
    """What one harness made of one wrong trial.

    Attributes:
        trial: Its name.
        kind: A key of `KINDS`.
        verdict: A value of `Verdict`; None if the harness cannot express the trial.
        seconds: Of the whole run.
        said: What pytest said of it.
    """

    trial: str
    kind: str
    verdict: str | None
    seconds: float = 0.0
    said: str = ""

    @property
    def caught(self) -> bool:
        """Whether the harness told that the test is wrong."""
        return self.verdict is not None and Verdict(self.verdict).caught


@dataclass(frozen=True)
class Column:
    """What was found of one harness.

    Attributes:
        title: Of the harness.
        default_limit: Seconds of its time limit if nothing is said.
        blocked: Why it was not run; empty if it was.
        nothing_seconds: Of a test that does nothing, the median; None if it was not timed.
        found: Of each wrong trial.
        cannot: Why it cannot express the trials of some kinds.
        remark: What must be known to read its cells.
    """

    title: str
    default_limit: int = 0
    blocked: str = ""
    nothing_seconds: float | None = None
    found: tuple[Found, ...] = ()
    cannot: Mapping[str, str] = field(default_factory=dict)
    remark: str = ""

    @classmethod
    def read(cls, column: Mapping[str, Any]) -> Column:
        """Return the column that `dataclasses.asdict` made this mapping of."""
        return cls(**{**column, "found": tuple(Found(**found) for found in column["found"])})


def cell(column: Column, kind: str | None) -> str:
    """Return what stands in the table for one kind of wrong tests, or for all.

    Examples:
        >>> runs = [("failed", 3.0), ("hangs", 30.0), ("passed", 2.0)]
        >>> column = Column("X", found=tuple(Found("t", "raises", verdict, s) for verdict, s in runs))
        >>> cell(column, "raises"), cell(column, "killed"), cell(Column("Y", blocked="why"), "raises")
        ('1 of 3, 3.0 s (1 hanging)', 'n/a', 'not run')
    """
    if column.blocked:
        return "not run"
    found = [one for one in column.found if one.verdict is not None and kind in (None, one.kind)]
    if not found:
        return "n/a"
    caught = [one.seconds for one in found if one.caught]
    text = f"{len(caught)} of {len(found)}"
    if len(caught) == len(found):
        text = f"**{text}**"
    if caught and kind is not None:
        text += f", {statistics.median(caught):.1f} s"
    counts = {note: sum(one.verdict == verdict.value for one in found) for verdict, note in _NOTES.items()}
    notes = [f"{count} {note}" for note, count in counts.items() if count]
    return f"{text} ({', '.join(notes)})" if notes else text


def rows(columns: Sequence[Column]) -> list[list[str]]:
    """Return the table's rows, the headings first."""
    kinds = [kind for kind in KINDS if any(one.kind == kind for column in columns for one in column.found)]
    nothing = [seconds_text(column.nothing_seconds) for column in columns]
    return [
        ["wrong tests, in which", *(column.title for column in columns)],
        *([KINDS[kind], *(cell(column, kind) for column in columns)] for kind in kinds),
        ["all of them", *(cell(column, None) for column in columns)],
        ["a test that does nothing, on 2 ranks", *nothing],
    ]


def seconds_text(seconds: float | None) -> str:
    """Return seconds for a reader.

    >>> seconds_text(0.0041), seconds_text(2.871), seconds_text(None)
    ('4 ms', '2.9 s', 'not run')
    """
    if seconds is None:
        return "not run"
    return f"{seconds * 1000:.0f} ms" if seconds < 0.1 else f"{seconds:.1f} s"


def notes(columns: Sequence[Column], limit: float, bound: float, machine: str) -> list[str]:
    """Return the sentences below the table."""
    limits = ", ".join(f"{column.title} {column.default_limit} s" for column in columns if not column.blocked)
    found = [
        "Cells: how many of the wrong tests the harness fails, by pytest's exit status, and the median of the seconds "
        "until then, with the start of pytest and torch.",
        f"*At its limit*: only the harness's own time limit ended it, here {limit:.0f} s; by default {limits}.",
        f"*Without end*: a failure was reported, but the run did not end within {bound:.0f} s. *Hanging*: neither.",
        "*n/a*, and tests not counted: the harness has no means for them, or a right test of their kind fails on it.",
    ]
    for column in columns:
        found += [
            f"{column.title}, {KINDS[kind]}: {reason}."
            for kind, reason in column.cannot.items()
            if any(one.kind == kind and one.verdict is None for one in column.found)
        ]
        found += [f"{column.title}: {column.remark}."] * bool(column.remark and not column.blocked)
        found += [f"{column.title} was not run: {column.blocked}."] * bool(column.blocked)
    return [
        *found,
        "For unittest, what surrounds a test is in `setUp` and `tearDown`, or in the same of the class or the module.",
        f"Made by `python tools/harness_table` on {machine}.",
    ]


def markdown(table: Sequence[Sequence[str]], sentences: Sequence[str]) -> str:
    """Return the table with what is said below it."""
    head, *body = [f"| {' | '.join(row)} |" for row in table]
    return "\n".join([head, "|---" * len(table[0]) + "|", *body, "", *(f"- {sentence}" for sentence in sentences)])


def replaced(page: str, text: str) -> str:
    """Return a page with ``text`` between its two markers.

    Raises:
        ValueError: If the page has not each marker once, in this order.
    """
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end) or START in rest or END in after:
        raise ValueError(f"there must be one line {START} and, after it, one line {END}")
    return f"{before}{START}\n{text}\n{END}{after}"
