"""Following a backward that hands over its gradients bucket by bucket: the seam between an optimizer and a DDP hook."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.futures import Future

from zeroshard.attendance import Call
from zeroshard.engine import Engine
from zeroshard.param_groups import ParamGroup
from zeroshard.pipeline import Stepping
from zeroshard.route import Bucket
from zeroshard.shadow_bucket import contribute
from zeroshard.uneven import UnevenInputs


class BackwardFollower:
    """Takes the buckets of each backward, and its end.

    Made by :meth:`ZeroRedundancyOptimizer.follow_backward`; all its methods are collective, and belong to the thread
    that runs backward.

    Args:
        engine: of the optimizer.
        uneven: its part in Join contexts.
        groups: returns its param groups.
        stepping: when shards are stepped; also an attribute.

    Raises:
        ValueError: if the optimizer follows backwards in another way already, or its parameters cannot be exchanged in
            buckets.
    """

    def __init__(
        self, engine: Engine, uneven: UnevenInputs, groups: Callable[[], list[ParamGroup]], stepping: Stepping
    ) -> None:
        self._engine, self._uneven, self._groups, self.stepping = engine, uneven, groups, stepping
        self._pipeline = engine.attach(stepping)

    def receive(self, bucket: Bucket, reduce: Callable[[], Future[torch.Tensor]] | None = None) -> Future[torch.Tensor]:
        """Send a bucket of gradients to their owners, and step them if that is to be done during backward.

        Args:
            bucket: the buckets of a backward come by ascending index, the first with the index 0, in the same order on
                every rank.
            reduce: if somebody else averages it over the ranks, begins that, and returns the result to come, of the
                bucket's length.

        Returns:
            The bucket's buffer to come, when this rank's parts of it hold the means over all ranks. Other parts of it
            are left as they are.

        Raises:
            DisagreementError: if ranks have other buckets.
            PeerLostError: if a rank is gone.
            RuntimeError: if an earlier backward or step could not be finished.
            ValueError: if the optimizer does not have a parameter of the bucket, or its gradients cannot be sent.
        """
        bucket = self._numbered(bucket)
        may_step = False
        if bucket.index == 0 and self.stepping is not Stepping.IN_STEP:
            self._engine.shadowing = bucket.is_shadow
            if bucket.is_shadow:
                self._uneven.shadow_backward(self._groups())
            else:
                self._uneven.attend(Call.BACKWARD, self._groups())
            may_step = self._engine.begin_backward(self._groups())
        return self._pipeline.receive(bucket, reduce=reduce, may_step=may_step)

    def contributed(self, bucket: Bucket) -> Bucket:
        """Put into a bucket what this rank contributes to a backward that it does not make: what it had accumulated.

        Args:
            bucket: of zeros.

        Returns:
            The bucket to be handed to :meth:`receive`.
        """
        return contribute(bucket, self._pipeline)

    def _numbered(self, bucket: Bucket) -> Bucket:
        """Number the buckets by their arrival: in the first backward of a static graph, DDP calls all of them 0.

        Raises:
            RuntimeError: if they are of two models, or an earlier backward did not come to its end.
        """
        pipeline = self._pipeline
        if not pipeline.in_backward:
            return bucket
        before = pipeline.arrived
        seen = {param for other in before for param in other.params}
        if not seen.isdisjoint(bucket.params):
            raise pipeline.broken_by(RuntimeError("an earlier backward did not come to its end on this rank"))
        if before[-1].is_last or bucket.index not in (0, len(before)):
            raise pipeline.broken_by(
                RuntimeError(
                    "buckets of two models arrive in one backward: with a communication hook of zeroshard, each model "
                    "in DistributedDataParallel needs an optimizer and a backward of its own"
                )
            )
        return replace(bucket, index=len(before), announced=bucket.index)

    def end_if_unannounced(self) -> None:
        """End a backward of which no bucket was announced as the last, as the first one of a static graph."""
        arrived = self._pipeline.arrived
        if self._pipeline.in_backward and len(arrived) > 1 and not any(bucket.announced for bucket in arrived):
            self.end()

    @property
    def in_backward(self) -> bool:
        """Whether a backward hands over buckets."""
        return self._pipeline.in_backward

    def end_shadow(self) -> None:
        """Finish a backward that this rank has shadowed; inside a Join context, when all of it has been shadowed.

        What the others do behind the last bucket, such as telling which parameters were used, comes before their step.

        Raises:
            PeerLostError: if a rank is gone.
            Exception: as :meth:`end`.
        """
        if self._uneven.is_inside:
            self._uneven.put_off(self.end)
        else:
            self.end()

    def end(self) -> None:
        """Finish a backward, after its last bucket and behind everything else that writes gradients.

        Raises:
            PeerLostError: if a rank is gone.
            Exception: if shards are stepped during backward, all that a step raises.
        """
        self._pipeline.finish_backward()
        if self.stepping is Stepping.IN_STEP:
            return
        try:
            self._engine.step(self._groups(), None, {})
        finally:
            self._engine.shadowing = False
        self._uneven.forget_what_others_used()
