"""What a rank among thousands pays: time of a step, and memory, on torch's fake backend, which moves nothing.

200 tensors of (2048, 128) under ``partition="split"`` and fused Adam; all collectives of a step are issued. Memory is
the growth from before the optimizer is built to after 5 steps, against a plain Adam over one such tensor, each in a
fresh process.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from resident import resident
from rich.console import Console
from torch.testing._internal.distributed.fake_pg import FakeStore
from zeroshard import ZeroRedundancyOptimizer

TENSORS, SHAPE = 200, (2048, 128)
MOST_MILLISECONDS, MOST_MEGABYTES = 20, 32
STEPS = 5
TIMED = 21


def main(
    ranks: Annotated[int, typer.Option(min=2, help="number of ranks that are made believe")] = 2048,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures to this file")] = None,
    process: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure both; the exit status is 1 if a bound is missed."""
    if process:
        sys.stdout.write(json.dumps(_measured(ranks, sharded=process == "sharded")))
        return
    figures = {}
    for name in ("plain", "sharded"):
        command = [sys.executable, __file__, "--ranks", str(ranks), "--process", name]
        figures[name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    milliseconds = figures["sharded"]["step_seconds"] * 1e3
    megabytes = (figures["sharded"]["grown_bytes"] - figures["plain"]["grown_bytes"]) / 1e6
    console = Console()
    console.print(f"{ranks} ranks, {figures['sharded']['collectives']} collectives a step")
    console.print(f"step: {milliseconds:.1f} ms, at most {MOST_MILLISECONDS}")
    console.print(f"memory beyond a plain Adam over one tensor: {megabytes:.1f} MB, at most {MOST_MEGABYTES}")
    if json_file is not None:
        json_file.write_text(json.dumps({"ranks": ranks, **figures}), encoding="utf-8")
    raise typer.Exit(0 if milliseconds <= MOST_MILLISECONDS and megabytes <= MOST_MEGABYTES else 1)


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
    for _ in range(STEPS):
        optimizer.step()
    grown = resident("VmRSS") - before
    calls = optimizer.traffic.of("share").calls // STEPS if isinstance(optimizer, ZeroRedundancyOptimizer) else 0
    times = []
    for _ in range(TIMED):
        start = perf_counter()
        optimizer.step()
        times.append(perf_counter() - start)
    return {"grown_bytes": grown, "step_seconds": statistics.median(times), "collectives": calls}


if __name__ == "__main__":
    typer.run(main)
