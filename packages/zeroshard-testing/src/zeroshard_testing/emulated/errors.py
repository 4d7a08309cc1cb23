"""The errors that tests on the emulated accelerator raise."""

from __future__ import annotations


class DifferentCollectivesError(RuntimeError):
    """Raised if ranks issue different collectives, or a rank issues none. The message names the collective of each."""

    is_found_by_harness = True


class RaceError(RuntimeError):
    """Raised if two accesses of the same device memory are not ordered by a stream, an event or a wait."""

    is_found_by_harness = True
