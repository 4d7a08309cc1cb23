"""Time step() alone against torch's ZeroRedundancyOptimizer, with and without bucket views.

All contenders own equal parameters and share one set of gradients, take turns within every round, and must hold
bitwise equal parameters in the end.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import zeroshard
from contest import Times, compared, take_turns
from pairs import PairedTiming
from progress_bar import calls
from rich.console import Console
from rich.table import Table
from spawned import machine, on_ranks
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

SLOWER_THAN_TORCH = 1.05
MORE_PROCESSOR_TIME = 1.10
WARM_UP = 3


@dataclass(frozen=True)
class Model:
    """Parameters to step, and how.

    Attributes:
        shapes: one for each parameter.
        fused: whether Adam is fused; its default implementation otherwise.
        in_groups: whether each parameter is in a group of its own.
        bound: the largest ratio to the better of torch's modes.
    """

    shapes: tuple[tuple[int, ...], ...]
    fused: bool
    in_groups: bool = False
    bound: float = SLOWER_THAN_TORCH


_SMALL = ((64, 64), (64,)) * 250
_LARGE = ((2000, 2000), (2000,)) * 20
MODELS = {
    "small": Model(_SMALL, fused=False),
    "small-fused": Model(_SMALL, fused=True),
    "large-fused": Model(_LARGE, fused=True),
    "medium-fused": Model(((10_000,),) * 200, fused=True),
    "rows-fused": Model(((512, 128),) * 200, fused=True),
    "groups": Model(((64,),) * 1000, fused=False, in_groups=True, bound=1.3),
}


@dataclass(frozen=True)
class Contender:
    """A way to step.

    Attributes:
        build: makes the optimizer from parameters and the arguments of Adam.
        judged: whether the bound is for it.
    """

    build: Callable[..., torch.optim.Optimizer]
    judged: bool = False


TORCH = {
    "torch": Contender(partial(TorchZero, optimizer_class=torch.optim.Adam)),
    "torch, views": Contender(partial(TorchZero, optimizer_class=torch.optim.Adam, parameters_as_bucket_view=True)),
}
OURS = {
    f"{partition}{', views' if views else ''}": Contender(
        partial(
            zeroshard.ZeroRedundancyOptimizer,
            optimizer_class=torch.optim.Adam,
            parameters_as_bucket_view=views,
            partition=partition,
        ),
        # The bound is for the default partition, which is torch's own; the other is shown for what it brings.
        judged=partition == "whole",
    )
    for partition in ("whole", "split")
    for views in (False, True)
}


def main(
    pairs: Annotated[int, typer.Option(min=6, help="rounds; fewer than 6 have no interval")] = 31,
    ranks: Annotated[int, typer.Option(min=1, help="number of ranks")] = 2,
    model: Annotated[list[str] | None, typer.Option(help=f"one or more of {', '.join(MODELS)}; all by default")] = None,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="processor time of a rank, against torch's views, at most 1.10")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures to this file")] = None,
) -> None:
    """Time step() against the better of torch's two modes; the exit status is 1 if a median misses the bound."""
    unknown = sorted(set(model or ()) - set(MODELS))
    if unknown:
        raise typer.BadParameter(f"no model {', '.join(unknown)}; there are: {', '.join(MODELS)}", param_hint="--model")
    console = Console()
    met = True
    figures = []
    for name in model or list(MODELS):
        times: Times = on_ranks(_contest, ranks, name, pairs, cpu)
        better = "torch, views" if cpu else min(TORCH, key=lambda contender: statistics.median(times[contender]))
        timings = {contender: compared(times, contender, better) for contender in times}
        what = "processor time of step()" if cpu else "step()"
        bound = max(MORE_PROCESSOR_TIME, MODELS[name].bound) if cpu else MODELS[name].bound
        console.print(_table(f"{what}, {name}, {ranks} ranks, {pairs} rounds, against {better!r}", timings, bound))
        met = met and all(timings[key].ratio <= bound for key, value in OURS.items() if value.judged)
        figures.append(
            {
                "model": name,
                "against": better,
                "ratios": {key: asdict(timing) for key, timing in timings.items()},
                "seconds": times,
            }
        )
    console.print(machine())
    if json_file is not None:
        result = {"machine": machine(), "ranks": ranks, "pairs": pairs, "met": met, "models": figures}
        json_file.write_text(json.dumps(result), encoding="utf-8")
    raise typer.Exit(0 if met else 1)


def _table(title: str, timings: dict[str, PairedTiming], bound: float) -> Table:
    table = Table(title=title)
    table.add_column("contender")
    for heading in ("ms", "ratio", "95 %", "at most", "met"):
        table.add_column(heading, justify="right")
    for name, timing in timings.items():
        judged = name in OURS and OURS[name].judged
        table.add_row(
            name,
            f"{timing.median_a * 1e3:.2f}",
            f"{timing.ratio:.3f}",
            f"{timing.low:.3f} - {timing.high:.3f}",
            str(bound) if judged else "",
            ("yes" if timing.ratio <= bound else "no") if judged else "",
        )
    return table


def _contest(name: str, rounds: int, cpu: bool) -> Times:
    model = MODELS[name]
    arguments: dict[str, Any] = {"lr": 1e-3} | ({"fused": True} if model.fused else {})
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator) for shape in model.shapes]
    contenders = {**TORCH, **OURS}
    parameters = {key: _parameters(model, gradients) for key in contenders}
    given = {
        key: [{"params": [parameter]} for parameter in found] if model.in_groups else found
        for key, found in parameters.items()
    }
    optimizers = {key: value.build(given[key], **arguments) for key, value in contenders.items()}
    with calls(name, len(contenders) * (rounds + WARM_UP)) as advance:
        times = take_turns(
            {key: optimizer.step for key, optimizer in optimizers.items()},
            rounds,
            warm_up=WARM_UP,
            advance=advance,
            processor_time=cpu,
        )
    _check_equal(parameters.values())
    return times


def _parameters(model: Model, gradients: list[torch.Tensor]) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in model.shapes]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return parameters


def _check_equal(models: Iterable[list[torch.nn.Parameter]]) -> None:
    first, *others = models
    if not all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True)):
        raise AssertionError("contenders come to different parameters, so that their times cannot be compared")


if __name__ == "__main__":
    typer.run(main)
