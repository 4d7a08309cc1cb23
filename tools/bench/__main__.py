"""Measures training with zeroshard beside other ways to train: ``python tools/bench --help``.

Each subcommand that measures prints one table, and ``--json`` writes its figures with the command and the machine.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

# The ranks import this folder by its name too, in processes of their own.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import checkouts, collectives, memory, page
from bench.contenders import CONTENDERS
from bench.iteration import Race, disagreeing, measure
from bench.links import LinkError
from bench.results import Result, Row
from bench.spawned import machine
from bench.workloads import MODELS

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)

LAYERS = 6
TRANSPORTS = {"messages": "0", "reads": "1"}
"""Of zeroshard between ranks of one host, with values of the switch; zeroshard chooses if the switch is not set."""
SWITCH = "ZEROSHARD_CROSS_MEMORY"
TRAINED = ["ddp", "torch-zero", "torch-zero-views", "fsdp2"]
TRAINED += ["hook-whole", "hook-split", "sharded-whole", "sharded-split"]
STEPPED = ["ddp", "torch-zero", "torch-zero-views", "step-whole", "copies-whole", "step-split", "copies-split"]
NORMS = [f"{way}-{partition}" for partition in ("whole", "split") for way in ("unnormed", "hook", "clipped")]
STEP_MODELS, NORM_MODELS = ["mlp", "small", "small-fused"], ["mlp", "tensors"]
TWO, FEW, MANY = [2], [2, 4, 8], [8, 64, 512, 1024, 4096]


def _one_of(known: Collection[str]) -> Any:  # noqa: ANN401 - typer's
    def check(value: Any) -> Any:  # noqa: ANN401 - a name, several or None
        for name in [value] if isinstance(value, str) else value or ():
            if name not in known:
                raise typer.BadParameter(f"there is no {name!r}; there are: {', '.join(known)}")
        return value

    return typer.Option(callback=check, help=f"of {', '.join(known)}")


Json = Annotated[Path | None, typer.Option("--json", help="write the figures to this file")]
Rounds = Annotated[int, typer.Option(min=6, help="timed turns of each; fewer than 6 have no interval")]
Ranks = Annotated[list[int], typer.Option(min=2, help="numbers of ranks")]
NumberOfRanks = Annotated[int, typer.Option("--ranks", min=2, help="number of ranks")]
Before = Annotated[Path, typer.Option(help="another checkout of the repository")]
Model = Annotated[str, _one_of(MODELS)]
Models = Annotated[list[str], _one_of(MODELS)]
Layers = Annotated[int, typer.Option(min=1, help="of mlp")]
Contenders = Annotated[list[str], _one_of(CONTENDERS)]
Transport = Annotated[str | None, _one_of(TRANSPORTS)]


def _finish(title: str, rows: Sequence[Row], json_file: Path | None) -> None:
    result = Result(title, shlex.join(["python", "tools/bench", *sys.argv[1:]]), machine(), rows)
    typer.echo(f"{title}\n\n{result.table()}")
    if json_file is not None:
        result.write(json_file)
    if apart := disagreeing(rows):
        typer.echo(f"FAILED: {', '.join(apart)}: other parameters than the first contender's", err=True)
        raise typer.Exit(1)


def _choose(transport: str | None) -> None:
    if transport is not None:
        os.environ[SWITCH] = TRANSPORTS[transport]


def _races(names: list[str], models: list[str], ranks: list[int], rounds: int, base: str, step: bool) -> list[Row]:
    return [
        {"model": MODELS[model](LAYERS).title, "ranks": count, **row}
        for model in models
        for count in ranks
        for row in measure(Race(names, model, LAYERS, rounds, processor_time=True, only_step=step), count, base)
    ]


@app.command("step")
def _step(model: Models = STEP_MODELS, ranks: Ranks = TWO, rounds: Rounds = 31, json_file: Json = None) -> None:
    """Time a step without a hook beside torch's class and the plain optimizer, in processor time."""
    rows = _races(STEPPED, model, ranks, rounds, "torch-zero-views", step=True)
    _finish("processor time of step()", rows, json_file)


@app.command("norms")
def _norms(model: Models = NORM_MODELS, ranks: Ranks = TWO, rounds: Rounds = 15, json_file: Json = None) -> None:
    """Time iterations with and without norms of gradients, and with clipping, in processor time."""
    rows = _races(NORMS, model, ranks, rounds, "unnormed", step=False)
    _finish("processor time of an iteration", rows, json_file)


@app.command("iteration")
def _iteration(
    model: Model = "mlp",
    layers: Layers = LAYERS,
    ranks: NumberOfRanks = 2,
    rounds: Rounds = 15,
    contender: Contenders = TRAINED,
    base: Annotated[str, typer.Option(help="of ratios: a contender, or hook for that of the same partition")] = "ddp",
    link: Annotated[str | None, typer.Option(help="rate of an emulated link, such as 1gbit")] = None,
    transport: Transport = None,
    processor_time: Annotated[bool, typer.Option("--processor-time", help="of a rank, instead of wall time")] = False,
    json_file: Json = None,
) -> None:
    """Let contenders train in turn; the exit status is 1 if one comes to other parameters than the first."""
    if not {base, f"{base}-whole", f"{base}-split"} & {*contender}:
        raise typer.BadParameter(f"no contender is {base!r}; there are: {', '.join(contender)}", param_hint="--base")
    _choose("messages" if link else transport)
    try:
        rows = measure(Race(contender, model, layers, rounds, processor_time), ranks, base, link)
    except LinkError as error:
        raise typer.BadParameter(str(error), param_hint="--link") from None
    what = "processor time of an iteration" if processor_time else "iteration"
    _finish(f"{what}, {MODELS[model](layers).title}, {ranks} ranks, {link or 'loopback'}", rows, json_file)


@app.command("memory")
def _memory(
    model: Model = "mlp",
    layers: Layers = 10,
    ranks: Ranks = FEW,
    contender: Contenders = TRAINED,
    transport: Transport = None,
    json_file: Json = None,
) -> None:
    """Measure the peak memory of a rank over the parameters, each contender alone in fresh processes."""
    _choose(transport)
    title = f"peak memory of a rank / parameters, {MODELS[model](layers).title}"
    rows = memory.measure(contender, model, layers, ranks)
    _finish(f"{title}, by {transport}" if transport else title, rows, json_file)


@app.command("collectives")
def _collectives(ranks: Ranks = MANY, rounds: Rounds = 9, json_file: Json = None) -> None:
    """Count collectives of an iteration on the fake backend, and time the host, for shapes of real models."""
    _finish("collectives of an iteration, and host time", collectives.measure(ranks, rounds), json_file)


@app.command("two-checkouts")
def _two_checkouts(before: Before, ranks: NumberOfRanks = 2, rounds: Rounds = 101, json_file: Json = None) -> None:
    """Time steps and iterations beside another checkout, in processor time."""
    _finish(f"processor time beside {before}, {ranks} ranks", checkouts.measure(before, ranks, rounds), json_file)


@app.command("page")
def _page(file: Annotated[Path, typer.Argument(help="page whose tables are written")] = page.PAGE) -> None:
    """Write the tables of docs/benchmarks.md, and draw its pictures, from the JSON files in docs/measured."""
    page.write(file)


if __name__ == "__main__":
    app(prog_name="bench")
