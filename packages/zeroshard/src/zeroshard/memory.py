"""Where parameters lie in memory: elements that share it are refused, for a step would write them from two sides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from zeroshard_core import is_dense


def lies_flat(param: torch.Tensor) -> bool:
    """Tell whether a parameter's values are those of one unbroken range of memory, and can be sent and cut there.

    Not so with gaps or overlaps, and in conjugate and negative views: there lie other values than are read.
    """
    return is_dense(param) and not param.is_conj() and not param.is_neg()


@dataclass(frozen=True, eq=False)
class _Span:
    """The bytes from a parameter's first element to its last, and where it stands."""

    index: int
    title: str
    param: torch.Tensor
    start: int
    stop: int


def refuse_shared_memory(groups: Sequence[Mapping[str, Any]], active: Sequence[bool]) -> None:
    """Raise if elements of parameters share memory: two owners, or one twice, would step them from the others' values.

    Parameters that lie in one storage without touching each other are fine, as columns of one matrix.

    Args:
        groups: param groups.
        active: per parameter, whether a step may change it; others may lie anywhere.

    Raises:
        ValueError: naming the two parameters, or the one whose own elements share memory.
    """
    spans: list[_Span] = []
    index = 0
    for number, group in enumerate(groups):
        names = group.get("param_names")
        for position, param in enumerate(group["params"]):
            on_record = param.layout is torch.strided and param.device.type != "meta" and param.numel() > 0
            if active[index] and on_record:
                title = f"{position} of group {number}" + (f" ({names[position]!r})" if names is not None else "")
                spans.append(_span(index, title, param))
            index += 1
    for neighbours in _reaching_into_each_other(spans):
        if len(neighbours) > 1 or not is_dense(neighbours[0].param):
            _refuse_touching(neighbours)


def _span(index: int, title: str, param: torch.Tensor) -> _Span:
    last = sum((size - 1) * step for size, step in zip(param.shape, param.stride(), strict=True))
    start = param.data_ptr()
    return _Span(index, title, param, start, start + (last + 1) * param.element_size())


def _reaching_into_each_other(spans: Iterable[_Span]) -> list[list[_Span]]:
    """Parts of ``spans`` between which there is no memory that two of them span."""
    found: list[list[_Span]] = []
    reached: tuple[str, int] = ("", 0)
    for span in sorted(spans, key=lambda span: (str(span.param.device), span.start)):
        device = str(span.param.device)
        if found and reached[0] == device and span.start < reached[1]:
            found[-1].append(span)
            reached = device, max(reached[1], span.stop)
        else:
            found.append([span])
            reached = device, span.stop
    return found


def _refuse_touching(spans: Sequence[_Span]) -> None:
    """Raise if two elements lie in the same byte, with a map of all bytes that the spans reach."""
    first = min(span.start for span in spans)
    taken = torch.zeros(max(span.stop for span in spans) - first, dtype=torch.bool, device="cpu")
    for number, span in enumerate(spans):
        own = _bytes_of(span, taken, first)
        if bool(own.any()):
            for other in spans[:number]:
                taken.zero_()
                _bytes_of(other, taken, first).fill_(True)
                if bool(own.any()):
                    one, two = sorted((span, other), key=lambda each: each.index)
                    raise ValueError(
                        f"parameter {one.title} and parameter {two.title} share memory: use one Parameter in both "
                        f"places of the model, which then has one owner, or give one of them memory of its own"
                    )
        before = int(taken.sum())
        repeated = any(step == 0 and size > 1 for size, step in zip(own.shape, own.stride(), strict=True))
        if not repeated:
            own.fill_(True)
        if int(taken.sum()) - before != own.numel():
            raise ValueError(
                f"parameter {span.title}, of shape {tuple(span.param.shape)} and strides {span.param.stride()}, has "
                f"elements that share memory, as those of an expanded tensor do: give each its own with clone() or "
                f"contiguous()"
            )


def _bytes_of(span: _Span, taken: torch.Tensor, first: int) -> torch.Tensor:
    """The part of the map that belongs to one parameter: its shape, and one more dimension for an element's bytes."""
    size = span.param.element_size()
    steps = [step * size for step in span.param.stride()]
    return taken.as_strided((*span.param.shape, size), (*steps, 1), span.start - first)
