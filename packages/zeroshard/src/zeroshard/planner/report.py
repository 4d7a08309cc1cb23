"""Shows a comparison as a table, as JSON and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from zeroshard_core import RankBytes

from zeroshard.byte_units import format_bytes
from zeroshard.planner.comparison import Row
from zeroshard.planner.models import InputError, Model

SCHEMA = 1
"""The version of the JSON. A change must raise it if a name changes its meaning, or is removed."""

NOT_COUNTED = (
    "Not counted: activations, the device's context, NCCL's buffers, fragmentation.\n"
    "With DDP's gradient_as_bucket_view=True; without it, gradients take twice as much.\n"
    "+grads: gradients are sharded too, by shard_gradients() in place of DDP."
)
BY_ARITHMETIC = "* by the same arithmetic, not run; FSDP2 without the layers that it has gathered"


def table(rows: Iterable[Row], memory: int | None) -> Table:
    """Return a table with a line for each row, in at most 80 columns. Each number is the largest of any rank."""
    found = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("ranks", "partition"):
        found.add_column(name, no_wrap=True)
    for name in ("state", "peak", "work", "sent", "sent, all", *(["left"] if memory is not None else [])):
        found.add_column(name, justify="right", no_wrap=True)
    for _, of_count in groupby(rows, key=lambda row: row.count):
        found.add_section()
        for row in of_count:
            found.add_row(str(row.count), row.name + "*" * row.is_arithmetic, *_cells(row, memory))
    return found


def _cells(row: Row, memory: int | None) -> list[str]:
    if not row.ranks:
        return ["refused"]
    state, peak = max(rank.state for rank in row.ranks), row.largest.total
    work = f"{row.plan.imbalance:.2f}" if row.plan is not None else ""
    found = [format_bytes(state), format_bytes(peak), work, format_bytes(max(row.sent)), format_bytes(sum(row.sent))]
    if memory is not None:
        left = format_bytes(memory - peak)
        found.append(f"[red]{left}[/red]" if peak > memory else left)
    return found


def as_json(model: Model, rows: Iterable[Row], memory: int | None, advice: Mapping[str, str]) -> Mapping[str, Any]:
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
        "left": memory - row.largest.total if memory is not None and row.ranks else None,
    }


def draw(rows: Sequence[Row], memory: int | None, file: Path) -> None:
    """Draw bytes by kind for the first number of ranks, and their sums for all; InputError if it cannot save them."""
    from matplotlib.figure import Figure

    by_name: dict[str, list[Row]] = {}
    for row in [row for row in rows if row.ranks]:
        by_name.setdefault(f"{row.optimizers}, {row.name}", []).append(row)
    figure = Figure(figsize=(11, 1.5 + 0.3 * max(8, len(by_name))), layout="constrained")
    bars, lines = figure.subplots(1, 2)
    below = [0.0] * len(by_name)
    highest = [at_the_highest(own[0].largest) for own in by_name.values()]
    for kind in fields(RankBytes):
        sizes = [getattr(largest, kind.name) / 1e9 for largest in highest]
        bars.barh([*by_name], sizes, left=below, label=kind.name)
        below = [sum(both) for both in zip(below, sizes, strict=True)]
    for name, own in by_name.items():
        lines.plot([row.count for row in own], [row.largest.total / 1e9 for row in own], marker="o", label=name)
    bars.invert_yaxis()
    bars.set(title=f"{rows[0].count} ranks", xlabel="GB on the rank that holds most, without activations")
    lines.set(title="sum", xlabel="ranks", ylabel="GB", ylim=(0, None), xticks=sorted({row.count for row in rows}))
    for panel, level in ((bars, bars.axvline), (lines, lines.axhline)):
        panel.legend(fontsize="small", loc="upper left", bbox_to_anchor=(0, -0.15), ncols=3, frameon=False)
        if memory is not None:
            level(memory / 1e9, color="red", linestyle=":")
    try:
        figure.savefig(file)
    except Exception as error:  # noqa: BLE001 - formats have errors of their own
        raise InputError(f"--picture {file}: {' '.join(str(error).split())}") from None


def at_the_highest(held: RankBytes) -> RankBytes:
    """Return what a rank holds when it holds most: the temporaries of an update, or transient buckets, but not both."""
    return replace(held, temporaries=0) if held.transient > held.temporaries else replace(held, transient=0)
