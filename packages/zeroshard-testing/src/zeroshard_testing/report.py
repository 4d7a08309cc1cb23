"""How a verdict appears in pytest's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from zeroshard_testing.ipc import Message
from zeroshard_testing.verdict import Verdict


class _Writer(Protocol):
    def line(self, text: str, **markup: bool) -> None: ...


class RanksFailure(Exception):  # noqa: N818 - a verdict about the test, as pytest's own Failed
    """A test has failed on its ranks. What happened there is in ``verdict``."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.summary)
        self.verdict = verdict


@dataclass(frozen=True)
class _Crash:
    """The root cause, in the form in which pytest's short summary looks for it."""

    path: str
    lineno: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.lineno}: {self.message}"


@dataclass(frozen=True)
class FailureReport:
    """A failure as pytest prints it.

    Attributes:
        text: The whole report.
        reprcrash: The root cause.
    """

    text: str
    reprcrash: _Crash

    def __str__(self) -> str:
        return self.text

    def toterminal(self, writer: _Writer) -> None:
        """Print, with the lines that pytest colours in a traceback coloured."""
        for line in self.text.splitlines():
            writer.line(line, **_markup(line))


def failure_report(failure: RanksFailure) -> FailureReport:
    """Return what a report's ``longrepr`` is to be."""
    verdict = failure.verdict
    return FailureReport(verdict.text, _Crash(verdict.path, verdict.line, verdict.summary))


def report_to_message(report: FailureReport) -> Message:
    """Return a failure's report as a JSON object."""
    return {"text": report.text, "crash": [report.reprcrash.path, report.reprcrash.lineno, report.reprcrash.message]}


def report_from_message(message: Message) -> FailureReport:
    """Read what `report_to_message` made."""
    return FailureReport(message["text"], _Crash(*message["crash"]))


def _markup(line: str) -> dict[str, bool]:
    if line.startswith("E "):
        return {"red": True, "bold": True}
    if line.startswith(("=", ">")):
        return {"bold": True}
    return {}
