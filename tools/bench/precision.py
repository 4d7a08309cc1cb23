"""Train the quickstart's model in float32, and in bfloat16 with and without master weights, on the same batches.

Losses are taken by the parameters in float32, on batches that were not trained on: bfloat16 has a precision of 0.4 %.
"""

from __future__ import annotations

import copy
import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
import workloads  # noqa: F401 - finds the quickstart's modules
from byte_gpt import ByteGPT, Shape
from corpus import Batches, read_corpus
from drawing import OTHERS, OURS, PLAIN, picture
from progress_bar import calls
from rich.console import Console
from rich.table import Table
from spawned import machine, on_ranks
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_integrations.ddp import register_reduce_to_owner

SEQUENCES, EVERY, HELD_OUT = 12, 25, 20
AT_MOST = 0.01
REFERENCE, WITH_MASTERS = "float32", "bfloat16, master weights"


@dataclass(frozen=True)
class Contender:
    """The dtype of the parameters, whether they have master weights, and the color of the line."""

    dtype: torch.dtype
    master_weights: bool
    color: str


CONTENDERS = {
    REFERENCE: Contender(torch.float32, False, PLAIN),
    WITH_MASTERS: Contender(torch.bfloat16, True, OURS),
    "bfloat16": Contender(torch.bfloat16, False, OTHERS),
}
Losses = dict[str, list[float]]


def main(
    steps: Annotated[int, typer.Option(min=EVERY, help="of each training")] = 1000,
    ranks: Annotated[int, typer.Option(min=1, help="number of ranks")] = 2,
    lr: Annotated[float, typer.Option(help="learning rate; AdamW's own, 1e-3, is unstable without a warm-up")] = 1e-4,
    seed: Annotated[int, typer.Option(min=0, help="of weights and batches")] = 0,
    drawn: Annotated[Path | None, typer.Option("--picture", help="draw the losses to this file")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures to this file")] = None,
) -> None:
    """Train; the exit status is 1 if master weights end more than 1 % from float32."""
    console = Console()
    losses: Losses = on_ranks(_train, ranks, steps, lr, seed)
    table = Table(title=f"loss after {steps} steps on {ranks} ranks, AdamW, lr={lr}, seed {seed}")
    for heading in ("parameters", "nats per byte", "of float32's"):
        table.add_column(heading, justify="left" if heading == "parameters" else "right")
    ends = {name: found[-1] for name, found in losses.items()}
    for name, end in ends.items():
        table.add_row(name, f"{end:.4f}", f"{end / ends[REFERENCE] - 1:+.2%}")
    console.print(table)
    if drawn is not None:
        _draw(losses, drawn)
    met = abs(ends[WITH_MASTERS] / ends[REFERENCE] - 1) <= AT_MOST
    if json_file is not None:
        settings = {"program": "precision", "machine": machine(), "ranks": ranks, "lr": lr, "seed": seed}
        found = {**settings, "met": met, "losses": losses}
        json_file.write_text(json.dumps(found), encoding="utf-8")
    raise typer.Exit(0 if met else 1)


def _train(steps: int, lr: float, seed: int) -> Losses:
    shape, rank, ranks = Shape(), dist.get_rank(), dist.get_world_size()
    text = read_corpus(Path(sysconfig.get_path("stdlib")), least=shape.context + 1)
    batches = Batches(text, sequences=SEQUENCES, context=shape.context, seed=seed)
    losses: Losses = {}
    with calls("iterations", steps * len(CONTENDERS)) as advance:
        for name, contender in CONTENDERS.items():
            model = ByteGPT(shape, seed).to(contender.dtype)
            ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.AdamW, lr=lr, master_weights=contender.master_weights
            )
            register_reduce_to_owner(ddp, optimizer, norms=False)
            found = losses.setdefault(name, [])
            for step in range(1, steps + 1):
                optimizer.zero_grad()
                ddp(*batches.of(step, rank, ranks)).backward()
                optimizer.step()
                if step % EVERY == 0:
                    found.append(_held_out(model, batches, steps))
                advance()
    return losses


def _held_out(model: ByteGPT, batches: Batches, steps: int) -> float:
    """The mean loss over batches after those that are trained on; every rank takes its share of each."""
    exact = copy.deepcopy(model).float()
    with torch.no_grad():
        each = [
            exact(*batches.of(steps + number, dist.get_rank(), dist.get_world_size()))
            for number in range(1, HELD_OUT + 1)
        ]
    mean = torch.stack(each).mean()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def _draw(losses: Losses, file: Path) -> None:
    with picture(file, 6.4, 3.2) as (_, panel):
        for name, found in losses.items():
            steps = [EVERY * (1 + place) for place in range(len(found))]
            # A wide line beneath a thin one shows both.
            wide = 5.0 if name == REFERENCE else 1.5
            panel.plot(steps, found, color=CONTENDERS[name].color, linewidth=wide, label=f"{name}: {found[-1]:.3f}")
        panel.set(xlabel="step", ylabel="loss (nats per byte)", ylim=(None, losses[REFERENCE][1]))
        panel.grid(alpha=0.25)
        panel.legend(loc="upper right")


if __name__ == "__main__":
    typer.run(main)
