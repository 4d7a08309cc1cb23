"""Placeholder tensors, with a shape but no values on this rank: state entries, and the base class for gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch
from zeroshard_comm import Coordinator
from zeroshard_core import Shard

from zeroshard._torch_private import ATEN_PIN_MEMORY, ATEN_TO_COPY, make_wrapper_subclass, without_torch_function

_aten = torch.ops.aten

INCOMPLETE = "If torch.save() was writing a file, that file is now incomplete, and its previous content is lost"


class TensorWithoutValues(torch.Tensor):
    """Base class of placeholders for values on other ranks; made by ``make_wrapper_subclass``.

    A subclass lists the operators that it supports in ``allowed``, and says in :meth:`refusal` what to do instead.
    """

    allowed: ClassVar[Mapping[Any, Callable[..., Any]]] = {}
    __torch_function__ = without_torch_function  # type: ignore[assignment] # as in torch's own subclasses

    def refusal(self, operation: str) -> RuntimeError:
        """Return the error for ``operation``, the name of an operation that is not supported."""
        return RuntimeError(f"{operation} is not supported on a tensor whose values are on other ranks")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override] # noqa: ANN401 - torch's
        """Run the allowed operators; refuse all others."""
        known = cls.allowed.get(func)
        if known is not None:
            return known(*args, **(kwargs or {}))
        raise next(item for item in leaves([args, kwargs or {}]) if isinstance(item, cls)).refusal(str(func))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # noqa: ANN401 - as in object
        """Raise a RuntimeError, because there are no values to pickle."""
        raise self.refusal("pickling")

    def _read_memory(self, *_: object, **__: object) -> NoReturn:
        """Raise a RuntimeError, because there is no memory to read."""
        raise self.refusal("reading its memory")

    def share_memory_(self) -> NoReturn:
        """Raise a RuntimeError, because there is no memory to share."""
        raise self.refusal("sharing its memory")

    numpy = tolist = untyped_storage = __dlpack__ = __dlpack_device__ = _read_memory


class StatePlaceholder(TensorWithoutValues):
    """Replaces a state entry of a parameter if this rank does not hold all of its values.

    It has the shape, dtype and device of the whole entry, but memory only for its part. A copy of it, also on another
    device or in another dtype, is a placeholder too. torch.distributed.checkpoint calls ``__create_chunk_list__``,
    ``__create_write_items__`` and ``__get_tensor_shard__``, as it calls DTensor's, to find what this rank writes and
    reads: the part, or nothing.
    """

    part: torch.Tensor | None
    """This rank's rows of the entry; None if it owns no rows."""
    shard: Shard | None
    """The rows of the entry that ``part`` holds."""
    coordinator: weakref.ref[Coordinator] | None = None
    """Lets the other ranks raise the error of a write. The reference is weak, so that copies do not copy the object."""
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
        """Make a tensor without memory. Errors refer to it by ``title``."""
        made = make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        made._title, made.part, made.shard = title, part, shard
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # noqa: ANN401 - torch's
        """Describe the placeholder, without values."""
        part = "" if self.part is None else f", part={tuple(self.part.shape)}"
        return f"StatePlaceholder({self._title}, shape={tuple(self.shape)}, dtype={self.dtype}{part})"

    def __copy__(self) -> StatePlaceholder:
        """Return another placeholder for the same part."""
        return self._like(self.part)

    def __deepcopy__(self, memo: dict[int, Any]) -> StatePlaceholder:
        """Return another placeholder, with a copy of the part that this one holds."""
        return self._like(None if self.part is None else self.part.detach().clone())

    def _like(self, part: torch.Tensor | None, **options: Any) -> StatePlaceholder:  # noqa: ANN401 - of an operator
        """Return another placeholder for the same rows, with the dtype and the device in ``options``, if any."""
        dtype, device = options.get("dtype") or self.dtype, options.get("device") or self.device
        return StatePlaceholder(self.shape, dtype, device, self._title, part, self.shard)

    def __create_chunk_list__(self) -> list[Any]:
        """Return the part's place in the whole entry as a ChunkStorageMetadata; an empty list without a part."""
        if self.part is None or self.shard is None:
            return []
        # A local import, because it takes most of a second.
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        offsets = [self.shard.start if dim == self.shard.dim else 0 for dim in range(self.dim())]
        return [ChunkStorageMetadata(torch.Size(offsets), self.part.shape)]

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        """Return the part as a WriteItem of the entry named ``fqn``; an empty list without a part."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        if self.part is None:
            return []
        [chunk] = self.__create_chunk_list__()
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(self.part), self.shape)
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:  # noqa: ANN401 - a MetadataIndex
        """Return the part, for torch to read from or write to."""
        if self.part is None:
            raise self.refusal(f"reading {index.fqn}")
        return self.part

    def data_ptr(self) -> int:
        """Return 0, by which torch's stager for asynchronous checkpoints sees that there is no memory."""
        return 0

    def refusal(self, operation: str) -> RuntimeError:
        """Return the error for ``operation``. If the operation writes, report the error to the other ranks."""
        writes = operation.partition("aten.")[2].partition(".")[0].endswith("_")
        advice = (
            "Save it with torch.distributed.checkpoint; async_save() must use a thread, not a process, and needs "
            "async_stager=DefaultStager(...) if you pass a storage_writer. Or gather it by a call on all ranks: "
            "consolidate_state_dict(to=RANK), or by name zeroshard.full_optimizer_state_dict(model, optimizer)"
        )
        if writes:
            advice = (
                "To change the state in place, change the tensors in optimizer.optim.state.values() on every rank: "
                "each rank holds its own part there"
            )
        refused = f"{self._title} is partly or entirely on other ranks; {operation} is not supported on it here"
        error = RuntimeError(f"{refused}. {f'{INCOMPLETE}. ' if operation == 'pickling' else ''}{advice}")
        coordinator = self.coordinator() if self.coordinator is not None else None
        if writes and coordinator is not None:
            coordinator.tell(error)
        return error


