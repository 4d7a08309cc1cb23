"""Plans as text: JSON for files, the bytes that a fingerprint covers, and the difference of two plans."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from zeroshard_core.spec import TensorSpec

if TYPE_CHECKING:
    from zeroshard_core.plan import Plan

FORMAT = "zeroshard-plan"
VERSION = 2
"""Reading a plan of version 1 raises: it listed ranges of elements, whose bounds could lie inside rows."""

UNEVEN = 3
"""The version of plans with ``starts``. Older releases must refuse these, because they would cut evenly. Other plans
keep version 2: older releases may ignore the fields that were added."""

_FIELDS = tuple(field.name for field in fields(TensorSpec) if field.compare and field.name != "name")


def canonical_bytes(plan: Plan) -> bytes:
    """Return bytes that are equal for plans with equal owners: ASCII JSON without spaces, fields in a fixed order."""
    tensors = [[*_fields(spec).values()] for spec in plan.tensors]
    content = [FORMAT, VERSION, plan.world_size, tensors, plan.owners]
    if plan.starts:
        content[1:] = [UNEVEN, *content[2:], plan.starts]
    return json.dumps(content, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def write_json(plan: Plan) -> str:
    """Return a plan as JSON text, from which :func:`read_json` returns the same fields."""
    content: dict[str, Any] = {"format": FORMAT, "version": UNEVEN if plan.starts else VERSION}
    content |= {"world_size": plan.world_size, "heaviest": plan.heaviest}
    content |= {name: getattr(plan, name) for name in _LISTS if name in _ALWAYS or getattr(plan, name)}
    content["tensors"] = [*map(_fields, plan.tensors)]
    return json.dumps(content, ensure_ascii=True, allow_nan=False)


def read_json(text: str) -> dict[str, Any]:
    """Read the fields of a plan, which may be inconsistent; raise ValueError if the text is damaged."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is no plan: the text is not valid JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f'this is no plan: it lacks "format": "{FORMAT}"')
    if (version := content.get("version")) not in (VERSION, UNEVEN):
        raise ValueError(f"this plan has version {version!r}, but this release reads version {VERSION} and {UNEVEN}")
    found: dict[str, Any] = {"world_size": _integer(content.get("world_size"), "world_size")}
    found["heaviest"] = _number(content.get("heaviest"), "heaviest")
    for name in [name for name in _LISTS if name in _ALWAYS or name in content]:
        items = enumerate(_list(content.get(name), name))
        found[name] = tuple([_LISTS[name](item, f"{name}[{i}]") for i, item in items])
    return found


def tensor_difference(here: Sequence[TensorSpec], there: Sequence[TensorSpec]) -> str | None:
    """Name the first tensor that differs, and how; ``None`` if all are equal.

    If the other side has the name at another position, the text reports another order; if it lacks the name, a missing
    tensor.
    """
    for position, (ours, theirs) in enumerate(zip(here, there, strict=False)):
        if ours.name != theirs.name:
            return _name_difference(position, here, there)
        if ours != theirs:
            pairs = {name: (getattr(ours, name), getattr(theirs, name)) for name in _FIELDS}
            name, (mine, other) = next((name, pair) for name, pair in pairs.items() if pair[0] != pair[1])
            return f"tensor {position} {ours.name!r}: {name} {mine} here, {other} there"
    shorter = min(len(here), len(there))
    if len(here) != len(there):
        longer, side, other = (here, "here", "there") if len(here) > shorter else (there, "there", "here")
        return f"tensor {shorter} {longer[shorter].name!r} is {side} only; {other} are {shorter} tensors"
    return None


def owner_difference(here: Plan, there: Plan) -> str | None:
    """Name the first tensor that has other owners or other parts in another plan for the same tensors."""
    for index, (ours, theirs) in enumerate(zip(here.owners, there.owners, strict=True)):
        if ours != theirs:
            named = f"tensor {index} {here.tensors[index].name!r}"
            return f"{named} belongs to {ranks_to_text(ours)} here, to {ranks_to_text(theirs)} there"
    for index, rows in enumerate(zip_longest(here.starts, there.starts, fillvalue=())):
        if rows[0] != rows[1]:
            ours_at, theirs_at = (f"rows {str([*starts[:8]])[1:-1]}" if starts else "even rows" for starts in rows)
            return f"tensor {index} {here.tensors[index].name!r} is cut at {ours_at} here, at {theirs_at} there"
    return None


def ranks_to_text(ranks: Sequence[int]) -> str:
    """Return text such as ``"rank 3"`` or ``"ranks 0, 2, 1"``. It keeps the order, and names at most eight ranks."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def _fields(spec: TensorSpec) -> dict[str, Any]:
    """The fields of a tensor in JSON. The fingerprint covers them in this order."""
    return {
        "name": spec.name,
        "shape": spec.shape,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "device": spec.device,
        "trainable": spec.trainable,
        "group": spec.group,
        "stride": spec.stride,
    }


def _spec(found: object, where: str) -> TensorSpec:
    item = _typed(found, where, kind=dict, expected="an object")
    stride = item.get("stride")
    return TensorSpec(
        name=_text(item.get("name"), f"{where}.name"),
        shape=_integers(item.get("shape"), f"{where}.shape"),
        dtype=_dtype(item.get("dtype"), f"{where}.dtype"),
        device=_text(item.get("device"), f"{where}.device"),
        trainable=_typed(item.get("trainable"), f"{where}.trainable", kind=bool, expected="true or false"),
        group=_integer(item.get("group"), f"{where}.group"),
        stride=None if stride is None else _integers(stride, f"{where}.stride"),
    )


def _dtype(item: object, where: str) -> torch.dtype:
    dtype = getattr(torch, item, None) if isinstance(item, str) else None
    if not isinstance(dtype, torch.dtype):
        raise _damaged(where, "a dtype of this release of torch", item)
    return dtype


def _typed(item: object, where: str, *, kind: Any, expected: str) -> Any:  # noqa: ANN401 - of that kind
    # bool is a subclass of int, but true is not a number in JSON.
    if not isinstance(item, kind) or (isinstance(item, bool) and kind is not bool):
        raise _damaged(where, expected, item)
    return item


_list = partial(_typed, kind=list, expected="a list")
_integer = partial(_typed, kind=int, expected="an integer")
_text = partial(_typed, kind=str, expected="a text")


def _integers(item: object, where: str) -> tuple[int, ...]:
    return tuple([_integer(number, f"{where}[{i}]") for i, number in enumerate(_list(item, where))])


def _number(item: object, where: str) -> float:
    number = _typed(item, where, kind=(int, float), expected="a number")
    with suppress(OverflowError):
        if math.isfinite(number):
            return float(number)
    raise _damaged(where, "a finite number", item)


def _damaged(where: str, expected: str, found: object) -> ValueError:
    shown = "nothing" if found is None else repr(found)[:80]
    return ValueError(f"this plan is damaged: {where} should be {expected}, but is {shown}")


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


_ALWAYS: Mapping[str, Any] = {"tensors": _spec, "owners": _integers, "loads": _number}
_LISTS = {**_ALWAYS, "starts": _integers, "state_loads": _number, "weights": _number, "classes": _text}
"""The lists of a plan, and how to read an item of each. Plans of older releases lack some of them."""
