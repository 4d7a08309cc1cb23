"""Flat buffers: the storage of a bucket layout, and tensors that are views of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from zeroshard_core.bucket import BucketLayout, Slot
from zeroshard_core.spec import TensorSpec, strides_are_dense


class FlatBuffer:
    """One flat tensor that holds others as views.

    Only :meth:`adopt` makes tensors views of it. The storage, its views and the adopted
    tensors share memory, so any code that holds one of them may write the elements. Writing through one does not
    advance the version counters of the others. A caller must advance them itself if autograd does not see its writes.

    Args:
        layout: where tensors lie.
        specs: the tensors of the plan that the layout was made for, by tensor index.
        device: the device on which to allocate the storage.

    Attributes:
        layout: where tensors lie.
        storage: the flat tensor, 1-D, of ``layout.numel`` elements. It starts as zeros, also in the padding.
    """

    def __init__(self, layout: BucketLayout, specs: Sequence[TensorSpec], device: torch.device) -> None:
        self.layout = layout
        self.storage = torch.zeros(layout.numel, dtype=layout.dtype, device=device)
        self._slots: dict[int, Slot] = {slot.tensor: slot for slot in layout.slots}
        self._specs = {index: specs[index] for index in self._slots}

    def view(self, tensor: int) -> torch.Tensor:
        """Return the view of a tensor's place, with the shape and strides of its spec.

        Raises:
            ValueError: if the layout has no place for this tensor.
        """
        if tensor not in self._slots:
            raise ValueError(f"tensor {tensor} has no place in this buffer, which holds {len(self._slots)} others")
        slot, spec = self._slots[tensor], self._specs[tensor]
        flat = self.storage[slot.offset : slot.offset + slot.numel]
        if spec.stride is None:
            return flat.view(spec.shape)
        return flat.as_strided(spec.shape, spec.stride, slot.offset)

    def adopt(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Copy tensors in, and make each a view of its place (``tensor.data = view``).

        Values do not change; the memory format becomes the format of the spec. Dimensions of size 1 keep their strides:
        these do not say where elements lie, but may tell kernels the memory format. A tensor may be adopted again, for
        instance after its ``.data`` was rebound.

        Args:
            tensors: tensors by index.

        Raises:
            ValueError: if the layout has no place for a tensor, or the tensor's shape, dtype or device differs from the
                spec. No tensor is changed then.
        """
        views = {index: _restrided(self.view(index), tensor) for index, tensor in tensors.items()}
        for index, tensor in tensors.items():
            self._check(index, tensor, views[index])
        for index, tensor in tensors.items():
            view = views[index]
            view.copy_(tensor.detach())
            tensor.data = view

    def _check(self, index: int, tensor: torch.Tensor, view: torch.Tensor) -> None:
        for what, found, expected in (
            ("shape", tuple(tensor.shape), tuple(view.shape)),
            ("dtype", tensor.dtype, view.dtype),
            ("device", tensor.device, view.device),
        ):
            if found != expected:
                raise ValueError(
                    f"tensor {index} {self._specs[index].name!r} has {what} {found}, but its place in the buffer is "
                    f"for {what} {expected}; lay out a new buffer for it"
                )


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor fills one unbroken range of memory, each element once (strided, non-overlapping, dense).

    >>> is_dense(torch.empty(2, 3).t()), is_dense(torch.empty(2, 3)[:, :2])
    (True, False)
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return tensor.is_contiguous() or strides_are_dense(tensor.shape, tensor.stride())


def storage_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 1-D alias of a dense tensor, with the elements in the order in which they lie in memory.

    >>> storage_view(torch.tensor([[1, 2], [3, 4]]).t())
    tensor([1, 2, 3, 4])

    Raises:
        ValueError: if the tensor has gaps or overlaps in memory, or is not strided.
    """
    if not is_dense(tensor):
        raise ValueError(
            f"a {tensor.layout} tensor of shape {tuple(tensor.shape)} with gaps or overlaps in memory has no flat "
            f"view; make a contiguous copy of it"
        )
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def _restrided(view: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the view, with the strides of ``like`` if they differ only in dimensions of size 1."""
    if like.layout is not torch.strided or like.shape != view.shape or like.stride() == view.stride():
        return view
    if all(size == 1 or a == b for size, a, b in zip(view.shape, like.stride(), view.stride(), strict=True)):
        return view.as_strided(view.shape, like.stride())
    return view
