"""The command line: tries the optimizers of all packages, and writes the results as tables in Markdown."""

from __future__ import annotations

import importlib.metadata
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from optimizer_page.trials import PACKAGES, Seen, Trial
from optimizer_page.workers import ask
from rich.console import Console
from rich.progress import track

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
MARK = "<!-- What comes after this line is written by tools/optimizer_page. -->\n"
_VERDICTS = ("equal", "coupled", "draws random numbers", "cannot tell")


def main(
    package: Annotated[list[str] | None, typer.Option(help="Try this package only; may be repeated.")] = None,
    *,
    write: Annotated[bool, typer.Option("--write", help="Write the tables of docs/optimizers.md.")] = False,
) -> None:
    """Try whether the optimizers of well-known packages couple tensors, with zeroshard.check_optimizer, and may be cut.

    This takes about 15 minutes on two cores. The exit code is 1 if one couples tensors that ZeroRedundancyOptimizer
    does not refuse, 2 for bad input, such as a package that is not installed.
    """
    names = package or list(PACKAGES)
    unknown = [name for name in names if name not in PACKAGES]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(PACKAGES)}", param_hint="--package")
    try:
        seen = list(_seen(names))
        versions = {name: importlib.metadata.version(PACKAGES[name]).partition("+")[0] for name in names}
    except ImportError as error:
        raise typer.BadParameter(f"install the packages to try: {error}") from None
    tables = tables_of(seen, versions)
    if write:
        before, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
        PAGE.write_text(before + mark + tables, encoding="utf-8")
    else:
        typer.echo(tables)
    missing = [one for one in seen if one.is_missing]
    for one in missing:
        title = f"{one.trial.package}.{one.trial.title}"
        lacks = "the table in zeroshard/plan/eligibility.py lacks it"
        typer.echo(f"error: {title} couples tensors from step {one.first_step} on, and {lacks}", err=True)
    raise typer.Exit(1 if missing else 0)


def _seen(packages: Sequence[str]) -> Iterator[Seen]:
    """Yield the results, in the order of the packages and their classes."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        trials: list[Trial] = []
        for name, answer in zip(packages, pool.map(ask, packages), strict=True):
            if not isinstance(answer, list):
                raise answer if isinstance(answer, ImportError) else ImportError(f"{name}: {answer}")
            trials += answer
        try:
            answers = track(pool.map(ask, trials), "trying optimizers", len(trials), console=Console(stderr=True))
            for trial, answer in zip(trials, answers, strict=True):
                yield answer if isinstance(answer, Seen) else Seen(trial, "cannot tell", None, str(answer))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def tables_of(seen: Sequence[Seen], versions: Mapping[str, str]) -> str:
    """Return a table of counts, and one of the classes of each package."""
    lines = ["", f"| package | version | {' | '.join(_VERDICTS)} |", "| --- | --- |" + " ---: |" * len(_VERDICTS)]
    for package, version in versions.items():
        counts = Counter(one.verdict for one in seen if one.trial.package == package)
        lines.append(f"| {package} | {version} | {' | '.join(str(counts[verdict]) for verdict in _VERDICTS)} |")
    for package, version in versions.items():
        lines += ["", f"## {package} {version}", "", "| class | seen | step | partition | remark |"]
        lines += ["| --- | --- | ---: | --- | --- |"]
        lines += [_row(one) for one in seen if one.trial.package == package]
    return "\n".join(lines) + "\n"


def _row(seen: Seen) -> str:
    remark = seen.reason.replace("|", "\\|").replace("<", "\\<")
    partition = f'`"{seen.partition}"`' if seen.partition not in ("", "refused") else seen.partition
    cells = [f"`{seen.trial.title}`", seen.verdict, seen.first_step or "", partition, remark]
    return f"| {' | '.join(map(str, cells))} |"
