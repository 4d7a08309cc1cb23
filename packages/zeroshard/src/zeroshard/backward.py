"""Following a backward that hands over its gradients bucket by bucket: the seam between an optimizer and a DDP hook."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.futures import Future

from zeroshard.engine import Engine
from zeroshard.parameters import ParamGroup
from zeroshard.pipeline import Stepping
from zeroshard.route import Bucket


class BackwardFollower:
    """Takes the buckets of each backward, and its end.

    Made by :meth:`ZeroRedundancyOptimizer.follow_backward`; all its methods are collective, and belong to the thread
    that runs backward.

    Args:
        engine: of the optimizer.
        groups: returns its param groups.
        stepping: when shards are stepped; also an attribute.

    Raises:
        ValueError: if the optimizer follows backwards in another way already, or its parameters cannot be exchanged in
            buckets.
    """

    def __init__(self, engine: Engine, groups: Callable[[], list[ParamGroup]], stepping: Stepping) -> None:
        self._engine, self._groups, self.stepping = engine, groups, stepping
        self._pipeline = engine.attach(stepping)

    def receive(self, bucket: Bucket, reduced: Future[torch.Tensor] | None = None) -> Future[torch.Tensor]:
        """Send a bucket of gradients to their owners, and step them if that is to be done during backward.

        Args:
            bucket: the buckets of a backward come by ascending index, the first with the index 0, in the same order on
                every rank.
            reduced: if somebody else averages it over the ranks, the result to come, of the bucket's length.

        Returns:
            The bucket's buffer to come, when this rank's parts of it hold the means over all ranks. Other parts of it
            are left as they are.

        Raises:
            DisagreementError: if ranks have other buckets.
            PeerLostError: if a rank is gone.
            RuntimeError: if an earlier backward or step could not be finished.
            ValueError: if the optimizer does not have a parameter of the bucket, or its gradients cannot be sent.
        """
        may_step = False
        if bucket.index == 0 and self.stepping is not Stepping.IN_STEP:
            may_step = self._engine.begin_backward(self._groups())
        return self._pipeline.receive(bucket, reduced=reduced, may_step=may_step)

    def end(self) -> None:
        """Finish a backward, after its last bucket and behind everything else that writes gradients.

        Raises:
            PeerLostError: if a rank is gone.
            Exception: if shards are stepped during backward, all that a step raises.
        """
        self._pipeline.finish_backward()
        if self.stepping is not Stepping.IN_STEP:
            self._engine.step(self._groups(), None, {})
