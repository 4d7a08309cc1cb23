"""A run of the training benchmark as a table: on the terminal, and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from pairs import PairedTiming
from rich.table import Table
from training_result import DDP, Entry, Result

Rows = list[list[str]]
_EMPTY = ""


def rows(result: Result) -> Rows:
    """Return the headings and a row for each contender that ran; empty columns are left out."""
    headings = [
        "contender", "ms", "/ torch", "/ DDP", "sent", "link", "/ ring", "peak", "/ P", "later", "apart",
    ]  # fmt: skip
    cells = [_row(result, entry) for entry in result.entries if entry.failure is None]
    kept = [column for column in range(len(headings)) if column == 0 or any(row[column] for row in cells)]
    return [[row[column] for column in kept] for row in (headings, *cells)]


def remarks(result: Result) -> list[str]:
    """Return a line for each contender that did not run, came to other parameters or has no memory to show."""
    found = []
    for entry in result.entries:
        disagrees = None if entry.agrees else "comes to other parameters, so that its times are of other work"
        memory = entry.memory_failure and f"its memory could not be measured: {entry.memory_failure}"
        found += [f"{entry.name}: {remark}" for remark in (entry.failure, disagrees, memory) if remark]
    return found


def table(result: Result) -> Table:
    """Return the table for a terminal."""
    headings, *cells = rows(result)
    made = Table(title=result.title, title_justify="left")
    for number, heading in enumerate(headings):
        made.add_column(
            heading, justify="right" if number else "left", no_wrap=heading in ("contender", "/ torch", "/ DDP")
        )
    for row in cells:
        made.add_row(*row)
    return made


def markdown(result: Result, level: int = 2, *, names_contenders: bool = True) -> str:
    """Return a section with command, machine and table.

    Args:
        result: of the run.
        level: of the heading.
        names_contenders: whether each contender is told in words.
    """
    headings, *cells = rows(result)
    machine = ", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in result.machine.items())
    ran = [f"- `{entry.name}`: {entry.what}" for entry in result.entries if entry.failure is None and names_contenders]
    listed = [*ran, *(f"- {remark}" for remark in remarks(result))]
    lines = [
        f"{'#' * level} {result.heading}",
        "",
        f"{result.size}, {result.rounds} rounds.",
        "",
        f"Command: `{result.command}`",
        "",
        f"Machine: {machine}",
        "",
        _line(headings),
        _line(["---"] + ["---:"] * (len(headings) - 1)),
        *map(_line, cells),
    ]
    lines += ["", *listed] if listed else []
    return "\n".join(lines) + "\n"


def _row(result: Result, entry: Entry) -> list[str]:
    seconds = result.median(entry)
    ms = _EMPTY if seconds is None else f"{1e3 * seconds:.1f}"
    peaks = entry.peaks or ()
    overall, settled = ([peak[name] for peak in peaks] for name in ("overall", "settled"))
    return [
        entry.name,
        ms,
        _ratio(result.ratio(entry, result.torch_zero)),
        _ratio(result.ratio(entry, DDP)),
        _megabytes(entry.counted),
        _megabytes(entry.wire),
        _times(entry.wire, result.all_reduce_bytes),
        _megabytes(overall),
        _times(overall, result.parameter_bytes),
        _megabytes(settled),
        _EMPTY if entry.difference is None else f"{entry.difference:.0e}",
    ]


def _ratio(timing: PairedTiming | None) -> str:
    return _EMPTY if timing is None else f"{timing.ratio:.2f} ({timing.low:.2f} - {timing.high:.2f})"


def _megabytes(sizes: Sequence[float] | None) -> str:
    """The mean over the ranks."""
    return f"{mean(sizes) / 1e6:.1f}" if sizes else _EMPTY


def _times(sizes: Sequence[float] | None, unit: float) -> str:
    return f"{mean(sizes) / unit:.2f}" if sizes and unit else _EMPTY


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
