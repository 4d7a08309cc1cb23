"""Uneven inputs: what a rank that has run out of data does while the others still step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.algorithms.join import JoinHook

if TYPE_CHECKING:
    from zeroshard.optimizer import ZeroRedundancyOptimizer


class OptimizerJoinHook(JoinHook):
    """Steps the joined rank's shard along with the others, so that every share finds all its owners.

    Args:
        optimizer: the optimizer to shadow; its gradients must be right before the hook runs, so it comes behind DDP in
            the list that is handed to ``Join``.
    """

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizer = optimizer
        super().__init__()

    def main_hook(self) -> None:
        """Perform one step."""
        self._optimizer.step()
