"""The way of one bucket through a step: gradients to their owners, their local step, parameters back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_

import torch
from zeroshard_comm import Broadcast, ParameterBroadcaster, Segment
from zeroshard_core import Plan, Run, storage_view

from zeroshard.local import LocalOptimizer
from zeroshard.narrowed import Portion
from zeroshard.reduced_gradient import ReducedGradient

_grad_of = attrgetter("grad")


@dataclass(frozen=True)
class Bucket:
    """A bucket of gradients, as a framework hands it over during backward.

    Attributes:
        index: its number; the same order on every rank.
        is_last: whether it is the last of this backward.
        buffer: all gradients, 1-D.
        gradients: views of the buffer, each in the shape of its parameter.
        params: the parameters.
        present: per parameter, whether this rank has computed a gradient for it.
        announced: the number that the framework gave it, where that was another one.
        is_shadow: whether this rank has no backward of its own, since it has run out of data.
    """

    index: int
    is_last: bool
    buffer: torch.Tensor
    gradients: Sequence[torch.Tensor]
    params: Sequence[torch.Tensor]
    present: tuple[bool, ...]
    announced: int = 0
    is_shadow: bool = False


class Route:
    """What is made once per bucket and plan, and used in every step. Only the pipeline changes it.

    Args:
        make: makes what brings the owners' new values to all; None if there is nobody to bring them to.
        plan: who owns what.
        local: the local optimizer, its pieces set apart from the parameters.
        bucket: the bucket.
        tensors: the indices of its parameters in the plan.

    Attributes:
        tensors: as given.
        offsets: per tensor, its first element in the bucket.
        strides: per tensor, those by which its gradient lies in the bucket.
        params: the parameters.
        runs: the ranges of the bucket by owner, neighbours of one owner as one.
        portion: steps what this rank owns of the bucket.
        present: per tensor, whether any rank had a gradient in the last backward.
        stand_ins: per tensor, what stands in the place of its gradient.
        stepped: whether the gradients have been used.
        zeroed: tensors whose gradients were set to zero since they were reduced.
    """

    def __init__(
        self,
        make: Callable[[Sequence[Segment]], ParameterBroadcaster] | None,
        plan: Plan,
        local: LocalOptimizer,
        bucket: Bucket,
        tensors: Sequence[int],
    ) -> None:
        self._make = make
        self.tensors = tuple(tensors)
        self.params = list(bucket.params)
        self.bucket = bucket
        self.offsets = [int(grad.storage_offset()) - int(bucket.buffer.storage_offset()) for grad in bucket.gradients]
        self.strides = [param.stride() for param in bucket.params]
        self.present: tuple[bool, ...] = (False,) * len(self.tensors)
        self.stand_ins: list[ReducedGradient] = []
        self.stepped = False
        self.zeroed: set[int] = set()
        self.follow(plan, local)

    def follow(self, plan: Plan, local: LocalOptimizer) -> None:
        """Take over another plan, or parameters that have moved in memory. Nothing may be on its way.

        Raises:
            ValueError: if a parameter that is cut has changed its memory format: its gradients lie in the old one.
        """
        for index, param, stride in zip(self.tensors, self.params, self.strides, strict=True):
            if param.stride() != stride and plan.is_cut(index):
                raise ValueError(
                    f"tensor {index} {plan.tensors[index].name!r} is cut over several ranks and has changed its memory "
                    f"format, but DistributedDataParallel still lays out its gradients in the old one: convert the "
                    f"model before DistributedDataParallel and the optimizer are built"
                )
        self.runs = self._runs(plan)
        self._owned = {place: local.pieces[i] for place, i in enumerate(self.tensors) if i in local.pieces}
        self._pieces = [piece.tensor for piece in self._owned.values()]
        self.portion = Portion(local, list(self._owned.values()))
        self._share: Broadcast | None = None
        self._sent = False
        self._wanted: tuple[tuple[int, tuple[bool, ...]], list[torch.Tensor | None]] | None = None
        segments: list[Segment] = []
        for index, param in zip(self.tensors, self.params, strict=True) if self._make is not None else ():
            # Not counted as a write when it arrives, but when it is expected.
            flat = storage_view(param.data)
            segments += [Segment(shard.rank, flat[shard.flat]) for shard in plan.of_tensor(index)]
        self._broadcaster = self._make(segments) if self._make is not None else None

    def takes(self, bucket: Bucket) -> None:
        """Take over the buffer of a further backward; the parameters are the same."""
        self.bucket = bucket
        self.stepped = False
        self.zeroed.clear()

    def owned_gradient(self, place: int) -> torch.Tensor | None:
        """Return the view of the bucket that this rank owns of the tensor at ``place``, if it owns any of it."""
        piece = self._owned.get(place)
        if piece is None:
            return None
        start = self.offsets[place] + piece.shard.flat.start
        return gradient_view(self.bucket.buffer, start, piece.tensor.shape, self.strides[place])

    def scale(self, factor: float) -> None:
        """Multiply what this rank owns of the gradients."""
        for place in self._owned:
            gradient = self.owned_gradient(place)
            assert gradient is not None
            gradient.mul_(factor)

    def bind(self, present: tuple[bool, ...]) -> None:
        """Hand the local optimizer this rank's parts of the gradients that are there, and None for the others."""
        key = (self.bucket.buffer.data_ptr(), present)
        if self._wanted is None or self._wanted[0] != key:
            grads = [self.owned_gradient(place) if present[place] else None for place in self._owned]
            self._wanted = (key, grads)
        # Optimizers and users may have set others meanwhile.
        wanted = self._wanted[1]
        if all(map(is_, map(_grad_of, self._pieces), wanted)):
            return
        for tensor, grad in zip(self._pieces, wanted, strict=True):
            tensor.grad = grad

    def step(self, present: tuple[bool, ...], arguments: dict[str, object]) -> None:
        """Step what this rank owns of the bucket."""
        self.bind(present)
        self.stepped = True
        self.portion.step(arguments)

    def expect(self) -> None:
        """Post the receives of the owners' new values; from now on autograd may not use the old ones. No-op if done."""
        if self._share is None:
            torch.autograd.graph.increment_version(self.params)
            self._share = self._broadcaster.begin() if self._broadcaster is not None else None
            self._sent = False

    def send(self) -> None:
        """Send this rank's values of what it owns. No-op if done."""
        self.expect()
        if self._share is not None and not self._sent:
            self._sent = True
            self._share.send()

    def arrive(self) -> None:
        """Wait until the others' values have arrived. No-op if nothing is on its way.

        Raises:
            PeerLostError: if a rank is gone.
        """
        if self._share is not None:
            self._share.arrive()

    def wait(self) -> None:
        """As :meth:`arrive`, and until this rank's own values may be changed.

        Raises:
            PeerLostError: if a rank is gone.
        """
        if self._share is not None:
            share, self._share = self._share, None
            share.wait()

    def _runs(self, plan: Plan) -> list[Run]:
        runs: list[Run] = []
        for index, offset in sorted(zip(self.tensors, self.offsets, strict=True), key=lambda item: item[1]):
            for shard in plan.of_tensor(index):
                start, stop = offset + shard.flat.start, offset + shard.flat.stop
                if start == stop:
                    continue
                if runs and runs[-1].rank == shard.rank and runs[-1].stop == start:
                    start = runs.pop().start
                runs.append(Run(shard.rank, start, stop))
        return runs


def gradient_view(buffer: torch.Tensor, offset: int, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Return the view of a bucket that is the gradient of one tensor, or of one part of it.

    DDP lays gradients out by the strides of their parameters, and tells of views in row-major order only.

    Args:
        buffer: the bucket, 1-D.
        offset: its first element there.
        shape: of the parameter, or the part.
        stride: of the parameter when the bucket was laid out; without gaps.
    """
    return buffer.as_strided(shape, stride, int(buffer.storage_offset()) + offset)
