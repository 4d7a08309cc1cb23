"""Plans as text: JSON for files, the bytes that a fingerprint covers, and the difference of two plans."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import zip_longest
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

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

_SPEC: Mapping[str, Any] = {name: kind for name, kind in get_type_hints(TensorSpec).items() if name != "numel"}
"""The types of the fields of a tensor. The fingerprint covers them in this order."""


def canonical_bytes(plan: Plan) -> bytes:
    """Return bytes that are equal for plans with equal owners: ASCII JSON without spaces, fields in a fixed order."""
    tensors = [[*_fields_of(spec).values()] for spec in plan.tensors]
    content = [FORMAT, UNEVEN if plan.starts else VERSION, plan.world_size, tensors, plan.owners]
    if plan.starts:
        content.append(plan.starts)
    return json.dumps(content, separators=(",", ":")).encode("ascii")


def write_json(plan: Plan) -> str:
    """Return a plan as JSON text, from which :func:`read_json` makes an equal plan."""
    content: dict[str, Any] = {"format": FORMAT, "version": UNEVEN if plan.starts else VERSION}
    for field in fields(plan):
        value = getattr(plan, field.name)
        # Older releases do not write the fields whose default is (), so leave them out if they are empty.
        if value or field.default != ():
            content[field.name] = value
    return json.dumps(content, default=_fields_of)


def read_json(text: str, plan_class: type[Plan]) -> Plan:
    """Make a plan from JSON text; raise ValueError if the text is damaged or describes no valid plan."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is not a plan: the text is not valid JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f'this is not a plan: it lacks "format": "{FORMAT}"')
    version = content.get("version")
    if version not in (VERSION, UNEVEN):
        raise ValueError(f"this plan has version {version!r}, but this release reads versions {VERSION} and {UNEVEN}")
    kinds = get_type_hints(plan_class)
    names = [field.name for field in fields(plan_class) if field.name in content or field.default != ()]
    return plan_class(**{name: _read(content.get(name), name, kinds[name]) for name in names})


def difference(here: Plan, there: Plan) -> str | None:
    """Describe the first difference; ``None`` if the fingerprints are equal."""
    if here.world_size != there.world_size:
        return f"world size {here.world_size} here, {there.world_size} there"
    return _tensor_difference(here.tensors, there.tensors) or _owner_difference(here, there)


def _tensor_difference(here: Sequence[TensorSpec], there: Sequence[TensorSpec]) -> str | None:
    for position, (ours, theirs) in enumerate(zip(here, there, strict=False)):
        if ours.name != theirs.name:
            has_same_names = {spec.name for spec in here} == {spec.name for spec in there}
            order = "another order: " if has_same_names else ""
            return f"{order}tensor {position} is {ours.name!r} here, {theirs.name!r} there"
        for name in _SPEC:
            mine, other = getattr(ours, name), getattr(theirs, name)
            if mine != other:
                return f"tensor {position} {ours.name!r}: {name} {mine} here, {other} there"
    if len(here) == len(there):
        return None
    longer, position, side = (here, len(there), "here") if len(here) > len(there) else (there, len(here), "there")
    return f"tensor {position} {longer[position].name!r} is {side} only"


def _owner_difference(here: Plan, there: Plan) -> str | None:
    for index, (ours, theirs) in enumerate(zip(here.owners, there.owners, strict=True)):
        if ours != theirs:
            named = f"tensor {index} {here.tensors[index].name!r}"
            return f"{named} belongs to {ranks_to_text(ours)} here, to {ranks_to_text(theirs)} there"
    for index, (ours, theirs) in enumerate(zip_longest(here.starts, there.starts, fillvalue=())):
        if ours != theirs:
            at = [f"rows {', '.join(map(str, rows[:8]))}" if rows else "even rows" for rows in (ours, theirs)]
            return f"tensor {index} {here.tensors[index].name!r} is cut at {at[0]} here, at {at[1]} there"
    return None


def ranks_to_text(ranks: Sequence[int]) -> str:
    """Return text such as ``"rank 3"`` or ``"ranks 0, 2, 1"``. It keeps the order, and names at most eight ranks."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def _fields_of(spec: TensorSpec) -> dict[str, Any]:
    return {**{name: getattr(spec, name) for name in _SPEC}, "dtype": str(spec.dtype).removeprefix("torch.")}


def _read(item: object, where: str, kind: Any) -> Any:  # noqa: ANN401 - of that kind
    """Convert an item of JSON to the type of a field; raise ValueError if it is of another type."""
    inner = get_args(kind)
    if NoneType in inner:
        return None if item is None else _read(item, where, inner[0])
    if inner:
        items = _typed(item, where, list)
        return tuple([_read(each, f"{where}[{position}]", inner[0]) for position, each in enumerate(items)])
    if kind is TensorSpec:
        found = _typed(item, where, dict)
        return TensorSpec(**{name: _read(found.get(name), f"{where}.{name}", of) for name, of in _SPEC.items()})
    return _typed(item, where, kind)


def _typed(item: object, where: str, kind: type) -> Any:  # noqa: ANN401 - of that kind
    found = getattr(torch, str(item), None) if kind is torch.dtype else item
    # JSON has integers that no float can hold.
    if kind is float and type(item) is int and abs(item) <= sys.float_info.max:
        found = float(item)
    if type(found) is not kind:
        shown = "missing" if item is None else repr(item)[:80]
        raise ValueError(f"this plan is damaged: {where} should be of type {kind.__name__}, but is {shown}")
    return found
