"""The command line: tries the optimizers of all packages, and shows or writes what was seen."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated

import typer
from optimizer_page.page import page_of
from optimizer_page.trials import PACKAGES, Seen, Trial
from optimizer_page.workers import workers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def optimizer_page(
    *,
    package: Annotated[list[str] | None, typer.Option(help="Try this package only; may be repeated.")] = None,
    limit: Annotated[float, typer.Option(min=1, help="Seconds after which the trial of a class is ended.")] = 300,
    jobs: Annotated[int, typer.Option(min=1, help="How many are tried at the same time.")] = os.cpu_count() or 1,
    write: Annotated[Path | None, typer.Option(help="Write the page into this file.", dir_okay=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was seen as JSON on standard output.")] = False,
) -> None:
    """Try whether the optimizers of well-known packages couple tensors, with zeroshard.check_optimizer, and may be cut.

    This takes about 15 minutes on two cores. The exit code is 1 if one couples tensors that ZeroRedundancyOptimizer
    does not refuse, 2 for bad input, such as a package that is not installed.
    """
    names = package or list(PACKAGES)
    unknown = [name for name in names if name not in PACKAGES]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(PACKAGES)}", param_hint="--package")
    try:
        seen = list(_seen(names, limit, jobs))
        versions = {name: importlib.metadata.version(PACKAGES[name]).partition("+")[0] for name in names}
    except ImportError as error:
        raise typer.BadParameter(f"install the packages that are to be tried: {error}") from None
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from None
    if write is not None:
        write.write_text(page_of(seen, versions), encoding="utf-8")
    if as_json:
        rows = [{**dataclasses.asdict(one), "trial": one.trial.title, "package": one.trial.package} for one in seen]
        typer.echo(json.dumps({"versions": versions, "seen": rows}, indent=1))
    else:
        _show(seen)
    missing = [one for one in seen if one.is_missing]
    for one in missing:
        typer.echo(
            f"error: {one.trial.package}.{one.trial.title} couples tensors from step {one.first_step} on, and the "
            f"table in zeroshard/plan/eligibility.py lacks it",
            err=True,
        )
    raise typer.Exit(1 if missing else 0)


def _seen(packages: Sequence[str], limit: float, jobs: int) -> Iterator[Seen]:
    """Yield what was seen, in the order of the packages and their classes."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with workers(jobs, limit) as ask, Progress(*columns, console=Console(stderr=True)) as progress:
        trials: list[Trial] = []
        for name in packages:
            answer = ask(name)
            if not isinstance(answer, list):
                raise answer if isinstance(answer, ImportError) else ImportError(f"{name}: {answer}")
            trials += answer
        task = progress.add_task("trying optimizers", total=len(trials))
        with ThreadPoolExecutor(jobs) as pool:
            futures = {pool.submit(ask, trial): trial for trial in trials}
            try:
                for future in as_completed(futures):
                    progress.update(task, advance=1, description=futures[future].name)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        for future, trial in futures.items():
            found = future.result()
            yield found if isinstance(found, Seen) else Seen(trial, "cannot tell", None, str(found))


def _show(seen: Sequence[Seen]) -> None:
    table = Table("package", "class", "seen", "step", "partition", "remark")
    for one in seen:
        table.add_row(
            one.trial.package, one.trial.title, one.verdict, str(one.first_step or ""), one.partition, one.reason
        )
    Console().print(table)
