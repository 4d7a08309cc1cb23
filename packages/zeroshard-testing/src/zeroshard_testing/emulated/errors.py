"""The errors that tests on the emulated accelerator raise."""

from __future__ import annotations


class DifferentCollectivesError(RuntimeError):
    """Raised if ranks issue different collectives, or a rank issues none. The text names each rank's."""

    is_found_by_harness = True


class RaceError(RuntimeError):
    """Raised for two accesses of the same device memory that nothing orders."""

    is_found_by_harness = True
