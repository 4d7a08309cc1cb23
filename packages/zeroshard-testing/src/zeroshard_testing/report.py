"""How a verdict appears in pytest's report."""

from __future__ import annotations

# Not exported by pytest, and what pytest-xdist can carry from a worker to its controller with the cause.
from _pytest._code.code import ReprEntryNative, ReprExceptionInfo, ReprFileLocation, ReprTraceback

from zeroshard_testing.verdict import Verdict


class RanksFailure(Exception):  # noqa: N818 - a verdict about the test, as pytest's own Failed
    """A test has failed on its ranks. What happened there is in ``verdict``; outside pytest the text is the report."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(f"{verdict.summary}\n{verdict.text}")
        self.verdict = verdict


def failure_report(failure: RanksFailure) -> ReprExceptionInfo:
    """Return a report's ``longrepr``: the verdict's text, and the root cause for the short summary."""
    verdict = failure.verdict
    lines = [f"{line}\n" for line in verdict.text.splitlines()]
    crash = ReprFileLocation(verdict.path, verdict.line, verdict.summary)
    return ReprExceptionInfo(ReprTraceback([ReprEntryNative(lines)], None, "native"), crash)
