"""The errors that tests on the emulated accelerator raise."""

from __future__ import annotations


class DifferentCollectivesError(RuntimeError):
    """Ranks issued different collectives, or one of them none; the text names each rank's."""


class RaceError(RuntimeError):
    """Two accesses of the same device memory that nothing orders."""
