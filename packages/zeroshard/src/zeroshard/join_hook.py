"""Uneven inputs: what a rank that has run out of data does while the others still step."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.algorithms.join import JoinHook


class OptimizerJoinHook(JoinHook):
    """Steps the joined rank's shard along with the others, so that every share finds all its owners.

    Args:
        step: the step of the optimizer to shadow; its gradients must be right before the hook runs, so the optimizer
            comes behind DDP in the list that is handed to ``Join``.
    """

    def __init__(self, step: Callable[[], object]) -> None:
        self._step = step
        super().__init__()

    def main_hook(self) -> None:
        """Perform one step."""
        self._step()
