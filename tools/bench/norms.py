"""Time what it costs that every rank learns the norms of gradients, and what clipping with torch's function costs.

The model is a chain of 200 matrices of 10,000 elements each. Every contender trains one of its own, and takes turns
with the others in every round.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from contest import Times, compared, take_turns
from progress_bar import calls
from rich.console import Console
from rich.table import Table
from spawned import machine, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_integrations.ddp import register_reduce_to_owner

MATRICES, WIDTH, ROWS = 200, 100, 64
AT_MOST = 1.05
WARM_UP = 5


@dataclass(frozen=True)
class Contender:
    """How one iteration is made.

    Attributes:
        is_sharded: whether the optimizer is sharded, with a hook.
        norms: whether the hook exchanges norms.
        clips: whether gradients are clipped by torch's function, or without norms by the optimizer's own.
    """

    is_sharded: bool = True
    norms: bool = True
    clips: bool = False


CONTENDERS = {
    "hook, norms=False": Contender(norms=False),
    "hook, norms=True": Contender(),
    "hook, optimizer.clip_grad_norm_": Contender(norms=False, clips=True),
    "hook, torch's clip_grad_norm_": Contender(clips=True),
    "DDP": Contender(is_sharded=False),
    "DDP, torch's clip_grad_norm_": Contender(is_sharded=False, clips=True),
}
PAIRS = {
    "norms=True": ("hook, norms=True", "hook, norms=False"),
    "clipping by torch's function": ("hook, torch's clip_grad_norm_", "hook, norms=False"),
    "clipping by the optimizer's": ("hook, optimizer.clip_grad_norm_", "hook, norms=False"),
    "clipping under DDP": ("DDP, torch's clip_grad_norm_", "DDP"),
}


def main(
    pairs: Annotated[int, typer.Option(min=6, help="rounds; fewer than 6 have no interval")] = 31,
    ranks: Annotated[int, typer.Option(min=1, help="number of ranks")] = 2,
    in_a_row: Annotated[int, typer.Option(min=1, help="iterations in each turn")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures to this file")] = None,
) -> None:
    """Time iterations with and without norms; the exit status is 1 if norms take more than 5 % of one."""
    console = Console()
    times: Times = on_ranks(_contest, ranks, pairs, in_a_row)
    table = Table(title=f"200 tensors of 10,000 elements, {ranks} ranks, {pairs} rounds")
    for heading in ("", "ms", "without", "ratio", "95 %"):
        table.add_column(heading, justify="right" if heading else "left")
    timings = {name: compared(times, *pair) for name, pair in PAIRS.items()}
    for name, found in timings.items():
        milliseconds = [f"{seconds / in_a_row * 1e3:.2f}" for seconds in (found.median_a, found.median_b)]
        table.add_row(name, *milliseconds, f"{found.ratio:.4f}", f"{found.low:.4f} - {found.high:.4f}")
    console.print(table)
    console.print(machine())
    met = timings["norms=True"].ratio <= AT_MOST
    if json_file is not None:
        ratios = {key: asdict(timing) for key, timing in timings.items()}
        result = {
            "program": "norms",
            "in_a_row": in_a_row,
            "machine": machine(),
            "ranks": ranks,
            "pairs": pairs,
            "met": met,
            "ratios": ratios,
            "seconds": times,
        }
        json_file.write_text(json.dumps(result), encoding="utf-8")
    raise typer.Exit(0 if met else 1)


def _contest(rounds: int, iterations: int) -> Times:
    turns = {name: _turn(contender, iterations) for name, contender in CONTENDERS.items()}
    with calls("iterations", len(CONTENDERS) * (rounds + WARM_UP)) as advance:
        return take_turns(turns, rounds, warm_up=WARM_UP, advance=advance)


def _turn(contender: Contender, iterations: int) -> Callable[[], object]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(MATRICES)])
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if contender.is_sharded:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1e-3)
        register_reduce_to_owner(ddp, optimizer, norms=contender.norms)
    inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))

    def train() -> None:
        for _ in range(iterations):
            optimizer.zero_grad()
            ddp(inputs).square().mean().backward()
            if contender.clips and isinstance(optimizer, ZeroRedundancyOptimizer) and not contender.norms:
                optimizer.clip_grad_norm_(1.0)
            elif contender.clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return train


if __name__ == "__main__":
    typer.run(main)
