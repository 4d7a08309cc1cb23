"""The command line: checks what was asked for, runs it, and shows what was found."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from choices import check_optimizer, class_names
from corpus import read_corpus
from errors import InputError, RankFailedError
from job import Job, read_continuation, read_training
from launch import launch
from picture import draw
from progress import Stages
from report import show
from rich.console import Console
from side_by_side import CORPUS
from verdict import Found

CONTEXT = 48
SEQUENCES = 12

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def quickstart(
    *,
    data: Annotated[
        Path | None,
        typer.Option(help="Text file, or folder of text files, to train on.", show_default="Python's standard library"),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, max=16, help="Processes that train together.")] = 2,
    resume_ranks: Annotated[int, typer.Option(min=1, max=16, help="Processes that resume from the checkpoint.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Steps before the checkpoint.")] = 24,
    resume_steps: Annotated[int, typer.Option(min=1, help="Steps after the checkpoint.")] = 4,
    optimizer: Annotated[
        str,
        typer.Option(
            "--optimizer",
            "-o",
            metavar="CLASS[:PATTERN][+...]",
            help="Class of torch.optim, any but LBFGS and SparseAdam, or package.Class; with arguments: "
            "SGD(momentum=0.9). Several, each for some parameters: Muon:matrices+AdamW:rest; a pattern is a glob "
            "over names, such as blocks.0.*, and the first that matches counts.",
        ),
    ] = "AdamW",
    lr: Annotated[
        float | None,
        typer.Option(min=0.0, help="Learning rate, for one class.", show_default="the class's own, 0.02 for Muon"),
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            help="whole: each tensor has one owner. split: each is cut evenly. "
            "level: whole by work of the update, or cut to even out the state, as each class allows.",
            show_default="whole; level with several classes",
        ),
    ] = None,
    bucket_views: Annotated[
        bool, typer.Option(help="Pack parameters into flat buffers, so that a step sends few large messages.")
    ] = True,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights and the batches.")] = 0,
    out: Annotated[
        Path, typer.Option(help="Folder for the picture, the results and the checkpoint (about 130 MB with AdamW).")
    ] = Path("quickstart-out"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as JSON on standard output, instead of tables.")
    ] = False,
) -> None:
    """Train a small language model with its optimizer state sharded, beside the unsharded optimizer, and compare.

    A byte-level GPT of 10.7 million parameters learns Python's standard library with DDP on gloo ranks of this machine.
    Then its consolidated state is saved, and training goes on from it on another number of ranks and with a plain
    optimizer for each class. It takes about a minute on two cores. The exit code is 0 if all agree, 1 if they do not
    or a rank fails, 2 for bad input.
    """
    started = time.perf_counter()
    console, progress = Console(), Console(stderr=True)
    # What ends this program ends its ranks too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        text = read_corpus(data or Path(sysconfig.get_path("stdlib")), least=CONTEXT + 1)
        chosen = check_optimizer(optimizer, partition, lr)
        checkpoint = _folder(out) / "checkpoint.pt"
        with tempfile.TemporaryDirectory(prefix="quickstart-") as folder:
            (Path(folder) / CORPUS).write_bytes(text)
            job = Job(
                task="train",
                folder=folder,
                checkpoint=str(checkpoint.resolve()),
                steps=steps,
                more_steps=resume_steps,
                sequences=global_sequences(ranks, resume_ranks),
                context=CONTEXT,
                seed=seed,
                optimizer=optimizer,
                lr=lr,
                partition=chosen,
                bucket_views=bucket_views,
            )
            found = _run(job, ranks, resume_ranks, progress, started)
    except InputError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except RankFailedError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("interrupted; all ranks have been stopped", err=True)
        raise typer.Exit(130) from None
    results = json.dumps(found.as_json(), indent=1)
    (out / "results.json").write_text(results)
    draw(found, out / "quickstart.png")
    if as_json:
        typer.echo(results)
    else:
        show(found, console)
        console.print(f"{found.seconds:.0f} s. Picture, results and checkpoint are in {out.resolve()}", soft_wrap=True)
    raise typer.Exit(1 if found.failures() else 0)


def global_sequences(*world_sizes: int) -> int:
    """Return the smallest global batch of at least twelve sequences that every world size can share evenly.

    Examples:
        >>> global_sequences(2, 3), global_sequences(4, 3), global_sequences(1, 1)
        (12, 12, 12)
    """
    common = math.lcm(*world_sizes)
    return common * math.ceil(SEQUENCES / common)


def _run(job: Job, ranks: int, resume_ranks: int, console: Console, started: float) -> Found:
    side_by_side = job.steps + job.more_steps
    stages = Stages(console, work=2 * side_by_side + 3 * job.more_steps)
    with stages.stage(f"Training both ways on {ranks} ranks", side_by_side, models=2, resumed=job.more_steps) as told:
        launch(job, ranks, told)
    with stages.stage(f"Resuming on {resume_ranks} ranks", job.more_steps) as told:
        launch(dataclasses.replace(job, task="resume-sharded"), resume_ranks, told)
    with stages.stage(f"Resuming with plain {class_names(job.optimizer)}", job.more_steps) as told:
        launch(dataclasses.replace(job, task="resume-plain"), 1, told)
    folder = Path(job.folder)
    return Found(
        optimizer=job.optimizer,
        partition=job.partition,
        ranks=ranks,
        resume_ranks=resume_ranks,
        steps=job.steps,
        training=read_training(folder, ranks),
        resumed=read_continuation(folder, "resume-sharded", resume_ranks),
        plain=read_continuation(folder, "resume-plain", 1),
        seconds=time.perf_counter() - started,
        checkpoint=job.checkpoint,
    )


def _folder(out: Path) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{str(out)!r} cannot be made a folder ({error.strerror}); name another one with --out"
        ) from None
    return out
