"""Uneven inputs: what a rank that has run out of data does while the others still step."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.algorithms.join import JoinHook


class OptimizerJoinHook(JoinHook):
    """Steps the joined rank's shard along with the others, so that every share finds all its owners.

    Nobody waits in vain, and replicas stay equal; but the joined rank steps with the gradients that are there, and
    DDP's own hook writes none. So its shard moves by the gradients of its last batch, not by those of the ranks that
    still have data: parameters differ from those of the unsharded run, as they do with torch's class.

    Args:
        step: the step of the optimizer to shadow.
    """

    def __init__(self, step: Callable[[], object]) -> None:
        self._step = step
        super().__init__()

    def main_hook(self) -> None:
        """Perform one step."""
        self._step()
