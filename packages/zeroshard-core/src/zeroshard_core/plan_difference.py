"""The first difference between two plans, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from zeroshard_core.spec import TensorSpec

_FIELDS = tuple(field.name for field in fields(TensorSpec) if field.compare and field.name != "name")


def tensor_difference(here: Sequence[TensorSpec], there: Sequence[TensorSpec]) -> str | None:
    """Name the first tensor that differs, and how; ``None`` if all are equal.

    A tensor whose name is at another position on the other side is reported as another order, one whose name is
    not there at all as missing.
    """
    for position, (ours, theirs) in enumerate(zip(here, there, strict=False)):
        if ours.name != theirs.name:
            return _name_difference(position, here, there)
        if ours != theirs:
            return f"tensor {position} {ours.name!r}: {field_difference(ours, theirs, _FIELDS)}"
    shorter = min(len(here), len(there))
    if len(here) != len(there):
        longer, side, other = (here, "here", "there") if len(here) > shorter else (there, "there", "here")
        return f"tensor {shorter} {longer[shorter].name!r} is {side} only; {other} are {shorter} tensors"
    return None


def field_difference(here: TensorSpec, there: TensorSpec, names: Sequence[str]) -> str | None:
    """Name the first of these fields that differs between two specs."""
    for name in names:
        ours, theirs = getattr(here, name), getattr(there, name)
        if ours != theirs:
            return f"{name} {ours} here, {theirs} there"
    return None


def owner_difference(
    tensors: Sequence[TensorSpec], here: Sequence[tuple[int, ...]], there: Sequence[tuple[int, ...]]
) -> str | None:
    """Name the first tensor whose owners differ between two plans for the same tensors."""
    for index, (ours, theirs) in enumerate(zip(here, there, strict=True)):
        if ours != theirs:
            named = f"tensor {index} {tensors[index].name!r}"
            return f"{named} belongs to {ranks_in_words(ours)} here, to {ranks_in_words(theirs)} there"
    return None


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return text such as ``"rank 3"`` or ``"ranks 0, 2, 1"``, in the order given; at most the first eight."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def _name_difference(position: int, here: Sequence[TensorSpec], there: Sequence[TensorSpec]) -> str:
    ours, theirs = here[position].name, there[position].name
    ours_there = next((i for i, spec in enumerate(there) if spec.name == ours), None)
    theirs_here = next((i for i, spec in enumerate(here) if spec.name == theirs), None)
    if ours_there is not None and theirs_here is not None:
        return (
            f"another order: tensor {position} is {ours!r} here, but {theirs!r} there, where {ours!r} is tensor "
            f"{ours_there}"
        )
    if theirs_here is not None:
        return f"tensor {position} {ours!r} is here only; there, tensor {position} is {theirs!r}"
    if ours_there is not None:
        return f"tensor {position} {theirs!r} is there only; here, tensor {position} is {ours!r}"
    return f"tensor {position} is {ours!r} here, {theirs!r} there"
