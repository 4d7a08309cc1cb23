"""Multi-rank tests for pytest: each rank runs the test under its own pytest, and their operations are compared.

Mark a test with ``@pytest.mark.ranks(2, 4)`` and it runs on every rank of a warm pool of worker processes, with
`torch.distributed` initialized. Importing this package does not import torch.

PYTEST_DONT_REWRITE: without this word, pytest warns if the package is imported early; it has no tests to rewrite.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeroshard_testing.calls import run_on_ranks
    from zeroshard_testing.emulated.errors import DifferentCollectivesError, RaceError
    from zeroshard_testing.faults import Faults
    from zeroshard_testing.marker import rank_fixture
    from zeroshard_testing.raising import raises_on
    from zeroshard_testing.replicas import assert_replicas_equal
    from zeroshard_testing.single_process import assert_matches_single_process
    from zeroshard_testing.verdict import RanksFailure

__all__ = [
    "DifferentCollectivesError",
    "Faults",
    "RaceError",
    "RanksFailure",
    "assert_matches_single_process",
    "assert_replicas_equal",
    "raises_on",
    "rank_fixture",
    "run_on_ranks",
]

__version__ = "0.1.0"

_MODULES = {
    "DifferentCollectivesError": "emulated.errors",
    "Faults": "faults",
    "RaceError": "emulated.errors",
    "RanksFailure": "verdict",
    "assert_matches_single_process": "single_process",
    "assert_replicas_equal": "replicas",
    "raises_on": "raising",
    "run_on_ranks": "calls",
    "rank_fixture": "marker",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
