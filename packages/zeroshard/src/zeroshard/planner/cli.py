"""Defines the command ``zeroshard``: ``zeroshard plan`` compares optimizers, partitions and numbers of ranks."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track

from zeroshard.byte_units import format_bytes, parse_bytes
from zeroshard.plan.choices import PARTITIONS, listed
from zeroshard.planner.comparison import Row, advise, compare, planner_of
from zeroshard.planner.models import InputError, read_model
from zeroshard.planner.report import BY_ARITHMETIC, NOT_COUNTED, as_json, draw, table

EXAMPLES = """Examples:

  zeroshard plan ./Llama-3-8B --ranks 8 --dtype bfloat16 --master-weights --memory 80GiB

  zeroshard plan train:make_model -o 'SGD(momentum=0.9)' -o 'Muon:matrices+AdamW:rest' --ranks 2,4,8

  zeroshard plan model.safetensors.index.json -o AdamW --json
"""

Dtype = Literal["float64", "float32", "bfloat16", "float16"]

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback()
def _several() -> None:
    """Shards optimizer state across the ranks of DistributedDataParallel."""


@app.command(epilog=EXAMPLES)
def plan(
    model: Annotated[str, typer.Argument(help="module:function, config.json or its folder, or .safetensors")],
    optimizer: Annotated[list[str] | None, typer.Option("-o", help="e.g. Muon:matrices+AdamW:rest")] = None,
    ranks: Annotated[str, typer.Option(help="numbers of ranks, e.g. 2,4,8")] = "8",
    partition: Annotated[str, typer.Option(help="of whole, split, level")] = ",".join(PARTITIONS),
    backend: Annotated[Literal["gloo", "nccl"], typer.Option(help="nccl stands for all that use collectives")] = "nccl",
    hook: Annotated[bool, typer.Option(help="whether a hook sends gradients to their owners")] = True,
    dtype: Annotated[Dtype | None, typer.Option(help="of parameters")] = None,
    grad_dtype: Annotated[Dtype | None, typer.Option(help="of gradients")] = None,
    master_weights: Annotated[bool, typer.Option("--master-weights", help="float32 copies at owners")] = False,
    memory: Annotated[str, typer.Option(help="of a device, e.g. 80GiB")] = "",
    show: Annotated[bool, typer.Option("--show", help="list what `matrices` means")] = False,
    real: Annotated[bool, typer.Option("--real", help="build a function's model on the CPU")] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="of a config")] = False,
    picture: Annotated[Path | None, typer.Option(help="draw bars and lines to this file")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="print JSON; sizes are bytes")] = False,
    require_fit: Annotated[bool, typer.Option("--require-fit", help="exit with 1 if all exceed --memory")] = False,
) -> None:
    """Show bytes, work and traffic of each rank, from shapes alone."""
    try:
        device = parse_bytes(memory) if memory else None
    except ValueError as error:
        raise InputError(f"--memory: {error}") from None
    if require_fit and device is None:
        raise InputError("--require-fit needs --memory")
    # Each number and each name counts once.
    counts = [*dict.fromkeys(int(part) if re.fullmatch(r"\s*\d{1,6}\s*", part) else 0 for part in ranks.split(","))]
    if 0 in counts:
        raise InputError(f"--ranks {ranks!r} is no list of numbers from 1 to 999999, such as 2,4,8")
    partitions = [*dict.fromkeys(name.strip() for name in partition.split(","))]
    for name in partitions:
        if name not in PARTITIONS:
            raise InputError(f"--partition {name!r} is not one of {', '.join(PARTITIONS)}")
    settings: Any = {"dtype": dtype, "grad_dtype": grad_dtype, "master_weights": master_weights, "backend": backend}
    # Lets the command import the user's modules, as python -m does.
    sys.path.insert(0, str(Path.cwd()))
    with redirect_stdout(sys.stderr):
        found = read_model(model, real=real, trust_remote_code=trust_remote_code)
    if show and found.groups is None:
        sys.stdout.writelines(f"{name}\n" for name in sorted(found.matrices))
        return
    with redirect_stdout(sys.stderr):
        planners = {text: planner_of(found, text, **settings) for text in optimizer or ["AdamW"]}
        errors = Console(stderr=True)
        rows, advice = list[Row](), dict[str, str]()
        for text, planner in planners.items():
            shown = track(counts, escape(text), console=errors, transient=True, disable=not errors.is_terminal)
            own = [row for count in shown for row in compare(planner, text, count, partitions, hook=hook)]
            advice[text] = advise(planner, own, device)
            rows += own
    if all(row.plan is None for row in rows):
        raise InputError(next(row.note for row in rows if row.note))
    if picture is not None:
        draw(rows, device, picture)
    told = {**as_json(found, rows, device, advice), **settings}
    if json_output:
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    else:
        _print(told, found.notes, rows)
        sys.stdout.write("" if optimizer else "No -o was given: AdamW.\n")
    if require_fit and device is not None and all(row.largest.total > device for row in rows if row.plan is not None):
        raise typer.Exit(1)


def _print(told: Mapping[str, Any], notes: Sequence[str], rows: Sequence[Row]) -> None:
    """Print what the JSON has, as text and tables."""
    console = Console(highlight=False, width=max(80, Console().width) if sys.stdout.isatty() else 80)
    kinds = f"{told['dtype']} by --dtype" if told["dtype"] else f"the model's {listed(told['dtypes_of_model'])}"
    console.print(f"{told['model']}:", markup=False)
    console.print(f"{told['elements']:,} parameters in {kinds}, {told['frozen']:,} of them frozen")
    for note in notes:
        console.print(f"Note: {note}.", markup=False)
    for text, advised in told["advice"].items():
        own = [row for row in rows if row.optimizers == text]
        plain = own[0].largest
        parts = ("parameters", "gradients", "buffers", "state")
        sizes = ", ".join(f"{part} {format_bytes(getattr(plain, part))}" for part in parts)
        console.print(f"\n{text}\nWithout sharding: {sizes}", markup=False)
        console.print(table(own, told["memory"]))
        for note in dict.fromkeys(row.note for row in own if row.note):
            console.print(f"Note: {note}", markup=False)
        console.print(advised, markup=False)
    console.print(f"\n{BY_ARITHMETIC}\n{NOT_COUNTED}", markup=False)
