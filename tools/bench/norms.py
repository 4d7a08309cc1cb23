"""Measure the processor time that norms of gradients take, and clipping with them, for both partitions.

Every contender trains a model of its own, and takes turns with the others in every round. Processor time is that of all
threads of a rank, so that other work on the machine changes little; ratios are those of one round.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import typer
from contest import Times, take_turns
from progress_bar import calls
from rich.console import Console
from rich.table import Table
from spawned import machine, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_integrations.ddp import register_reduce_to_owner

ROWS, AT_MOST, WARM_UP = 64, 1.03, 3
PARTITIONS = ("whole", "split")


@dataclass(frozen=True)
class Model:
    """Square linear layers, one after the other.

    Attributes:
        title: in words.
        layers: how many.
        width: features in and out of each.
        bias: whether they have one.
    """

    title: str
    layers: int
    width: int
    bias: bool

    def build(self) -> nn.Module:
        """Return the model, with the same weights on every rank."""
        torch.manual_seed(0)
        made = nn.Sequential(*[nn.Linear(self.width, self.width, bias=self.bias) for _ in range(self.layers)])
        for param in made.parameters():
            # By nn.Linear's own weights values vanish over 200 layers, and denormal numbers take longer.
            nn.init.normal_(param, std=self.width**-0.5)
        return made


MODELS = {
    "many": Model("200 tensors of 10,000 elements", 200, 100, bias=False),
    "large": Model("10 x Linear(2000, 2000), 160 MB", 10, 2000, bias=True),
}


@dataclass(frozen=True)
class Contender:
    """How one iteration is made.

    Attributes:
        norms: whether the hook exchanges norms.
        clips: whether gradients are clipped by torch's function.
    """

    norms: bool = True
    clips: bool = False


WITHOUT, WITH = "norms=False", "norms=True"
CONTENDERS = {
    WITHOUT: Contender(norms=False),
    WITH: Contender(),
    "norms=True, torch's clip_grad_norm_": Contender(clips=True),
}


def main(
    model: Annotated[str, typer.Option(help=", ".join(MODELS))] = "many",
    pairs: Annotated[int, typer.Option(min=2, help="rounds")] = 15,
    ranks: Annotated[int, typer.Option(min=1, help="number of ranks")] = 2,
    in_a_row: Annotated[int, typer.Option(min=1, help="iterations in each turn")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures to this file")] = None,
) -> None:
    """Time iterations with and without norms; the exit status is 1 if norms take more than 3 % of one."""
    if model not in MODELS:
        raise typer.BadParameter(f"no model {model!r}; there are: {', '.join(MODELS)}", param_hint="--model")
    console = Console()
    table = Table(title=f"processor time: {MODELS[model].title}, {ranks} ranks, {pairs} rounds of {in_a_row}")
    for heading in ("partition", "", "ms", "without", "ratio", "quartiles"):
        table.add_column(heading, justify="right" if heading in ("ms", "without", "ratio") else "left")
    rows: list[dict[str, Any]] = []
    for partition in PARTITIONS:
        times: Times = on_ranks(_contest, ranks, model, partition, pairs, in_a_row)
        for name in CONTENDERS:
            if name != WITHOUT:
                rows.append({"partition": partition, "contender": name, **_compared(times, name, in_a_row)})
                table.add_row(*_cells(rows[-1]))
    console.print(table)
    console.print(machine())
    met = all(row["ratio"] <= AT_MOST for row in rows if row["contender"] == WITH)
    if json_file is not None:
        found = {"machine": machine(), "model": model, "title": MODELS[model].title, "ranks": ranks, "pairs": pairs}
        json_file.write_text(json.dumps({"program": "norms", **found, "met": met, "rows": rows}), encoding="utf-8")
    raise typer.Exit(0 if met else 1)


def _compared(times: Times, name: str, in_a_row: int) -> dict[str, float]:
    """Return the medians of a contender's times and of those without norms, in ms, and quartiles of their ratio."""
    low, ratio, high = statistics.quantiles(
        [a / b for a, b in zip(times[name], times[WITHOUT], strict=True)], method="inclusive"
    )
    ms, without = (1e3 / in_a_row * statistics.median(times[each]) for each in (name, WITHOUT))
    return {"ms": ms, "without": without, "ratio": ratio, "low": low, "high": high}


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    quartiles = f"{row['low']:.3f} - {row['high']:.3f}"
    return (
        row["partition"],
        row["contender"],
        f"{row['ms']:.1f}",
        f"{row['without']:.1f}",
        f"{row['ratio']:.3f}",
        quartiles,
    )


def _contest(model: str, partition: Literal["whole", "split"], rounds: int, iterations: int) -> Times:
    turns = {name: _turn(MODELS[model], partition, contender, iterations) for name, contender in CONTENDERS.items()}
    with calls(f"{partition}, turns", len(CONTENDERS) * (rounds + WARM_UP)) as advance:
        return take_turns(turns, rounds, warm_up=WARM_UP, advance=advance, processor_time=True)


def _turn(
    model: Model, partition: Literal["whole", "split"], contender: Contender, iterations: int
) -> Callable[[], object]:
    module = model.build()
    ddp = DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=1e-3, partition=partition)
    register_reduce_to_owner(ddp, optimizer, norms=contender.norms)
    inputs = torch.randn(ROWS, model.width, generator=torch.Generator().manual_seed(dist.get_rank()))

    def train() -> None:
        for _ in range(iterations):
            optimizer.zero_grad()
            ddp(inputs).square().mean().backward()
            if contender.clips:
                nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()

    return train


if __name__ == "__main__":
    typer.run(main)
