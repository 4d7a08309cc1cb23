"""The errors that tests on the emulated accelerator raise."""

from __future__ import annotations


class FoundError(RuntimeError):
    """What is wrong with the test, found by the device or its process group."""


class DifferentCollectivesError(FoundError):
    """Ranks issued different collectives, or one of them none; the text names each rank's."""


class RaceError(FoundError):
    """Two accesses of the same device memory that nothing orders."""
