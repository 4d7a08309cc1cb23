"""The errors that tests on the emulated accelerator raise."""

from __future__ import annotations


class DifferentCollectivesError(RuntimeError):
    """Ranks issued different collectives, or one of them none; the text names each rank's."""

    is_found_by_harness = True


class RaceError(RuntimeError):
    """Two accesses of the same device memory that nothing orders."""

    is_found_by_harness = True
