"""Shows a comparison as a table, as JSON and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

from zeroshard_core import RankBytes

from zeroshard.byte_units import format_bytes
from zeroshard.planner.comparison import DDP, Row, by_peak
from zeroshard.planner.models import InputError, Model

SCHEMA = 2
"""The version of the JSON. A change must raise it if a name changes its meaning, or is removed."""

NOT_COUNTED = (
    "Not counted: activations, the device's context, NCCL's buffers, fragmentation.\n"
    "With DDP's gradient_as_bucket_view=True; without it, gradients take twice as much.\n"
    "+grads: gradients are sharded too, by shard_gradients() in place of DDP.\n"
    "* by the same arithmetic, not run; FSDP2 without the layers that it has gathered."
)


def table(rows: Iterable[Row], memory: int | None) -> str:
    """Return a table of at most 80 columns: a line for each row, by peak. A number is the largest of any rank."""
    left = ["left"] if memory is not None else []
    lines = [["ranks", "partition", "peak", "to DDP", "state", "sent", *left]]
    for count, of_count in groupby(rows, key=lambda row: row.count):
        own = list(of_count)
        base = next(row.peak for row in own if row.partition == DDP)
        for row in sorted(own, key=by_peak):
            cells = ["refused"]
            if row.ranks:
                sizes = [
                    max(rank.state for rank in row.ranks),
                    max(row.sent),
                    *([memory - row.peak] if memory is not None else []),
                ]
                cells = [format_bytes(row.peak), f"{row.peak / base - 1:+.0%}", *map(format_bytes, sizes)]
            lines.append([str(count), row.name + "*" * row.is_arithmetic, *cells])
        lines.append([])
    widths = [max(len(cell) for cell in column) for column in zip_longest(*lines, fillvalue="")]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)  # the first two are names
            for column, (cell, width) in enumerate(zip(line, widths, strict=False))
        ).rstrip()
        for line in lines[:-1]
    )


def as_json(
    model: Model, rows: Iterable[Row], memory: int | None, advice: Mapping[str, Mapping[str, str]]
) -> Mapping[str, Any]:
    """Return what ``--json`` prints, without the command's options; sizes are bytes."""
    params = model.params.values()
    return {
        "schema": SCHEMA,
        "model": model.source,
        "notes": [*model.notes, NOT_COUNTED],
        "dtypes_of_model": [*dict.fromkeys(str(param.dtype).removeprefix("torch.") for param in params)],
        "memory": memory,
        "advice": dict(advice),
        "elements": sum(param.numel() for param in params),
        "frozen": sum(param.numel() for param in params if not param.requires_grad),
        "rows": [_row_as_json(row, memory) for row in rows],
    }


def _row_as_json(row: Row, memory: int | None) -> Mapping[str, Any]:
    plan = row.plan
    return {
        "optimizers": row.optimizers,
        "ranks": row.count,
        "partition": row.name,
        "sharded": row.sharded,
        "is_arithmetic": row.is_arithmetic,
        "note": row.note,
        "work": [*plan.loads] if plan is not None else [],
        "imbalances": dict(plan.imbalances) if plan is not None else {},
        "lower_bound": plan.lower_bound if plan is not None else None,
        "per_rank": [{**asdict(rank), "total": rank.total} for rank in row.ranks],
        "sent": [*row.sent],
        "left": memory - row.peak if memory is not None and row.ranks else None,
    }


def draw(rows: Sequence[Row], count: int, memory: int | None, file: Path) -> None:
    """Draw bytes by kind at ``count`` ranks, and their sums at all numbers; InputError if it cannot save the file."""
    from matplotlib.figure import Figure

    by_name: dict[str, list[Row]] = {}
    several = len({row.optimizers for row in rows}) > 1
    for row in sorted((row for row in rows if row.ranks), key=by_peak):
        by_name.setdefault(f"{row.optimizers}, {row.name}" if several else row.name, []).append(row)
    figure = Figure(figsize=(11, 2 + 0.35 * len(by_name)), layout="constrained")
    bars, lines = figure.subplots(1, 2)
    below = [0.0] * len(by_name)
    highest = [at_the_highest(next(row for row in own if row.count == count).largest) for own in by_name.values()]
    for kind in fields(RankBytes):
        sizes = [getattr(largest, kind.name) / 1e9 for largest in highest]
        bars.barh([*by_name], sizes, left=below, label=kind.name)
        below = [sum(both) for both in zip(below, sizes, strict=True)]
    for name, own in by_name.items():
        own.sort(key=lambda row: row.count)
        lines.plot([row.count for row in own], [row.peak / 1e9 for row in own], marker="o", label=name)
    bars.invert_yaxis()
    bars.set(title=f"Peak of a rank, {count} ranks", xlabel="GB, without activations")
    counts = sorted({row.count for row in rows})
    lines.set(title="Peak by the number of ranks", xlabel="ranks", ylabel="GB", ylim=(0, None), xticks=counts)
    for panel, level in ((bars, bars.axvline), (lines, lines.axhline)):
        if memory is not None:
            level(memory / 1e9, color="red", linestyle=":", label="memory")
        panel.legend(fontsize="small")
    try:
        figure.savefig(file)
    except Exception as error:  # noqa: BLE001 - formats have errors of their own
        raise InputError(f"--picture {file}: {' '.join(str(error).split())}") from None


def at_the_highest(held: RankBytes) -> RankBytes:
    """Return what a rank holds when it holds most: the temporaries of an update, or transient buckets, but not both."""
    return replace(held, temporaries=0) if held.transient > held.temporaries else replace(held, transient=0)
