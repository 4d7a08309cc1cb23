"""A bucket of gradients: as a framework passes it, and this rank's parts as the local optimizer gets them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_

import torch
from zeroshard_core import Plan, Run

from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.local.shard import LocalShard
from zeroshard.plan.layout import Layout, label_in

_grad_of = attrgetter("grad")


@dataclass(frozen=True)
class Bucket:
    """A bucket of gradients, as a framework passes it during backward.

    Attributes:
        index: the number of the bucket; buckets have the same order on every rank.
        is_last: whether it is the last bucket of this backward.
        buffer: the gradients of the bucket, 1-D.
        gradients: views of the buffer, each in the shape of its parameter.
        params: the parameters, in the order of ``gradients``.
        present: for each parameter, whether this rank has computed a gradient.
        announced: the number that the framework gave the bucket; None if it is ``index``.
    """

    index: int
    is_last: bool
    buffer: torch.Tensor
    gradients: Sequence[torch.Tensor]
    params: Sequence[torch.Tensor]
    present: tuple[bool, ...]
    announced: int | None = None

    @property
    def offsets(self) -> list[int]:
        """The first element of each gradient in the buffer."""
        start = int(self.buffer.storage_offset())
        return [int(gradient.storage_offset()) - start for gradient in self.gradients]


class OwnedGradients(ABC):
    """Passes the gradients of this rank's shards of a bucket to the local optimizer. Call :meth:`lay_out` first.

    Buckets have the same ``index`` on every rank. ``offsets`` and ``length`` count elements in the bucket. Subclasses
    know where the values are stored.
    """

    def __init__(
        self, index: int, tensors: Sequence[int], params: Sequence[torch.Tensor], offsets: Sequence[int], length: int
    ) -> None:
        self.index, self.tensors, self.params = index, tuple(tensors), list(params)
        self.offsets, self.length = list(offsets), length
        self._strides = [param.stride() for param in params]
        self._owned: dict[int, LocalShard] = {}
        self.owned_tensors: list[torch.Tensor] = []
        """The tensors that the local optimizer steps for the parameters that this rank owns."""
        self.owned_params: list[torch.Tensor] = []
        """Among these, the tensors that are parameters themselves."""

    def lay_out(self, local: LocalOptimizer) -> None:
        """Use the current shards of this rank."""
        self._owned = {place: local.shards[i] for place, i in enumerate(self.tensors) if i in local.shards}
        self.owned_tensors = [shard.tensor for shard in self._owned.values()]
        self.owned_params = [shard.param for shard in self._owned.values() if not shard.is_detached]

    @abstractmethod
    def owned_gradients(self) -> Mapping[int, torch.Tensor]:
        """Return this rank's parts of reduced gradients, by tensor."""

    @abstractmethod
    def gradients(self, steppable: tuple[bool, ...]) -> Sequence[torch.Tensor | None]:
        """Return the gradient of each shard that this rank owns, None where ``steppable`` is False."""

    def set_grads(self, steppable: tuple[bool, ...]) -> None:
        """Set ``.grad`` of this rank's shards to :meth:`gradients`."""
        gradients = self.gradients(steppable)
        # Optimizers and users may have replaced them since.
        if not all(map(is_, map(_grad_of, self.owned_tensors), gradients)):
            for shard, gradient in zip(self._owned.values(), gradients, strict=True):
                shard.tensor.grad = shard.converted(gradient) if shard.is_master else gradient

    def _views_in(self, range_of: Callable[[int, int], torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return this rank's parts by tensor, given the function that returns a range of the bucket."""
        views = {}
        for place, shard in self._owned.items():
            start, flat = self.offsets[place], shard.shard.flat
            owned = range_of(start + flat.start, start + flat.stop)
            views[self.tensors[place]] = gradient_view(owned, 0, shard.tensor.shape, self._strides[place])
        return views


def runs_of(plan: Plan, tensors: Sequence[int], offsets: Sequence[int]) -> list[Run]:
    """Return the ranges of a bucket by owner, with adjacent ranges of one owner merged."""
    runs: list[Run] = []
    for offset, index in sorted(zip(offsets, tensors, strict=True)):
        is_part = plan.is_cut(index)
        for shard in plan.of_tensor(index):
            start, stop = offset + shard.flat.start, offset + shard.flat.stop
            if start == stop:
                continue
            if runs and runs[-1].rank == shard.rank and runs[-1].stop == start:
                before = runs.pop()
                start, is_part = before.start, before.is_part or is_part
            runs.append(Run(shard.rank, start, stop, is_part))
    return runs


def gradient_view(buffer: torch.Tensor, offset: int, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Return a view of a gradient or a part, with its parameter's strides: DDP's own views are in row-major order."""
    return buffer.as_strided(shape, stride, int(buffer.storage_offset()) + offset)


def common_device(params: Sequence[torch.Tensor], layout: Layout) -> torch.device:
    """Return the device of all active parameters. Raises ValueError if they are on several devices."""
    active = [index for index, is_active in enumerate(layout.active) if is_active]
    device = params[active[0]].device if active else torch.device("cpu")
    for index in active:
        if params[index].device != device:
            raise ValueError(
                f"{label_in(layout.plan, index)} is on {params[index].device}, and {label_in(layout.plan, active[0])} "
                f"on {device}: hooks and shard_gradients() need all parameters on one device. Move them, or use neither"
            )
    return device
