"""The tables at the end of a run."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from verdict import Found

MEGA = 1e6


def show(found: Found, console: Console) -> None:
    """Print both tables and what they mean."""
    console.print(_training_table(found))
    console.print(
        "Both trained side by side on the same batches with DDP. zeroshard sends each gradient to its owner, and "
        "parameters back: what it sent is counted. What DDP's all-reduce sends is computed, for a ring. Times are "
        "medians on this machine while both ran; they are no benchmark.",
        highlight=False,
        style="dim",
    )
    console.print(_resume_table(found))
    console.print(
        "Resumed from the consolidated state, on the same batches. Another number of ranks sums gradients in another "
        "order, so there values agree up to rounding, not bit for bit. The difference is the largest of any "
        "parameter, and as L2 norm relative to the distance that training moved since the checkpoint.",
        highlight=False,
        style="dim",
    )
    for failure in found.failures():
        console.print(f"[bold red]FAILED[/]: {failure}", highlight=False)


def _training_table(found: Found) -> Table:
    first = found.training[0]
    table = Table(
        title=f"{escape(found.optimizer)}, {first.parameters / MEGA:.1f} M parameters, {found.ranks} ranks, "
        f"partition {found.partition}, {len(first.sharded.losses)} steps",
        title_justify="left",
    )
    table.add_column("")
    table.add_column("unsharded", justify="right")
    table.add_column("zeroshard", justify="right")
    contenders = (first.plain, first.sharded)
    table.add_row("loss, first step", *(f"{one.losses[0]:.6f}" for one in contenders))
    table.add_row("loss, last step", *(f"{one.losses[-1]:.6f}" for one in contenders))
    equal = "  (equal bit for bit)" if found.difference == 0.0 else ""
    table.add_row("largest parameter difference", "", f"{found.difference:.3g}{equal}", end_section=True)
    for rank, answer in enumerate(found.training):
        table.add_row(
            f"optimizer state, rank {rank}",
            f"{answer.plain.state_bytes / MEGA:.2f} MB",
            f"{answer.sharded.state_bytes / MEGA:.2f} MB (predicted: {answer.predicted.state_bytes / MEGA:.2f})",
            end_section=rank == found.ranks - 1,
        )
    for rank, answer in enumerate(found.training):
        predicted = f"(predicted: {answer.predicted.bytes_per_step / MEGA:.2f})"
        table.add_row(
            f"sent per step, rank {rank}",
            f"{answer.plain.bytes_per_step / MEGA:.2f} MB",
            f"{answer.sharded.bytes_per_step / MEGA:.2f} MB {predicted}",
            end_section=rank == found.ranks - 1,
        )
    table.add_row("time per step", *(f"{1000 * one.step_seconds:.0f} ms" for one in contenders))
    table.add_row("  of it optimizer.step()", *(f"{1000 * one.update_seconds:.0f} ms" for one in contenders))
    table.add_row("consolidate and save", "", f"{first.checkpoint_seconds:.2f} s")
    return table


def _resume_table(found: Found) -> Table:
    table = Table(title=f"Training on from the checkpoint after step {found.steps}: loss", title_justify="left")
    table.add_column("step", justify="right")
    continuations = (found.again, found.resumed, found.plain)
    for title in ("uninterrupted", f"{found.ranks} ranks", f"{found.resume_ranks} ranks", f"plain {found.classes}"):
        table.add_column(title, justify="right")
    uninterrupted = found.training[0].sharded.losses[found.steps :]
    for number, loss in enumerate(uninterrupted):
        row = (loss, *(went.losses[number] for went in continuations))
        table.add_row(
            str(found.steps + number + 1),
            *(f"{value:.6f}" for value in row),
            end_section=number == len(uninterrupted) - 1,
        )
    table.add_row("difference", "", *(_difference(went.difference) for went in continuations))
    table.add_row("relative", "", *(f"{went.relative:.1g}" for went in continuations))
    return table


def _difference(value: float) -> str:
    return "0 (bit for bit)" if value == 0.0 else f"{value:.2g}"
