"""What a plan speaks of: tensors described by numbers alone, and ranges of their elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import index

import torch


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its data.

    >>> TensorSpec("head.weight", (3, 4), torch.float32).nbytes
    48

    Attributes:
        name: fully qualified name.
        shape: sizes, in elements.
        dtype: element type.
        device: logical device, for example ``"cpu"`` or ``"cuda:0"``. The number is the order of appearance on the
            rank, so that it is equal on all ranks.
        trainable: whether it takes part in training; a frozen tensor weighs nothing in a partition.
        group: index of its param group.
        stride: ``None`` if contiguous, else the strides (elements) of a non-overlapping and dense tensor.
        numel: number of elements; follows from the shape.

    Raises:
        ValueError: if a size is negative, or the strides leave gaps or overlap.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str = "cpu"
    trainable: bool = True
    group: int = 0
    stride: tuple[int, ...] | None = None
    # Kept rather than computed on demand: partitions ask for it many times.
    numel: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # torch.Size and numpy integers would compare equal but not serialize alike.
        object.__setattr__(self, "shape", tuple([index(size) for size in self.shape]))
        object.__setattr__(self, "numel", math.prod(self.shape))
        if any(size < 0 for size in self.shape):
            raise ValueError(f"tensor {self.name!r} has a negative size in its shape {self.shape}")
        if self.stride is not None:
            object.__setattr__(self, "stride", tuple([index(step) for step in self.stride]))
            if not strides_are_dense(self.shape, self.stride):
                raise ValueError(
                    f"tensor {self.name!r} of shape {self.shape} has strides {self.stride}, which leave gaps or "
                    f"overlap; describe a non-overlapping and dense tensor, or leave out its strides"
                )

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Shard:
    """The elements ``[start, stop)`` of a tensor in storage order, and the rank that owns them.

    A tensor without elements has the one shard ``(tensor, 0, 0, rank)``.

    Attributes:
        tensor: index of the tensor in its plan.
        start: first element.
        stop: one past the last element.
        rank: the owner.
    """

    tensor: int
    start: int
    stop: int
    rank: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides (elements) of a contiguous tensor of this shape.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def strides_are_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Tell whether strides reach every element of one unbroken range exactly once.

    >>> strides_are_dense((2, 3), (1, 2)), strides_are_dense((2, 3), (4, 1))
    (True, False)
    """
    if len(shape) != len(stride):
        return False
    if 0 in shape:
        return True
    expected = 1
    # The stride of a dimension of size 1 is never used, so it may be anything.
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step != expected:
            return False
        expected *= size
    return True
