"""How a test ended on one rank."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

# By a rank's own report; it has xpassed where a failure was expected, but not strictly.
PASSED = "passed"
FAILED = "failed"
SKIPPED = "skipped"
XFAILED = "xfailed"
XPASSED = "xpassed"
# Without one; it was stopped by the controller, after another rank had failed.
DIED = "died"
STOPPED = "stopped"
DEADLOCKED = "deadlocked"
TIMED_OUT = "timed out"
# The test's own fault has ended or stopped it.
FAULTED = "faulted"

_ECHOES = re.compile(
    r"connection (was )?(reset|closed|refused|aborted)|broken pipe|socket closed|peer closed"
    r"|remote (process|rank|peer) (has )?(exited|died)|reached monitoredBarrier, but received errors",
    re.IGNORECASE,
)


def is_echo(text: str) -> bool:
    """Whether an exception's text is what a rank says when its peer has gone: a consequence, told after causes."""
    return _ECHOES.search(text) is not None


@dataclass(frozen=True)
class Outcome:
    """How a test ended on one rank, as that rank reported it or as the controller found it.

    ``summary`` is one line: the exception, the reason of a skip, how the process ended. ``detail`` is the traceback, or
    the Python stacks of a rank that was stopped, ``moment`` seconds on the machine's monotonic clock, to tell what came
    first. ``path`` and ``line`` (1-based) say where it was raised, empty and 0 if unknown. ``warnings`` are category,
    text, file and line of each, ``sections`` what pytest shows beside a report, to which the controller adds
    standard output and error, ``properties`` what ``record_property`` was given. An expected failure is one
    ``by_mark``, or by a call of `pytest.xfail`.
    """

    kind: str
    summary: str = ""
    detail: str = ""
    moment: float = field(default_factory=time.monotonic)
    path: str = ""
    line: int = 0
    warnings: tuple[tuple[str, str, str, int], ...] = ()
    sections: tuple[tuple[str, str], ...] = ()
    properties: tuple[tuple[str, str], ...] = ()
    by_mark: bool = False

    @property
    def predicate(self) -> str:
        """What to say of the ranks that ended so, as in ``"was killed by SIGKILL"``."""
        if self.kind == FAILED and not self.summary.startswith(
            ("called ", "returned without", "left ", "passed, but ", "passed although")
        ):
            return f"failed: {self.summary}"
        return self.summary

    @property
    def is_clean(self) -> bool:
        """Whether the rank came to an end of its own after which other ranks may go on for as long as they like."""
        return self.kind in (PASSED, SKIPPED, XPASSED, FAULTED)

    def to_message(self) -> dict[str, Any]:
        """Return the outcome as a JSON object."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Outcome:
        """Read what `to_message` made, ignoring other keys."""
        values = {one.name: message[one.name] for one in fields(cls)}
        for name in ("warnings", "sections", "properties"):
            values[name] = tuple(tuple(one) for one in values[name])
        return cls(**values)


def printable(text: str) -> str:
    """Return a text that any file or terminal takes, with lone surrogates escaped."""
    return text.encode("utf-8", "backslashreplace").decode()
