"""The command line: runs all trials under all harnesses, and shows or writes the table."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import signal
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from harness_table.harnesses import Harness, harnesses
from harness_table.running import Bounds, Verdict, run
from harness_table.table import Column, Found, markdown, notes, replaced, rows
from harness_table.trials import KINDS, TRIALS, Trial, right_for
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

TIMED = 8
"""How many tests that do nothing are timed."""

Told = Callable[[Harness, str, int, int], None]
"""Called with what is run next, how many of the harness's runs are done, and how many there are."""


class TooSlowError(Exception):
    """The time limit that the harnesses get would end right tests too."""


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def harness_table(
    *,
    deepspeed_common: Annotated[
        Path | None,
        typer.Option(help="tests/unit/common.py of a checkout of DeepSpeed, which must be installed.", exists=True),
    ] = None,
    harness: Annotated[list[str] | None, typer.Option(help="Run this harness only; may be repeated.")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="Run this kind of tests only; may be repeated.")] = None,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that each harness gets as its own time limit.")] = 15,
    bound: Annotated[float, typer.Option(min=1, help="Seconds after which a run is ended from outside.")] = 45,
    results: Annotated[
        Path | None, typer.Option(help="Keep results in this JSON file; those that it has are not run again.")
    ] = None,
    again: Annotated[list[str] | None, typer.Option(help="Forget this harness's results; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all results as JSON on standard output.")] = False,
    write: Annotated[
        Path | None, typer.Option(help="Write the table into this file, between its markers.", exists=True)
    ] = None,
) -> None:
    """Run wrong tests of every kind under several harnesses, and tell which of them are caught.

    Each of some 50 small wrong tests of two ranks runs alone, under pytest, on PyTorch's MultiProcessTestCase and
    MultiThreadedTestCase, DeepSpeed's DistributedTest and zeroshard-testing. This takes about 40 minutes. The exit code
    is 0 whatever is found, 1 if the machine is too busy, 2 for bad input.
    """
    known = harnesses(deepspeed_common)
    for option, given, names in [
        ("--harness", harness, [one.key for one in known]),
        ("--again", again, [one.key for one in known]),
        ("--kind", kind, list(KINDS)),
    ]:
        _check(option, given or [], names)
    columns = _earlier(known, results, again or [])
    if write is not None:
        _put(write, "")
    trials = [trial for trial in TRIALS.values() if trial.wrong and (kind is None or trial.kind in kind)]
    bounds = Bounds(limit, max(limit, bound))
    # What ends this program ends what it runs too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with _progress() as told:
            for one in known:
                if not one.blocked and (harness is None or one.key in harness):
                    for column in _filled(one, columns[one.key], trials, bounds, told):
                        columns[one.key] = column
                        if results is not None:
                            results.write_text(_as_json(columns), encoding="utf-8")
    except TooSlowError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from None
    table = rows(list(columns.values()))
    text = markdown(table, notes(list(columns.values()), bounds.limit, bounds.bound, _machine()))
    if write is not None:
        write.write_text(_put(write, text), encoding="utf-8")
    if as_json:
        typer.echo(_as_json(columns))
    else:
        _show(table, text)


def _earlier(known: Sequence[Harness], results: Path | None, again: Sequence[str]) -> dict[str, Column]:
    """Return the columns that are known from an earlier run, and empty ones."""
    columns = {
        one.key: Column(
            one.title,
            one.default_limit,
            one.blocked or "it was not asked for",
            cannot=one.cannot,
            remark=one.remark,
        )
        for one in known
    }
    if results is not None and results.exists():
        try:
            read = json.loads(results.read_text(encoding="utf-8"))["columns"]
            columns |= {key: Column.read(column) for key, column in read.items() if key not in again}
        except (ValueError, KeyError, TypeError) as error:
            raise typer.BadParameter(f"{results} holds no results of this program: {error!r}") from None
    return columns


def _filled(harness: Harness, column: Column, trials: Sequence[Trial], bounds: Bounds, told: Told) -> Iterator[Column]:
    """Run what a column lacks, and yield it after each run."""
    column = dataclasses.replace(column, blocked="")
    if column.nothing_seconds is None:
        told(harness, "a test that does nothing", 0, len(trials))
        names = [str(number) for number in range(TIMED)]
        timed = run(harness, TRIALS["does_nothing"], bounds.times(TIMED), names)
        if timed is None or timed.verdict is not Verdict.PASSED:
            why = f"a test that does nothing fails ({timed.said if timed else ''})"
            yield dataclasses.replace(column, blocked=why)
            return
        column = dataclasses.replace(column, nothing_seconds=statistics.median(timed.test_seconds))
        yield column
    expressible: dict[str, bool] = {}
    for number, trial in enumerate(trials):
        if trial.name in {found.trial for found in column.found}:
            continue
        told(harness, trial.name, number, len(trials))
        control = right_for(trial)
        if control.name not in expressible:
            expressible[control.name] = _can_express(harness, control, bounds)
        found = Found(trial.name, trial.kind, None)
        done = run(harness, trial, bounds) if expressible[control.name] else None
        if done is not None:
            found = Found(trial.name, trial.kind, done.verdict.value, round(done.seconds, 2), done.said)
        column = dataclasses.replace(column, found=(*column.found, found))
        yield column
    told(harness, "", len(trials), len(trials))


def _can_express(harness: Harness, control: Trial, bounds: Bounds) -> bool:
    done = run(harness, control, bounds.times(4))
    if done is None or done.verdict is not Verdict.PASSED:
        return False
    if done.seconds > bounds.limit:
        raise TooSlowError(
            f"a right test took {done.seconds:.0f} s under {harness.title}, so a limit of {bounds.limit:.0f} s tells "
            "nothing about a wrong one. Wait until the machine has less to do, or raise --limit and --bound."
        )
    return True


def _check(option: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint=option)


def _put(page: Path, text: str) -> str:
    try:
        return replaced(page.read_text(encoding="utf-8"), text)
    except ValueError as error:
        raise typer.BadParameter(f"{page}: {error}", param_hint="--write") from None


def _machine() -> str:
    versions = [f"Python {platform.python_version()}"]
    for package in ("torch", "pytest", "deepspeed"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{len(os.sched_getaffinity(0))} cores with {', '.join(versions)}"


def _as_json(columns: dict[str, Column]) -> str:
    plain = {key: dataclasses.asdict(column) for key, column in columns.items()}
    return json.dumps({"machine": _machine(), "columns": plain}, indent=1)


def _show(table: list[list[str]], text: str) -> None:
    console = Console()
    if not console.is_terminal:
        typer.echo(text)
        return
    shown = Table(*(heading.replace("`", "") for heading in table[0]), show_lines=True)
    for row in table[1:]:
        shown.add_row(*(cell.replace("**", "") for cell in row))
    console.print(shown)


@contextmanager
def _progress() -> Iterator[Told]:
    """Show how far the runs are: a bar for each harness, or lines where there is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda harness, text, done, total: console.print(
            f"{harness.title}: {done} of {total} done{': ' * bool(text)}{text}", highlight=False, soft_wrap=True
        )
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[text]}"), console=console) as progress:
        tasks: dict[str, TaskID] = {}

        def told(harness: Harness, text: str, done: int, total: int) -> None:
            for title, task in tasks.items():
                if title != harness.title:
                    progress.stop_task(task)
            if harness.title not in tasks:
                tasks[harness.title] = progress.add_task(harness.title, total=total, text="")
            progress.update(tasks[harness.title], completed=done, text=text)

        yield told
