"""Defines the command ``zeroshard``: ``zeroshard plan`` compares optimizers, partitions and numbers of ranks."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Option

from zeroshard.byte_units import format_bytes, parse_bytes
from zeroshard.plan.choices import PARTITIONS, listed
from zeroshard.planner.comparison import Row, advised, call_of, compare, planner_of, verdict
from zeroshard.planner.models import InputError, Model, read_model
from zeroshard.planner.report import NOT_COUNTED, as_json, draw, table

EXAMPLES = """Examples:

  zeroshard plan docs/examples/configs/gpt2 --memory 2GiB

  zeroshard plan ./Llama-3-8B --dtype bfloat16 --master-weights --memory 80GiB

  zeroshard plan train:make_model -o 'SGD(momentum=0.9)' -o 'Muon:matrices+AdamW:rest' --ranks 2,4,8

"""

Dtype = Literal["float64", "float32", "bfloat16", "float16"]

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback()
def _several() -> None:
    """Plan how to shard the training of a model."""


@app.command(epilog=EXAMPLES)
def plan(
    model: Annotated[
        str, typer.Argument(help="A function as module:function, a config.json or its folder, or a .safetensors file.")
    ],
    optimizer: Annotated[
        list[str] | None,
        Option("-o", help="A class, or several: Muon:matrices+AdamW:rest. Repeat it to compare."),
    ] = None,
    ranks: Annotated[str, Option(help="The numbers of ranks, such as 2,4,8.")] = "8",
    partition: Annotated[str, Option(help="The partitions to compare.")] = ",".join(PARTITIONS),
    backend: Annotated[Literal["gloo", "nccl"], Option(help="Choose nccl for all backends but gloo.")] = "nccl",
    hook: Annotated[bool, Option(help="Say whether a hook of DDP sends gradients to their owners.")] = True,
    dtype: Annotated[Dtype | None, Option(help="The dtype of parameters, if not the model's.")] = None,
    grad_dtype: Annotated[Dtype | None, Option(help="The dtype of gradients, if not the parameters'.")] = None,
    master_weights: Annotated[bool, Option("--master-weights", help="Keep float32 copies at the owners.")] = False,
    memory: Annotated[str, Option(help="The memory of a device, such as 80GiB.")] = "",
    show: Annotated[bool, Option("--show", help="List the parameters that `matrices` selects.")] = False,
    real: Annotated[bool, Option("--real", help="Build a function's model on the CPU.")] = False,
    trust_remote_code: Annotated[bool, Option("--trust-remote-code", help="Run code that a config names.")] = False,
    picture: Annotated[Path | None, Option(help="Draw the comparison to this file.")] = None,
    json_output: Annotated[bool, Option("--json", help="Print JSON. Sizes are in bytes.")] = False,
    require_fit: Annotated[bool, Option("--require-fit", help="Exit with 1 if none of these partitions fits.")] = False,
) -> None:
    """Say what training takes on each rank: memory, optimizer state and bytes sent, from the shapes of a model."""
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
        planners = {text: planner_of(found, text, **settings) for text in optimizer or [found.one_class or "AdamW"]}
        groups = f"{model.partition(':')[2]}()" if found.groups is not None else None
        rows, advice = list[Row](), dict[str, dict[str, str]]()
        for text, planner in planners.items():
            bar = typer.progressbar(counts, label=f"Planning {text}", file=sys.stderr)
            with bar if sys.stderr.isatty() else nullcontext(counts) as shown:
                own = [row for count in shown for row in compare(planner, text, count, partitions, hook=hook)]
            largest = [row for row in own if row.count == max(counts)]
            chosen = advised(largest, device)
            call = call_of(chosen, device, hook=hook, master_weights=master_weights, dtype=dtype, groups=groups)
            advice[text] = {"verdict": verdict(chosen, largest, device, memory), "call": call}
            rows += own
    if all(row.plan is None for row in rows):
        raise InputError(next(row.note for row in rows if row.note))
    if picture is not None:
        draw(rows, max(counts), device, picture)
        sys.stderr.write(f"The picture is in {picture}.\n")
    told = {**as_json(found, rows, device, advice), **settings}
    if json_output:
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    else:
        _print(told, found, rows)
        sys.stdout.write("" if optimizer or found.has_classes else "No -o was given: AdamW.\n")
    if require_fit and device is not None and all(row.peak > device for row in rows if row.plan is not None):
        raise typer.Exit(1)


def _print(told: Mapping[str, Any], model: Model, rows: Sequence[Row]) -> None:
    """Print what the JSON has, as text of at most 80 columns."""
    kinds = f"{told['dtype']} by --dtype" if told["dtype"] else f"the model's {listed(told['dtypes_of_model'])}"
    _print_text(f"{told['model']}:\n{told['elements']:,} parameters in {kinds}, {told['frozen']:,} of them frozen")
    for note in model.notes:
        _print_text(f"Note: {note}.")
    for text, advice in told["advice"].items():
        own = [row for row in rows if row.optimizers == text]
        parts = ", ".join(
            f"{part} {format_bytes(getattr(own[0].largest, part))}"
            for part in ("parameters", "gradients", "buffers", "state")
        )
        _print_text(f"\n{text}\nWithout sharding: {parts}\n\n{advice['verdict']}")
        sys.stdout.write(f"\n{advice['call']}\n\nPer rank and step:\n{table(own, told['memory'])}\n")
        for note in dict.fromkeys(row.note for row in own if row.note):
            _print_text(f"Note: {note}")
    _print_text(f"\n{NOT_COUNTED}")


def _print_text(text: str) -> None:
    """Print lines, each wrapped at 80 columns."""
    for line in text.split("\n"):
        sys.stdout.write(textwrap.fill(line, 80, break_on_hyphens=False) + "\n")
