"""Time consolidate_state_dict against torch's ZeroRedundancyOptimizer, on equal Adam state, in alternating pairs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
import zeroshard
from contest import Times, compared, take_turns
from progress_bar import calls
from rich.console import Console
from rich.table import Table
from spawned import machine, on_ranks
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

FASTER_THAN_TORCH = 50
ELEMENTS = 1024 * 1024
"""Elements of each parameter; in float32 Adam keeps 8 MB of state for it."""


def main(
    pairs: Annotated[int, typer.Option(min=6, help="alternating pairs; fewer than 6 have no interval")] = 15,
    ranks: Annotated[int, typer.Option(min=1, help="number of ranks")] = 2,
    megabytes: Annotated[int, typer.Option(min=8, help="Adam state of the whole model, in MiB")] = 256,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures to this file")] = None,
) -> None:
    """Time consolidate_state_dict(to=0) against torch's; the exit status is 1 if the bound is missed."""
    times: Times = on_ranks(_contest, ranks, megabytes, pairs)
    timing = compared(times, "torch", "zeroshard")
    met = timing.low >= FASTER_THAN_TORCH

    table = Table(title=f"consolidate_state_dict(to=0), {megabytes} MiB of Adam state, {ranks} ranks, {pairs} pairs")
    for heading in ("torch, ms", "zeroshard, ms", "times faster", "95 %", "at least", "met"):
        table.add_column(heading, justify="right")
    table.add_row(
        f"{timing.median_a * 1e3:.0f}",
        f"{timing.median_b * 1e3:.1f}",
        f"{timing.ratio:.1f}",
        f"{timing.low:.1f} - {timing.high:.1f}",
        str(FASTER_THAN_TORCH),
        "yes" if met else "no",
    )
    console = Console()
    console.print(table)
    console.print(machine())
    if json_file is not None:
        result = {"machine": machine(), "ranks": ranks, "pairs": pairs, "mebibytes": megabytes, "met": met}
        json_file.write_text(
            json.dumps({**result, "torch_to_zeroshard": asdict(timing), "seconds": times}), encoding="utf-8"
        )
    raise typer.Exit(0 if met else 1)


def _contest(megabytes: int, pairs: int) -> Times:
    count = max(1, megabytes // 8)
    theirs = TorchZero(_parameters(count), torch.optim.Adam)
    ours = zeroshard.ZeroRedundancyOptimizer(_parameters(count), torch.optim.Adam)
    theirs.step()
    ours.step()
    with calls("consolidation", 2 * (pairs + 1)) as advance:
        times = take_turns(
            {"torch": theirs.consolidate_state_dict, "zeroshard": ours.consolidate_state_dict},
            pairs,
            warm_up=1,
            advance=advance,
        )
    if dist.get_rank() == 0:
        _check_equal(ours.state_dict()["state"], theirs.state_dict()["state"])
    return times


def _parameters(count: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(ELEMENTS, generator=generator)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn(ELEMENTS, generator=generator)
    return parameters


def _check_equal(ours: Mapping[int, Mapping[str, Any]], theirs: Mapping[int, Mapping[str, Any]]) -> None:
    if ours.keys() != theirs.keys() or any(
        not torch.equal(ours[index][name], value)
        for index, entries in theirs.items()
        for name, value in entries.items()
    ):
        raise AssertionError("ours and torch's consolidate different states, so that their times cannot be compared")


if __name__ == "__main__":
    typer.run(main)
