"""What a rank among thousands pays: processor time of a step, and memory, on torch's fake backend, which moves nothing.

200 tensors of (2048, 128) under ``partition="split"`` and fused Adam; all collectives of a step are issued, but the
all-gather copies nothing, see :mod:`host_time`. Memory is
the growth from before the optimizer is built to after 5 steps, against a plain Adam over one such tensor, each in a
fresh process.
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from time import process_time
from typing import Annotated, Any
from unittest import mock

import torch
import torch.distributed as dist
import typer
from host_time import gather_nothing
from resident import resident
from rich.console import Console
from spawned import machine
from torch.testing._internal.distributed.fake_pg import FakeStore
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import collectives

RANKS, MANY = 2048, 1000
TENSORS, SHAPE = 200, (2048, 128)
MOST_MILLISECONDS, MOST_MEGABYTES = 20, 32
STEPS = 5
TIMED = 21


def main(
    ranks: Annotated[list[int] | None, typer.Option(min=2, help="numbers of ranks that are made believe")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures to this file")] = None,
    process: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure both; the exit status is 1 if a bound is missed."""
    counts = ranks or [RANKS]
    if process:
        sys.stdout.write(json.dumps(_measured(counts[0], sharded=process == "sharded")))
        return
    found = {
        "program": "many_ranks",
        "command": shlex.join(["python", "tools/bench/many_ranks.py", *sys.argv[1:]]),
        "machine": machine(),
        "plain": _in_a_process("plain", counts[0]),
        "sharded": {str(count): _in_a_process("sharded", count) for count in counts},
    }
    Console().print(table_of_growth(found), markup=False, highlight=False)
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1), encoding="utf-8")
    met = [
        1e3 * figures["step_seconds"] <= MOST_MILLISECONDS and figures["megabytes"] <= MOST_MEGABYTES
        for count, figures in growth(found).items()
        if count >= MANY
    ]
    raise typer.Exit(0 if all(met) else 1)


def growth(found: dict[str, Any]) -> dict[int, dict[str, float]]:
    """Return the figures of each number of ranks, ``megabytes`` of memory beyond the plain optimizer's among them.

    Args:
        found: what :func:`main` has written.
    """
    plain = found["plain"]["grown_bytes"]
    return {
        int(count): {**figures, "megabytes": (figures["grown_bytes"] - plain) / 1e6}
        for count, figures in found["sharded"].items()
    }


def table_of_growth(found: dict[str, Any]) -> str:
    """Return a section in Markdown with command, machine and a table.

    Args:
        found: as for :func:`growth`.
    """
    described = ", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in found["machine"].items())
    lines = [
        f"### {TENSORS} tensors of {SHAPE}, fake backend",
        "",
        f"Command: `{found['command']}`",
        "",
        f"Machine: {described}",
        "",
        "| ranks | collectives | ms | MB |",
        "| ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {count:,} | {figures['collectives']} | {1e3 * figures['step_seconds']:.1f} | {figures['megabytes']:.1f} |"
        for count, figures in growth(found).items()
    ]
    bounds = f"at {MANY:,} ranks and more, at most {MOST_MILLISECONDS} ms and {MOST_MEGABYTES} MB"
    lines += ["", f"Collectives, and ms of processor time, are of one `step()`. Bounds: {bounds}."]
    return "\n".join(lines) + "\n"


def _in_a_process(name: str, ranks: int) -> Any:  # noqa: ANN401 - what it has written as JSON
    command = [sys.executable, __file__, "--ranks", str(ranks), "--process", name]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _measured(ranks: int, *, sharded: bool) -> dict[str, float]:
    torch.set_num_threads(1)
    parameters = [torch.nn.Parameter(torch.zeros(SHAPE)) for _ in range(TENSORS if sharded else 1)]
    gradient = torch.zeros(SHAPE)
    for parameter in parameters:
        parameter.grad = gradient
    if sharded:
        dist.init_process_group("fake", rank=ranks // 2, world_size=ranks, store=FakeStore())
    before = resident("VmRSS")
    optimizer: torch.optim.Optimizer = (
        ZeroRedundancyOptimizer(parameters, torch.optim.Adam, partition="split", fused=True)
        if sharded
        else torch.optim.Adam(parameters, fused=True)
    )
    # For good: this process measures one optimizer.
    mock.patch.object(collectives, "all_gather", gather_nothing).start()
    for _ in range(STEPS):
        optimizer.step()
    grown = resident("VmRSS") - before
    calls = optimizer.traffic.of("broadcast").calls // STEPS if isinstance(optimizer, ZeroRedundancyOptimizer) else 0
    times = []
    for _ in range(TIMED):
        start = process_time()
        optimizer.step()
        times.append(process_time() - start)
    return {"grown_bytes": grown, "step_seconds": statistics.median(times), "collectives": calls}


if __name__ == "__main__":
    typer.run(main)
