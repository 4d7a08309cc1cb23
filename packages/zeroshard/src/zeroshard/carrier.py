"""How buckets travel: the seam between what a pipeline decides and what a backend can do.

A carrier brings the gradients of a backward to their owners, bucket by bucket, and has shards stepped and shared
meanwhile, if that is wanted. There is one for backends that match messages by tag, one for
all others, and one for ranks that read each other's memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch.futures import Future
from zeroshard_comm import BucketHeader, BucketReduceWork, ParameterBroadcaster, Segment

from zeroshard.route import Route


class Backward(Protocol):
    """What a carrier needs to know of a backward, and has done by it."""

    @property
    def steps_each_bucket(self) -> bool:
        """Whether each bucket is stepped as soon as it is reduced, if :attr:`steps_early`."""

    @property
    def steps_behind_last(self) -> bool:
        """Whether all buckets are stepped behind the last one, if :attr:`steps_early`."""

    @property
    def steps_early(self) -> bool:
        """Whether this rank may step during this backward."""

    @property
    def is_broken(self) -> bool:
        """Whether something has failed that cannot be finished any more."""

    def reduced(
        self, route: Route, arrival: BucketReduceWork, result: Future[torch.Tensor] | None
    ) -> list[BucketHeader]:
        """Take in a bucket, and return the headers that came with it.

        Raises:
            PeerLostError: if a rank is gone.
            RuntimeError: if ranks are in different backwards.
            ValueError: if what somebody else has reduced does not fit.
        """

    def step_early(self, route: Route) -> bool:
        """Step a bucket, unless a step of this backward has failed; tell whether it was stepped."""

    def break_off(self, error: BaseException) -> None:
        """Take note that nothing can be finished any more."""


class Carrier(ABC):
    """Brings the buckets of one optimizer to their owners.

    Attributes:
        tags: offset to the tags of its messages, which must be the same on all ranks; 0 if it sends none.
        shares_buckets: whether the parameters of a bucket travel as soon as they are stepped, or all of them together.
    """

    tags: int = 0
    shares_buckets: bool = True

    @abstractmethod
    def broadcaster(self, segments: Sequence[Segment]) -> ParameterBroadcaster:
        """Make what brings the owners' new values of some segments back."""

    @abstractmethod
    def follow(self, changed: Sequence[Route], routes: Sequence[Route]) -> None:
        """Prepare for routes that are new, or that have got other owners.

        Args:
            changed: these.
            routes: all.

        Raises:
            RuntimeError: if others are on their way already.
        """

    @abstractmethod
    def expect(self, routes: Sequence[Route], *, gradients: bool) -> None:
        """Make room for the buckets of a backward that begins, where that is of use. Nothing has been sent yet.

        Args:
            routes: those that will come, in order.
            gradients: whether they will be reduced by this carrier.
        """

    @abstractmethod
    def receive(self, route: Route, note: BucketHeader, result: Future[torch.Tensor] | None) -> Future[torch.Tensor]:
        """Send a bucket on its way, of the buffer that its route has now.

        Args:
            route: of the bucket.
            note: what this rank has to say.
            result: if somebody else reduces it on all ranks, the result to come.

        Returns:
            The bucket's buffer to come, when this rank's parts of it are reduced.

        Raises:
            PeerLostError: if a rank is gone.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait until all buckets of a backward have arrived.

        Raises:
            PeerLostError: if a rank is gone.
            Exception: what else has failed.
        """

    @abstractmethod
    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor that is being used, and about to be dropped, until it is no longer used."""
