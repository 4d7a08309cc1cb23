"""Processor time of ``step()`` with Muon for matrices and AdamW for the rest: unsharded, and by three partitions.

A model of 12 layers of width 512 with a vocabulary of 50,257. Each call is timed on all ranks, in turn with the others:
the processor time of the rank that takes the most of it, since the others wait for that one. All must come to bitwise
equal parameters.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from time import process_time
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
import zeroshard
from contest import Times, compared
from progress_bar import calls
from rich.console import Console
from rich.table import Table
from spawned import machine, on_ranks
from zeroshard_core import Cost, TensorSpec

WIDTH, LAYERS, VOCABULARY, POSITIONS = 512, 12, 50_257, 256
WARM_UP = 1


def round_robin(tensors: Sequence[TensorSpec], loads: Sequence[float], cost: Cost) -> list[tuple[int, ...]]:  # noqa: ARG001 - a strategy
    """Give each tensor to the next rank, matrices by size first."""
    order = sorted(range(len(tensors)), key=lambda index: (tensors[index].group, -tensors[index].numel))
    owners: list[tuple[int, ...]] = [()] * len(tensors)
    for place, index in enumerate(order):
        owners[index] = (place % len(loads),)
    return owners


def main(
    rounds: Annotated[int, typer.Option(min=6, help="calls of each; fewer than 6 have no interval")] = 7,
    ranks: Annotated[int, typer.Option(min=2, help="number of ranks")] = 2,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures to this file")] = None,
) -> None:
    """Compare partitions with unsharded optimizers."""
    times: Times = on_ranks(_contest, ranks, rounds)
    timings = {name: compared(times, name, "unsharded") for name in times}
    table = Table(title=f"processor time of step() of the busiest rank, {ranks} ranks, {rounds} rounds")
    for heading in ("", "ms", "of unsharded", "95 %"):
        table.add_column(heading, justify="right")
    for name, timing in timings.items():
        milliseconds = 1e3 * statistics.median(times[name])
        table.add_row(name, f"{milliseconds:.0f}", f"{timing.ratio:.3f}", f"{timing.low:.3f} - {timing.high:.3f}")
    Console().print(table)
    Console().print(machine())
    if json_file is not None:
        ratios = {name: asdict(timing) for name, timing in timings.items()}
        json_file.write_text(json.dumps({"machine": machine(), "ranks": ranks, "ratios": ratios}), encoding="utf-8")


def _contest(rounds: int) -> Times:
    models = {name: _parameters() for name in ("unsharded", "round-robin", "whole", "level")}
    steps: dict[str, Callable[[], object]] = {name: _step(name, params) for name, params in models.items()}
    times: Times = {name: [] for name in steps}
    with calls("several classes", len(steps) * (rounds + WARM_UP)) as advance:
        for number in range(-WARM_UP, rounds):
            for name in list(steps)[:: 1 if number % 2 == 0 else -1]:
                _set_gradients(models[name], number)
                dist.barrier()
                started = process_time()
                steps[name]()
                seconds = torch.tensor(process_time() - started, dtype=torch.float64)
                dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
                if number >= 0:
                    times[name].append(seconds.item())
                advance()
    first, *others = models.values()
    if not all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True)):
        raise AssertionError("contenders come to different parameters")
    return times


def _shapes() -> list[tuple[int, ...]]:
    layer: list[tuple[int, ...]] = [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
    small: list[tuple[int, ...]] = [(WIDTH,), (3 * WIDTH,), (WIDTH,), (WIDTH,), (4 * WIDTH,), (WIDTH,)]
    return [*layer * LAYERS, (VOCABULARY, WIDTH), (POSITIONS, WIDTH), *small * LAYERS]


def _parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(0.02 * torch.randn(shape, generator=generator)) for shape in _shapes()]


def _set_gradients(params: Sequence[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(100 + seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


def _step(name: str, params: list[torch.nn.Parameter]) -> Callable[[], object]:
    matrices, rest = params[: 4 * LAYERS], params[4 * LAYERS :]
    if name == "unsharded":
        plain = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=3e-4)]
        return lambda: [optimizer.step() for optimizer in plain]
    groups = [{"params": matrices, "optimizer_class": torch.optim.Muon, "lr": 0.02}, {"params": rest}]
    partition: Any = round_robin if name == "round-robin" else name
    return zeroshard.ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=3e-4, partition=partition).step


if __name__ == "__main__":
    typer.run(main)
