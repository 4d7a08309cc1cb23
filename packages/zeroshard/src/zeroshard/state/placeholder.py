"""Tensors with a shape and without values, which a state dict holds in place of values that other ranks own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from zeroshard_core import Shard

from zeroshard._torch_private import ATEN_TO_COPY, make_wrapper_subclass
from zeroshard.without_values import TensorWithoutValues

_aten = torch.ops.aten


class StatePlaceholder(TensorWithoutValues):
    """Replaces a state entry of a parameter if this rank does not hold all of its values.

    It has the shape, dtype and device of the whole entry, and no memory. It can be copied and moved to another device
    or dtype, which gives another one; whatever would read or pickle its values raises a RuntimeError that says what to
    do.

    Args:
        shape: of the whole entry.
        dtype: of its values.
        device: where they lie.
        title: names the entry in errors.
        part: this rank's rows of the entry, if it owns some.
        shard: which rows these are.

    Attributes:
        part, shard: as given; the part moves with the placeholder.
    """

    part: torch.Tensor | None
    shard: Shard | None
    _title: str

    @staticmethod
    def __new__(
        cls: type[StatePlaceholder],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        title: str,
        part: torch.Tensor | None = None,
        shard: Shard | None = None,
    ) -> StatePlaceholder:
        """Make a tensor without memory."""
        return make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)

    def __init__(
        self,
        shape: Sequence[int],  # noqa: ARG002 - as __new__
        dtype: torch.dtype,  # noqa: ARG002 - as __new__
        device: torch.device,  # noqa: ARG002 - as __new__
        title: str,
        part: torch.Tensor | None = None,
        shard: Shard | None = None,
    ) -> None:
        self._title, self.part, self.shard = title, part, shard

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # noqa: ANN401 - torch's
        """Describe it, without values."""
        part = "" if self.part is None else f", part={tuple(self.part.shape)}"
        return f"StatePlaceholder({self._title}, shape={tuple(self.shape)}, dtype={self.dtype}{part})"

    def __deepcopy__(self, memo: dict[int, Any]) -> StatePlaceholder:
        """Return another placeholder, with a copy of the part that this one holds."""
        part = None if self.part is None else self.part.detach().clone()
        return StatePlaceholder(self.shape, self.dtype, self.device, self._title, part, self.shard)

    data_ptr = TensorWithoutValues._read_memory

    def refusal(self, operation: str) -> RuntimeError:
        """Return the error for an operation, by its name."""
        return RuntimeError(
            f"{self._title} lies on other ranks, at least in part, and {operation} cannot be done with it here. Call "
            f"consolidate_state_dict(to=RANK) on all ranks beforehand: state_dict() on that rank then has all values, "
            f"until the next step"
        )


def has_placeholder(value: object) -> bool:
    """Whether an entry, or a container of entries, holds a placeholder."""
    if isinstance(value, Mapping):
        return any(map(has_placeholder, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(has_placeholder, value))
    return isinstance(value, StatePlaceholder)


def _copied(operator: Callable[..., torch.Tensor]) -> Callable[..., StatePlaceholder]:
    """Return a function that copies or moves a placeholder with its part."""

    def copied(held: StatePlaceholder, **options: Any) -> StatePlaceholder:  # noqa: ANN401 - of the operator
        part = None if held.part is None else operator(held.part, **options)
        device, dtype = options.get("device") or held.device, options.get("dtype") or held.dtype
        return StatePlaceholder(held.shape, dtype, device, held._title, part, held.shard)

    return copied


_COPIES = (_aten.detach.default, _aten.alias.default, _aten.clone.default, ATEN_TO_COPY)
StatePlaceholder.allowed = {operator: _copied(operator) for operator in _COPIES}
