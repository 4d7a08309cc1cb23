"""How a test ended on one rank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

PASSED = "passed"
FAILED = "failed"
SKIPPED = "skipped"
XFAILED = "xfailed"
DIED = "died"
XPASSED = "xpassed"
STOPPED = "stopped"
TIMED_OUT = "timed out"
FAULTED = "faulted"
DEADLOCKED = "deadlocked"


_ECHOES = re.compile(
    r"connection (was )?(reset|closed|refused|aborted)|broken pipe|socket closed|peer closed"
    r"|remote (process|rank|peer) (has )?(exited|died)",
    re.IGNORECASE,
)


def is_echo(text: str) -> bool:
    """Whether an exception's text is what a rank says when its peer has gone: a consequence, told after causes.

    Example:
        >>> is_echo("RuntimeError: Connection reset by peer")
        True
    """
    return _ECHOES.search(text) is not None


@dataclass(frozen=True)
class Outcome:
    """How a test ended on one rank, as that rank reported it or as the controller found it.

    Attributes:
        kind: ``"passed"``, ``"failed"``, ``"skipped"``, ``"xfailed"`` or ``"xpassed"`` (where a failure was expected,
            but not strictly) by the rank's own report; ``"died"``, ``"stopped"`` (by the controller, after another rank
            had failed), ``"deadlocked"`` or ``"timed out"`` without one; ``"faulted"`` if the test's own fault has
            ended or stopped it.
        summary: One line: the exception, the reason of a skip, how the process ended.
        detail: The traceback as pytest renders it, or the Python stacks of a rank that was stopped.
        moment: Seconds on the machine's monotonic clock, to tell what came first.
        path: File where it was raised, empty if unknown.
        line: Line in that file, 1-based; 0 if unknown.
        warnings: What the test warned of: category, text, file and line of each.
        sections: What pytest shows beside a report, such as the log: title and text of each.
        properties: What ``record_property`` was given: name and value of each, both as text.
        found_by_controller: Whether the rank itself had reported something else.
    """

    kind: str
    summary: str = ""
    detail: str = ""
    moment: float = 0.0
    path: str = ""
    line: int = 0
    warnings: tuple[tuple[str, str, str, int], ...] = ()
    sections: tuple[tuple[str, str], ...] = ()
    properties: tuple[tuple[str, str], ...] = ()
    found_by_controller: bool = False

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
        values = {field.name: message[field.name] for field in fields(cls)}
        for name in ("warnings", "sections", "properties"):
            values[name] = tuple(tuple(one) for one in values[name])
        return cls(**values)


def printable(text: str) -> str:
    """Return a text that any file or terminal takes, with lone surrogates escaped.

    >>> printable(chr(0xD800)) == chr(92) + "ud800"
    True
    """
    return text.encode("utf-8", "backslashreplace").decode()
