"""The outcome of a test on one rank."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

# Reported by the rank. `xpassed`: a failure was expected, but not strictly.
PASSED = "passed"
FAILED = "failed"
SKIPPED = "skipped"
XFAILED = "xfailed"
XPASSED = "xpassed"
# Without a report. `stopped`: the controller stopped the rank after another rank had failed.
DIED = "died"
STOPPED = "stopped"
DEADLOCKED = "deadlocked"
TIMED_OUT = "timed out"
# A fault of the test has ended or stopped the rank.
FAULTED = "faulted"

_ECHOES = re.compile(
    r"connection (was )?(reset|closed|refused|aborted)|broken pipe|socket closed|peer closed"
    r"|remote (process|rank|peer) (has )?(exited|died)|reached monitoredBarrier, but received errors",
    re.IGNORECASE,
)


def is_echo(text: str) -> bool:
    """Return True if the text of an exception reports a lost peer. That is a consequence, shown after causes."""
    return _ECHOES.search(text) is not None


@dataclass(frozen=True)
class Outcome:
    """How a test ended on one rank, as that rank reported it or as the controller found it.

    ``summary`` is one line: the exception, the reason of a skip, or how the process ended. ``detail`` is the traceback,
    or the Python stacks of a rank that was stopped. ``moment`` is in seconds on the machine's monotonic clock, to order
    outcomes. ``path`` and ``line`` (1-based) say where it was raised; '' and 0 if unknown. ``warnings`` has category,
    text, file and line of each; ``sections`` the sections of pytest's report, to which the controller adds standard
    output and error; ``properties`` the values of ``record_property``. If ``by_mark``, a mark expected the failure,
    otherwise a call of `pytest.xfail`.
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
        """The predicate of ranks with this outcome in a report, such as ``"was killed by SIGKILL"``."""
        if self.kind == FAILED and not self.summary.startswith(
            ("called ", "returned without", "left ", "passed, but ", "passed although")
        ):
            return f"failed: {self.summary}"
        return self.summary

    @property
    def is_clean(self) -> bool:
        """True if the rank ended by itself, and other ranks may continue without a limit."""
        return self.kind in (PASSED, SKIPPED, XPASSED, FAULTED)

    def to_message(self) -> dict[str, Any]:
        """Return the outcome as a JSON object."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Outcome:
        """Make an outcome from the result of `to_message`, ignoring other keys."""
        values = {one.name: message[one.name] for one in fields(cls)}
        for name in ("warnings", "sections", "properties"):
            values[name] = tuple(tuple(one) for one in values[name])
        return cls(**values)


def printable(text: str) -> str:
    """Return a text for any file or terminal, with lone surrogates escaped."""
    return text.encode("utf-8", "backslashreplace").decode()