def leaves(value: object) -> Iterator[object]:
    """Yield the values in an entry, or in nested containers of entries; for a wrapper subclass, its inner tensors."""
    value = inner_tensors(value) or value
    if not isinstance(value, (Mapping, list, tuple)):
        yield value
        return
    for item in value.values() if isinstance(value, Mapping) else value:
        yield from leaves(item)


def map_leaves(value: Any, call: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - a state entry
    """Return the same containers, with the result of ``call`` in place of each value."""
    if isinstance(value, Mapping):
        return {key: map_leaves(item, call) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        made = [map_leaves(item, call) for item in value]
        return made if isinstance(value, list) else tuple(made)
    return call(value)


def inner_tensors(value: object) -> dict[str, torch.Tensor]:
    """Return the tensors in a wrapper subclass, such as a quantized tensor, by name; empty for other values."""
    flatten = getattr(type(value), "__tensor_flatten__", None)
    return {name: getattr(value, name) for name in flatten(value)[0]} if flatten else {}


def has_placeholder(value: object) -> bool:
    """Return True if an entry, or a container of entries, holds a placeholder."""
    return any(isinstance(leaf, StatePlaceholder) for leaf in leaves(value))


def _copied(operator: Any, held: StatePlaceholder, *args: Any, **options: Any) -> StatePlaceholder:  # noqa: ANN401 - torch's
    """Copy or move a placeholder with its part."""
    part = None if held.part is None else operator(held.part, *args, **options)
    return held._like(part, **options)


def _new_empty(held: StatePlaceholder, size: Sequence[int], **options: Any) -> torch.Tensor:  # noqa: ANN401 - of the operator
    """Return a placeholder without a part. torch's stager then copies the attributes to it."""
    if tuple(size) != held.shape:
        raise held.refusal("new_empty() with another shape")
    made = held._like(None, **options)
    made.shard = None
    return made


def _copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy the part of one placeholder to the part of another placeholder for the same rows."""
    if not isinstance(source, StatePlaceholder):
        assert isinstance(target, StatePlaceholder)
        raise target.refusal("copying a tensor into it")
    if not isinstance(target, StatePlaceholder) or (target.shape, target.shard) != (source.shape, source.shard):
        raise source.refusal("copying it into another tensor")
    if target.part is not None and source.part is not None:
        target.part.copy_(source.part, non_blocking)
    return target


_COPIES = (
    _aten.detach.default,
    _aten.alias.default,
    _aten.clone.default,
    _aten.zeros_like.default,
    _aten.empty_like.default,
    ATEN_TO_COPY,
    ATEN_PIN_MEMORY,
)
StatePlaceholder.allowed = {operator: partial(_copied, operator) for operator in _COPIES} | {
    _aten.is_pinned.default: lambda held, device=None: held.part is not None and held.part.is_pinned(),  # noqa: ARG005 - torch's
    _aten.new_empty.default: _new_empty,
    _aten.copy_.default: _copy_,
}
