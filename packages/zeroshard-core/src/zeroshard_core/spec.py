"""The items of a plan: descriptions of tensors, and the rows of a tensor that a rank owns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import index

import torch

ALIGNMENT = 64
"""Cuts lie at multiples of this many elements. Vectorized kernels round an incomplete last vector differently, but a
step of the parts must give the same bits as a step of the whole tensor."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Describes a tensor without its data.

    >>> TensorSpec("head.weight", (3, 4), torch.float32).nbytes
    48

    Attributes:
        name: fully qualified name.
        shape: sizes, in elements.
        dtype: element type.
        device: logical device, for example ``"cpu"`` or ``"cuda:0"``. Each rank numbers its devices in the order in
            which they appear, so that the number is equal on all ranks.
        trainable: whether the tensor requires a gradient.
        group: index of its param group.
        stride: ``None`` if contiguous, else the strides (in elements) of a non-overlapping and dense tensor.
        numel: number of elements, computed from the shape.

    Raises:
        TypeError, ValueError: if the dtype is not a torch.dtype, a size is negative, or strides leave gaps or overlap.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str = "cpu"
    trainable: bool = True
    group: int = 0
    stride: tuple[int, ...] | None = None
    # A field and not a property, because partitions read it many times.
    numel: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            text = f"the dtype of tensor {self.name!r} should be a torch.dtype such as torch.float32"
            raise TypeError(f"{text}, but is {self.dtype!r}")
        # torch.Size and numpy integers compare equal, but serialize differently.
        object.__setattr__(self, "shape", tuple([index(size) for size in self.shape]))
        object.__setattr__(self, "numel", math.prod(self.shape))
        if any(size < 0 for size in self.shape):
            raise ValueError(f"tensor {self.name!r} has a negative size in its shape {self.shape}")
        if self.stride is not None:
            object.__setattr__(self, "stride", tuple([index(step) for step in self.stride]))
            if not strides_are_dense(self.shape, self.stride):
                named = f"tensor {self.name!r} of shape {self.shape}"
                raise ValueError(f"{named} has strides {self.stride}, which leave gaps or overlap")

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def cut_dim(self) -> int:
        """The dimension along which the tensor may be cut: of those longer than 1, the one with the largest stride."""
        longer = [dim for dim, size in enumerate(self.shape) if size > 1]
        return max(longer, key=self.stride.__getitem__, default=0) if self.stride else min(longer, default=0)

    @property
    def rows(self) -> int:
        """The number of rows, between which cuts may lie: the size along :attr:`cut_dim`; 1 if 0-dimensional."""
        return self.shape[self.cut_dim] if self.shape else 1

    @property
    def cut_step(self) -> int:
        """Cuts lie at multiples of this many rows, which are a multiple of :data:`ALIGNMENT` elements. Often 1."""
        return ALIGNMENT // math.gcd(ALIGNMENT, self.numel // self.rows) if self.numel else 1

    def shard(self, *, tensor: int, rank: int, start: int = 0, stop: int | None = None) -> Shard:
        """Return the shard of rows ``start`` to ``stop`` (all by default), for this tensor's index and an owner."""
        rows = self.rows
        return Shard(tensor, rank, self.cut_dim, start, rows if stop is None else stop, self.numel // max(1, rows))


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a tensor that one rank owns: rows ``start`` to ``stop`` along ``dim``, or the whole tensor.

    The dimension is :attr:`TensorSpec.cut_dim`, so the rows are an n-dimensional box, and one range of the storage.

    >>> shard = TensorSpec("weight", (6, 4), torch.float32).shard(tensor=0, rank=1, start=2, stop=6)
    >>> shard.numel, shard.flat, shard.narrow(torch.zeros(6, 4)).shape
    (16, slice(8, 24, None), torch.Size([4, 4]))

    Attributes:
        tensor: index of the tensor in its plan.
        rank: the owner.
        dim: the dimension along which rows are counted.
        start, stop: first row, and one past the last.
        row_numel: number of elements of a row; 0 for an empty tensor, which also has an owner.
    """

    tensor: int
    rank: int
    dim: int
    start: int
    stop: int
    row_numel: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return (self.stop - self.start) * self.row_numel

    @property
    def flat(self) -> slice:
        """The range of its elements in storage order, counted from the tensor's first element in memory."""
        return slice(self.start * self.row_numel, self.stop * self.row_numel)

    def narrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view of its rows in ``tensor``, which has the shape of the whole tensor and any strides."""
        return tensor.narrow(self.dim, self.start, self.stop - self.start) if tensor.dim() else tensor


def strides_are_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return True if strides reach every element of one unbroken range exactly once.

    >>> strides_are_dense((2, 3), (1, 2)), strides_are_dense((2, 3), (4, 1))
    (True, False)
    """
    if len(shape) != len(stride):
        return False
    if 0 in shape:
        return True
    expected = 1
    # The stride of a dimension of size 1 is never used, so it may have any value.
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step != expected:
            return False
        expected *= size
    return True
