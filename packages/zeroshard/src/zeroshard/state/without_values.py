"""Tensors that have a shape and no values on this rank: reading them raises an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch

from zeroshard._torch_private import without_torch_function


class TensorWithoutValues(torch.Tensor):
    """Base class of placeholders for values on other ranks; made by ``make_wrapper_subclass``.

    A subclass says in ``allowed`` which operators it knows, and in :meth:`refusal` what to do instead of all others.
    """

    allowed: ClassVar[Mapping[Any, Callable[..., Any]]] = {}
    __torch_function__ = without_torch_function  # type: ignore[assignment] # torch's own subclasses say the same

    def refusal(self, operation: str) -> RuntimeError:
        """Return the error for an operation, by its name."""
        return RuntimeError(f"{operation} cannot be done with a tensor whose values lie on other ranks")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stub leaves out that it is a classmethod
        cls,
        func: Any,  # noqa: ANN401 - an operator of torch
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what the operator returns
        """Run the allowed operators; refuse all others."""
        known = cls.allowed.get(func)
        if known is not None:
            return known(*args, **(kwargs or {}))
        flat = [
            item
            for arg in (*args, *(kwargs or {}).values())
            for item in (arg if isinstance(arg, (list, tuple)) else [arg])
        ]
        raise next(item for item in flat if isinstance(item, cls)).refusal(str(func))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # noqa: ANN401 - as in object
        """Refuse to be pickled.

        Raises:
            RuntimeError: always.
        """
        raise self.refusal("pickling")

    def _read_memory(self, *_: object, **__: object) -> NoReturn:
        """Refuse, as :meth:`__reduce_ex__`."""
        raise self.refusal("reading its memory")

    numpy = tolist = untyped_storage = share_memory_ = __dlpack__ = __dlpack_device__ = _read_memory
