"""Peak memory of a rank over the parameters, by the number of ranks: DDP, its hook, sharded gradients, and FSDP2.

Each contender trains alone, on fresh ranks. A peak is that of the rank that holds most, above what was resident before
the model was built. It does not depend on what else the machine does.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from contenders import CONTENDERS, DDP
from race import memory
from resident import return_freed_memory
from rich.console import Console
from spawned import machine, on_ranks
from torch.multiprocessing.spawn import ProcessExitedException
from workloads import workload

LAYERS = 10
MODELS = {"mlp": (2, 4, 8), "wide-gpt": (2, 4)}
"""The numbers of ranks for each model: one of large tensors almost without activations, and one with activations."""
TRANSPORTS = {"messages": "0", "reads": "1"}
"""Values of ZEROSHARD_CROSS_MEMORY: whether ranks of one host read each other's memory."""
FSDP2 = "fsdp2"
SHARDED = ("sharded-split", "sharded-whole")
OTHERS = ("torch-zero-views", "owner-split", "owner-whole", "fairscale-sddp", "deepspeed-1", "deepspeed-2", FSDP2)
MOST_OF_FSDP2 = {"mlp": {"sharded-split": 1.05, "sharded-whole": 1.2}, "wide-gpt": dict.fromkeys(SHARDED, 1.0)}
"""By messages. By reads, one bucket more is in flight, because other ranks read it."""
_BUCKET_BYTES = 25 * 2**20
_ATTEMPTS = 3
"""Processes of FSDP2 sometimes abort at their end, when torch frees its threads."""


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(MODELS)}; both by default")] = None,
    ranks: Annotated[list[int] | None, typer.Option(help="only these numbers of ranks")] = None,
    transport: Annotated[list[str] | None, typer.Option(help=f"only these of {', '.join(TRANSPORTS)}")] = None,
    contender: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(CONTENDERS)}")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures to this file")] = None,
) -> None:
    """Measure and compare; the exit status is 1 if a bound is missed."""
    if unknown := {*(model or ())} - {*MODELS} or {*(contender or ())} - {*CONTENDERS}:
        raise typer.BadParameter(f"there is no {', '.join(sorted(unknown))}")
    chosen = [name for name in (DDP, *OTHERS, *SHARDED) if name in (contender or (DDP, *OTHERS, *SHARDED))]
    return_freed_memory()
    rows: list[dict[str, Any]] = []
    for name in model or MODELS:
        sizes = workload(name, LAYERS).sizes()
        for count in [count for count in MODELS[name] if count in (ranks or MODELS[name])]:
            for each in chosen:
                for by in [by for by in _transports(each) if by in (transport or TRANSPORTS)]:
                    typer.echo(f"{name}, {count} ranks, {each}, {by}", err=True)
                    found = _measured(each, name, count, by)
                    rows.append({"model": name, "ranks": count, "contender": each, "by": by, **found})
                    if "peaks" in found:
                        rows[-1]["to_parameters"] = max(found["peaks"]) / sum(sizes)
    for row in rows:
        row["most"] = most_of(row, rows)
    command = shlex.join(["python", "tools/bench/peaks.py", *sys.argv[1:]])
    result = {"program": "peaks", "command": command, "machine": machine(), "rows": rows}
    Console().print(table(rows), markup=False, highlight=False, soft_wrap=True)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1), encoding="utf-8")
    met = [row["to_parameters"] <= row["most"] for row in rows if row["most"] is not None]
    raise typer.Exit(0 if all(met) else 1)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the figures as a table in Markdown: a line for each contender, and a column for each number of ranks."""
    columns = [*dict.fromkeys((row["model"], row["ranks"]) for row in rows)]
    heading = ["contender", "by", *(f"{model} N={ranks}" for model, ranks in columns)]
    lines = [_line(heading), _line(["---"] * 2 + ["---:"] * len(columns))]
    for name, by in dict.fromkeys((row["contender"], row["by"]) for row in rows):
        own = {(row["model"], row["ranks"]): row for row in rows if (row["contender"], row["by"]) == (name, by)}
        lines.append(_line([name, by, *(_cell(own.get(column)) for column in columns)]))
    errors = dict.fromkeys(f"{row['contender']}: {row['error']}" for row in rows if "error" in row)
    return "\n".join([*lines, *errors])


def _transports(name: str) -> tuple[str, ...]:
    """Return how ranks may exchange tensors of a contender; torch's own collectives are messages."""
    return (*TRANSPORTS,) if name.startswith(("owner-", "sharded-")) else ("messages",)


def _measured(name: str, model: str, ranks: int, by: str) -> dict[str, Any]:
    if not CONTENDERS[name].is_installed:
        return {"error": "not installed"}
    os.environ["ZEROSHARD_CROSS_MEMORY"] = TRANSPORTS[by]
    found: dict[str, Any] = {}
    for _ in range(_ATTEMPTS):
        try:
            found = on_ranks(memory, ranks, name, model, LAYERS)
        except ProcessExitedException as error:
            found = {"error": str(error)}
        else:
            break
    return {"peaks": [peak["overall"] for peak in found["peaks"]]} if "peaks" in found else {"error": found["error"]}


def most_of(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return what the peak of a contender may be at most, over the parameters; None if there is no bound."""
    [theirs] = [
        other["to_parameters"]
        for other in rows
        if other["contender"] == FSDP2 and "peaks" in other
        and (other["model"], other["ranks"]) == (row["model"], row["ranks"])
    ] or [None]  # fmt: skip
    if theirs is None or "peaks" not in row or row["contender"] not in SHARDED:
        return None
    sizes = workload(row["model"], LAYERS).sizes()
    largest = max(sizes) if 2 * max(sizes) >= _BUCKET_BYTES else _BUCKET_BYTES
    more = largest / sum(sizes) if row["by"] == "reads" else 0
    return float(MOST_OF_FSDP2[row["model"]][row["contender"]] * theirs + more)


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None or "peaks" not in row:
        return ""
    bound = "" if row["most"] is None else f" (at most {row['most']:.2f})"
    return f"{row['to_parameters']:.2f}{bound}"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    typer.run(main)
