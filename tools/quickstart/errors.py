"""What the person at the terminal is told in one line."""

from __future__ import annotations


class InputError(Exception):
    """Something was asked for that cannot be; the message is one line and says what to do."""


class RankFailedError(Exception):
    """A rank, or the launcher of all ranks, failed; the message says which one and why."""
