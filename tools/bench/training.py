"""Time training with a sharded Adam against DDP, torch's ZeroRedundancyOptimizer and what else is installed.

All contenders train the same model on the same batches on the same ranks, take turns within every round, and must come
to the same parameters in the end. On an emulated link, what each of them sends is read from the kernel's counters.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from contenders import CONTENDERS, DDP, OURS
from links import LinkError, linked, missing
from race import memory, race
from resident import return_freed_memory
from rich.console import Console
from rich.progress import track
from spawned import machine, on_ranks
from training_plot import draw
from training_report import markdown, remarks, table
from training_result import Entry, Result
from workloads import MODELS, workload

LAYERS, LAYERS_ON_A_LINK = 20, 6
_WIDTH = 200
_RANK_BYTES = 0.4e9
_TIMES_PARAMETERS = 4
_NEEDED = "at least {:.0f} GB of memory, but {:.0f} GB are available"

Launch = Callable[..., Any]


def main(
    model: Annotated[str, typer.Option(help=", ".join(MODELS))] = "mlp",
    layers: Annotated[
        int | None,
        typer.Option(
            min=1, help="of mlp", show_default=f"{LAYERS}, or what fits into memory; {LAYERS_ON_A_LINK} on a link"
        ),
    ] = None,
    ranks: Annotated[int, typer.Option(min=2, max=64, help="number of ranks")] = 2,
    pairs: Annotated[int, typer.Option(min=6, help="rounds; fewer than 6 have no interval")] = 15,
    in_a_row: Annotated[int, typer.Option(min=1, help="iterations in each turn")] = 1,
    contender: Annotated[
        list[str] | None, typer.Option(help=f"one or more of {', '.join(CONTENDERS)}; all by default")
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="rate of an emulated link, such as 1gbit; loopback by default")
    ] = None,
    with_memory: Annotated[bool, typer.Option("--memory", help="measure memory too, each contender alone")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write everything to this file")] = None,
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="write the table to this file")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="draw the times to this PNG file")] = None,
) -> None:
    """Train in turn; the exit status is 1 if contenders come to different parameters, 2 if something is missing."""
    if model not in MODELS:
        raise typer.BadParameter(f"no model {model!r}; there are: {', '.join(MODELS)}", param_hint="--model")
    unknown = sorted(set(contender or ()) - set(CONTENDERS))
    if unknown:
        raise typer.BadParameter(
            f"no contender {', '.join(unknown)}; there are: {', '.join(CONTENDERS)}", param_hint="--contender"
        )
    if link is not None and (lacking := missing()):
        _refuse(lacking)
    # In their own order, so that the first that runs, which others are compared with, is DDP where it is among them.
    chosen = [name for name in CONTENDERS if name in (contender or CONTENDERS)]
    installed = [name for name in chosen if CONTENDERS[name].is_installed]
    layers = _layers_that_fit(model, layers, LAYERS if link is None else LAYERS_ON_A_LINK, ranks, len(installed))
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH

    def run(launch: Launch) -> tuple[dict[str, Any], dict[str, Any]]:
        raced = launch(race, installed, model, layers, pairs, in_a_row, link is not None)
        if not with_memory:
            return raced, {}
        return_freed_memory()
        shown = track(installed, "memory, each alone", console=Console(stderr=True), transient=True)
        return raced, {name: launch(memory, name, model, layers) for name in shown if "error" not in raced[name]}

    try:
        if link is None:
            raced, remembered = run(lambda function, *arguments: on_ranks(function, ranks, *arguments))
        else:
            with linked(ranks, link) as links:
                raced, remembered = run(links.on_ranks)
    except LinkError as error:
        _refuse(str(error))
    work = workload(model, layers)
    result = Result(
        command=shlex.join(["python", "tools/bench/training.py", *sys.argv[1:]]),
        machine=machine(),
        model=work.name,
        batch=work.batch,
        parameter_bytes=sum(work.sizes()),
        ranks=ranks,
        rounds=pairs,
        link=link,
        entries=[_entry(name, raced.get(name), remembered.get(name, {})) for name in chosen],
    )
    console.print(table(result))
    for remark in remarks(result):
        console.print(remark, highlight=False, markup=False)
    console.print(machine())
    if json_file is not None:
        json_file.write_text(json.dumps(result.as_json(), indent=1), encoding="utf-8")
    if markdown_file is not None:
        markdown_file.write_text(markdown(result), encoding="utf-8")
    if plot_file is not None:
        draw(result, plot_file, OURS)
    for name in result.disagreeing:
        console.print(f"[bold red]FAILED[/]: {name} comes to other parameters than {next(iter(result.times), DDP)}")
    raise typer.Exit(1 if result.disagreeing else 0)


def _entry(name: str, raced: dict[str, Any] | None, remembered: dict[str, Any]) -> Entry:
    what = CONTENDERS[name].what
    if raced is None:
        return Entry(name, what, failure="not installed")
    if "error" in raced:
        return Entry(name, what, failure=f"does not run: {raced['error']}")
    return Entry(name, what, **raced, peaks=remembered.get("peaks"), memory_failure=remembered.get("error"))


def _layers_that_fit(model: str, layers: int | None, default: int, ranks: int, contenders: int) -> int:
    """Return the layers to run with; all contenders are in memory at once, so that there may not be enough of it."""
    available = _available()

    def needed(count: int) -> float:
        return ranks * (_RANK_BYTES + _TIMES_PARAMETERS * contenders * sum(workload(model, count).sizes()))

    if layers is None and model == "mlp":
        layers = next((count for count in range(default, 1, -1) if needed(count) <= available), 1)
        if layers < default:
            why = _NEEDED.format(needed(default) / 1e9, available / 1e9)
            typer.echo(f"{layers} layers instead of {default}, which need {why}", err=True)
    layers = layers or default
    if needed(layers) > available:
        _refuse(
            f"{contenders} contenders need {_NEEDED.format(needed(layers) / 1e9, available / 1e9)}; name fewer with "
            "--contender" + (", or take fewer --layers" if model == "mlp" else "")
        )
    return layers


def _available() -> float:
    file = Path("/proc/meminfo")
    if not file.exists():
        return float("inf")
    sizes = dict(line.split(":") for line in file.read_text(encoding="ascii").splitlines())
    return 1024.0 * int(sizes["MemAvailable"].split()[0])


def _refuse(why: str) -> NoReturn:
    typer.echo(why, err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    typer.run(main)
