"""Processor time of an iteration with sharded gradients over one with DDP and the hook that reduces to owners.

Contenders take turns in one run, on the same ranks, so that drift of the machine cancels out. Processor time of all
threads does not depend on how many ranks share a processor; ``training.py`` compares wall time.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from contenders import DDP
from contest import compared
from peaks import FSDP2, TRANSPORTS
from race import race
from rich.console import Console
from spawned import machine, on_ranks

LAYERS = 10
MOST = {"mlp": 1.15, "gpt": 1.15, "tensors": 1.25}
"""Bounds for each model: large tensors, a language model, and 200 small tensors."""
PARTITIONS = ("split", "whole")
_RANKS = 2
_ENOUGH = 2 / 3


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(MOST)}; all by default")] = None,
    transport: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(TRANSPORTS)}")] = None,
    runs: Annotated[int, typer.Option(min=1, help="of each case, in fresh processes")] = 3,
    rounds: Annotated[int, typer.Option(min=6, help="turns of each contender in a run")] = 60,
    others: Annotated[bool, typer.Option("--others", help=f"time {DDP} and {FSDP2} in the same runs")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures to this file")] = None,
) -> None:
    """Measure and compare; the exit status is 1 if a bound is below the interval in more than a third of the runs."""
    pairs = {f"sharded-{partition}": f"owner-{partition}" for partition in PARTITIONS}
    names = [*pairs.values(), *pairs, *([DDP, FSDP2] if others else [])]
    rows: list[dict[str, Any]] = []
    for each in model or MOST:
        for by in transport or TRANSPORTS:
            os.environ["ZEROSHARD_CROSS_MEMORY"] = TRANSPORTS[by]
            # Models of many small tensors take little time.
            in_a_row = 5 if each == "tensors" else 1
            for number in range(runs):
                typer.echo(f"{each}, by {by}, run {number + 1} of {runs}", err=True)
                raced = on_ranks(race, _RANKS, names, each, LAYERS, rounds, in_a_row, False, True)
                times = {name: found["seconds"] for name, found in raced.items() if "seconds" in found}
                wanted = [*pairs.items(), *((name, DDP) for name in (*pairs, FSDP2) if {name, DDP} <= {*times})]
                for name, base in wanted:
                    timing = compared(times, name, base)
                    most = MOST[each] if base != DDP else None
                    rows.append(
                        {"model": each, "by": by, "contender": name, "to": base, **asdict(timing), "most": most}
                    )
    command = shlex.join(["python", "tools/bench/sharded_time.py", *sys.argv[1:]])
    result = {"program": "sharded_time", "command": command, "machine": machine(), "rows": rows}
    Console().print(table(rows), markup=False, highlight=False, soft_wrap=True)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1), encoding="utf-8")
    raise typer.Exit(0 if met(rows) else 1)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the figures as a table in Markdown."""
    lines = ["| model | by | contender | to | ms | ratio (95 %) | at most |", "| --- " * 4 + "| ---: | ---: | ---: |"]
    lines += [
        f"| {row['model']} | {row['by']} | {row['contender']} | {row['to']} | {1e3 * row['median_a']:.1f} | "
        f"{row['ratio']:.3f} ({row['low']:.3f} - {row['high']:.3f}) | {row['most'] or ''} |"
        for row in rows
    ]
    return "\n".join(lines)


def met(rows: list[dict[str, Any]]) -> bool:
    """Return True if the lower end of the interval is at most the bound in two thirds of the runs of each case."""
    cases: dict[tuple[str, ...], list[bool]] = {}
    for row in rows:
        if row["most"] is not None:
            key = (row["model"], row["by"], row["contender"])
            cases.setdefault(key, []).append(row["low"] <= row["most"])
    return all(sum(runs) >= _ENOUGH * len(runs) for runs in cases.values())


if __name__ == "__main__":
    typer.run(main)
