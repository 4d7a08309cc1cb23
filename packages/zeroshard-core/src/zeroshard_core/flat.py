"""Flat buffers: the storage of a bucket layout, and tensors that are views of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from zeroshard_core.bucket import BucketLayout, Slot
from zeroshard_core.spec import TensorSpec, strides_are_dense


class FlatBuffer:
    """One flat tensor that holds others as views.

    Only :meth:`adopt` makes tensors views of it. They share memory with the storage and its views, but not the version
    counter: a caller whose writes autograd does not see must advance the counters of the others.

    Args:
        layout: the place of each tensor.
        specs: the tensors of the plan that the layout was made for, by tensor index.
        device: the device on which to allocate the storage.

    Attributes:
        layout: the place of each tensor.
        storage: the flat tensor, 1-D, of ``layout.numel`` elements. The padding is zeros. Places are undefined until
            their tensor is adopted.
    """

    def __init__(self, layout: BucketLayout, specs: Sequence[TensorSpec], device: torch.device) -> None:
        self.layout = layout
        # Only the padding is written, because zeros would take memory before the tensors give theirs back.
        self.storage = torch.empty(layout.numel, dtype=layout.dtype, device=device)
        end = 0
        for slot in sorted(layout.slots, key=lambda slot: slot.offset):
            self.storage[end : slot.offset].zero_()
            end = slot.offset + slot.numel
        self.storage[end:].zero_()
        self._slots: dict[int, Slot] = {slot.tensor: slot for slot in layout.slots}
        self._specs = {index: specs[index] for index in self._slots}

    def view(self, tensor: int) -> torch.Tensor:
        """Return a tensor's place as a view in the shape and strides of its spec; raise ValueError if it has none."""
        if tensor not in self._slots:
            raise ValueError(f"tensor {tensor} has no place in this buffer, which holds {len(self._slots)} others")
        slot, spec = self._slots[tensor], self._specs[tensor]
        flat = self.storage[slot.offset : slot.offset + slot.numel]
        if spec.stride is None:
            return flat.view(spec.shape)
        return flat.as_strided(spec.shape, spec.stride, slot.offset)

    def adopt(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Copy tensors in, and make each a view of its place (``tensor.data = view``).

        Values do not change; the memory format becomes the format of the spec. Dimensions of size 1 keep their strides,
        which may tell kernels the memory format. A tensor whose ``.data`` was rebound may be adopted again.

        Args:
            tensors: tensors by index.

        Raises:
            ValueError: if the layout has no place for a tensor, or the tensor's shape, dtype or device differs from its
                place. No tensor is changed then.
        """
        places = [(tensor, self._place(index, tensor)) for index, tensor in tensors.items()]
        for tensor, view in places:
            view.copy_(tensor.detach())
            tensor.data = view

    def _place(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view of a tensor's place, with the tensor's strides in dimensions of size 1."""
        view = self.view(index)
        for what, found, expected in (
            ("shape", tuple(tensor.shape), tuple(view.shape)),
            ("dtype", tensor.dtype, view.dtype),
            ("device", tensor.device, view.device),
        ):
            if found != expected:
                named = f"tensor {index} {self._specs[index].name!r}"
                raise ValueError(f"{named} has {what} {found}, but its place in the buffer is for {what} {expected}")
        if tensor.layout is not torch.strided:
            return view
        dims = zip(view.shape, tensor.stride(), view.stride(), strict=True)
        has_equal_strides = all(size == 1 or theirs == ours for size, theirs, ours in dims)
        return view.as_strided(view.shape, tensor.stride()) if has_equal_strides else view


def is_dense(tensor: torch.Tensor) -> bool:
    """Return True if a tensor fills one unbroken range of memory, each element once (strided, non-overlapping, dense).

    >>> is_dense(torch.empty(2, 3).t()), is_dense(torch.empty(2, 3)[:, :2])
    (True, False)
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return tensor.is_contiguous() or strides_are_dense(tensor.shape, tensor.stride())


def storage_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 1-D alias of a dense tensor, with the elements in memory order; raise ValueError if it is not dense.

    >>> storage_view(torch.tensor([[1, 2], [3, 4]]).t())
    tensor([1, 2, 3, 4])
    """
    if not is_dense(tensor):
        raise ValueError(
            f"a {tensor.layout} tensor of shape {tuple(tensor.shape)} with gaps or overlaps has no flat view"
        )
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))
