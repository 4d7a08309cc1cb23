"""Multi-rank tests for pytest: fast, and never a pass that was not one.

Mark a test with ``@pytest.mark.ranks(2, 4)`` and it runs on every rank of a warm pool of worker processes, with
`torch.distributed` initialised. Importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeroshard_testing.replicas import assert_replicas_equal

__all__ = ["assert_replicas_equal"]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "assert_replicas_equal":
        from zeroshard_testing.replicas import assert_replicas_equal

        return assert_replicas_equal
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
