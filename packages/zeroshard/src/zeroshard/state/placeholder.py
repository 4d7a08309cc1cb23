"""What a state dict holds in place of values that other ranks own: tensors that have a shape and refuse to be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from zeroshard_core import Shard

from zeroshard._torch_private import ATEN_TO_COPY, make_wrapper_subclass

_aten = torch.ops.aten


class StatePlaceholder(torch.Tensor):
    """Stands for an entry of the state of a parameter of which this rank does not hold all values.

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

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stub leaves out that it is a classmethod
        cls,
        func: Any,  # noqa: ANN401 - an operator of torch
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what the operator returns
        """Copy and move it with the part that it holds; refuse all else."""
        if func in _COPIES:
            first, options = args[0], dict(kwargs or {})
            part = None if first.part is None else func(first.part, **options)
            device, dtype = options.get("device") or first.device, options.get("dtype") or first.dtype
            return cls(first.shape, dtype, device, first._title, part, first.shard)
        flat = [item for arg in args for item in (arg if isinstance(arg, (list, tuple)) else [arg])]
        found = next(item for item in flat if isinstance(item, StatePlaceholder))
        raise found._refusal(f"{func} cannot be done with it")

    def __deepcopy__(self, memo: dict[int, Any]) -> StatePlaceholder:
        """Return another placeholder, with a copy of the part that this one holds."""
        part = None if self.part is None else self.part.detach().clone()
        return StatePlaceholder(self.shape, self.dtype, self.device, self._title, part, self.shard)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # noqa: ANN401 - as in object
        """Refuse to be pickled.

        Raises:
            RuntimeError: always.
        """
        raise self._refusal("it cannot be saved from here")

    def numpy(self, *, force: bool = False) -> NoReturn:  # noqa: ARG002 - torch's
        """Refuse: there are no values.

        Raises:
            RuntimeError: always.
        """
        raise self._refusal("it cannot be read here")

    def tolist(self) -> NoReturn:
        """Refuse, as :meth:`numpy`."""
        raise self._refusal("it cannot be read here")

    def untyped_storage(self) -> NoReturn:
        """Refuse, as :meth:`numpy`."""
        raise self._refusal("it has no memory here")

    def share_memory_(self) -> NoReturn:
        """Refuse, as :meth:`numpy`."""
        raise self._refusal("it has no memory here")

    def _refusal(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"{self._title} lies on other ranks, at least in part, and {what}. Call consolidate_state_dict(to=RANK) on "
            f"all ranks beforehand: state_dict() on that rank then has all values, until the next step"
        )


def has_placeholder(value: object) -> bool:
    """Whether an entry, or a container of entries, holds a placeholder."""
    if isinstance(value, Mapping):
        return any(map(has_placeholder, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(has_placeholder, value))
    return isinstance(value, StatePlaceholder)


_COPIES = frozenset({_aten.detach.default, _aten.alias.default, _aten.clone.default, ATEN_TO_COPY})
