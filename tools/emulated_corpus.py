"""Runs the programs of ``tests/emulated/corpus`` several times, and says whether all runs report each of them alike.

Run as ``python tools/emulated_corpus.py`` where the packages are installed: 20 runs of every file, with random delays
of up to 50 ms in the threads that move the data of collectives, and two busy loops beside them. ``--runs``, ``--delay``
and ``--busy`` change that, ``--json`` writes the result for machines. The exit status is 1 if a program of a file
``right_*`` fails, one of ``wrong_*`` passes, or any is not reported alike in all runs.

What is compared of a race or of memory freed in use is its kind and both call sites, of all ranks together; of other
errors it is their text, without gloo's own words and without what ranks say of another's end.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

ROOT = Path(__file__).parents[1]
CORPUS = ROOT / "tests" / "emulated" / "corpus"
_HEADING = re.compile(r"^=* ?ranks? [\d, -]+ failed: (.*?) ?=*$", re.MULTILINE)
_LIMIT = 1200.0
# Characters of an error's first line.
_COMPARED = 300
# Once: a rank that has failed gets a fresh worker, which would take a second or more for these.
_LOADED = ("torch._dynamo.compiled_autograd", "torch.distributed.fsdp", "zeroshard_integrations.ddp")


@dataclass(frozen=True)
class Verdict:
    """What became of one program at one world size, with one choice of its parameters.

    Attributes:
        outcome: ``"passed"``, ``"failure"``, ``"error"`` or ``"skipped"``.
        text: what pytest prints of a failure.
        errors: the class and first line of each error, each once, without which ranks had it.
        findings: what the checker has found on all ranks, as `zeroshard_testing.emulated.report.Finding.key` has it.
    """

    outcome: str
    text: str
    errors: frozenset[str]
    findings: frozenset[tuple[str, ...]]
    seconds: float

    @property
    def reports(self) -> frozenset[str]:
        """What is the same in all runs, whatever the timing."""
        # Gloo's own words, and which ranks had stopped when another one looked, are a matter of time, and with the
        # ranks before it the place where a heading is cut off.
        causes = (
            error.partition("gloo: ")[0][:_COMPARED] for error in self.errors if not error.endswith("(a consequence)")
        )
        errors = (error for error in causes if "RaceError" not in error)
        return frozenset([*errors, *(" | ".join(finding) for finding in self.findings)])


@dataclass
class Tried:
    """A program in all runs: how it ended, and with which reports."""

    name: str
    outcomes: set[str] = field(default_factory=set)
    reports: list[frozenset[str]] = field(default_factory=list)

    @property
    def problem(self) -> str:
        """What is wrong, empty if nothing is."""
        due = "passed" if self.name.startswith("right") else "failure"
        if self.outcomes != {due}:
            return f"{', '.join(sorted(self.outcomes))}, due is {due}"
        return "" if len(set(self.reports)) == 1 else f"{len(set(self.reports))} different sets of reports"

    @property
    def differing(self) -> list[str]:
        """The reports that some runs have, and others have not."""
        return sorted(frozenset().union(*self.reports) - self.reports[0].intersection(*self.reports))


def main(
    files: Annotated[list[Path] | None, typer.Argument(help="what to run instead of the whole corpus")] = None,
    runs: Annotated[int, typer.Option(min=1, help="how often everything runs")] = 20,
    delay: Annotated[float, typer.Option(min=0, help="longest delay in the group's threads, in seconds")] = 0.05,
    first_seed: Annotated[int, typer.Option(help="seed of the delays of the first run; each has the next")] = 1,
    busy: Annotated[int, typer.Option(min=0, help="busy loops beside it")] = 2,
    select: Annotated[str, typer.Option("-k", help="only programs that match this, as pytest's option has it")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="write what was found to this file")] = None,
) -> None:
    """Run the corpus several times, and compare what is reported."""
    console, notes = Console(), Console(stderr=True)
    tried: dict[str, Tried] = {}
    seconds = []
    with tempfile.TemporaryDirectory() as folder, busy_loops(busy):
        for run in range(1, runs + 1):
            begin = time.monotonic()
            environment = {"ZEROSHARD_EMULATED_DELAYS": f"{delay}:{first_seed + run - 1}"} if delay else {}
            verdicts = run_programs(
                files or programs(), Path(folder) / str(run), environment=environment, select=select
            )
            seconds.append(time.monotonic() - begin)
            for name, verdict in verdicts.items():
                one = tried.setdefault(name, Tried(name))
                one.outcomes.add(verdict.outcome)
                one.reports.append(verdict.reports)
            notes.print(f"run {run} of {runs}: {len(verdicts)} programs in {seconds[-1]:.0f} s", highlight=False)
    # One that is missing in a run is as bad as one that differs.
    for one in tried.values():
        if len(one.reports) < runs:
            one.outcomes.add("missing")
    console.print(_table(list(tried.values())))
    wrong = [one for one in tried.values() if one.problem]
    for one in wrong:
        console.print(f"{one.name}: {one.problem}", markup=False, highlight=False)
        for report in one.differing:
            console.print(f"  {report}", markup=False, highlight=False)
    summary = f"{len(tried) - len(wrong)} of {len(tried)} programs are reported as is due, and alike in {runs} runs"
    console.print(f"{summary}; {sum(seconds) / len(seconds):.0f} s a run", markup=False, highlight=False)
    if json_file is not None:
        found = [
            {
                "program": one.name,
                "outcomes": sorted(one.outcomes),
                "reports": sorted(one.reports[0]),
                "problem": one.problem,
                "differing": one.differing,
            }
            for one in tried.values()
        ]
        result = {"runs": runs, "delay": delay, "busy": busy, "seconds": seconds, "programs": found}
        json_file.write_text(json.dumps(result, indent=1), encoding="utf-8")
    raise typer.Exit(1 if wrong or not tried else 0)


def programs() -> list[Path]:
    """Return the files of the corpus."""
    return [*sorted(CORPUS.glob("wrong_*.py")), *sorted(CORPUS.glob("right_*.py"))]


def run_programs(
    files: Sequence[Path | str], folder: Path, *, environment: Mapping[str, str] | None = None, select: str = ""
) -> dict[str, Verdict]:
    """Run files of the corpus in a pytest of their own.

    Args:
        files: which, or ids of pytest's nodes in them.
        folder: where its files go; made if it is not there.
        environment: variables in addition to those of this process.
        select: which tests, as pytest's option ``-k`` has it; all by default.

    Returns:
        By file, function and parameters, such as ``"right_by_page.test_ddp[2-emulated]"``.

    Raises:
        RuntimeError: Pytest has not come to its end; the text has its output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "report.xml"
    loaded = [argument for module in _LOADED for argument in ("-p", module)]
    options = [*loaded, "-p", "no:cacheprovider", "--tb=short", "-m", "exhaustive or not exhaustive"]
    options += ["--ranks-require=emulated", f"--junitxml={report}", f"--basetemp={folder / 'tmp'}"]
    options += ["-k", select] if select else []
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COLUMNS"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *map(str, files)],
        cwd=ROOT,
        env={**kept, "PYTHONDONTWRITEBYTECODE": "1", **(environment or {})},
        text=True,
        errors="replace",
        timeout=_LIMIT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    # 5: nothing is selected
    if done.returncode not in (0, 1, 5) or not report.exists():
        raise RuntimeError(f"pytest has ended with status {done.returncode}:\n{done.stdout}")
    # pytest has just written it.
    return dict(map(_verdict, ElementTree.parse(report).iter("testcase")))  # noqa: S314


def _verdict(element: ElementTree.Element) -> tuple[str, Verdict]:
    found = next((part for part in element if part.tag in ("failure", "error", "skipped")), None)
    text = "" if found is None else f"{found.get('message', '')}\n{found.text or ''}"
    findings = (
        tuple(json.loads(one.get("value", ""))) for one in element.iter("property") if one.get("name") == "finding"
    )
    # Which rank found it differs with the timing.
    errors = (re.sub(r"^(?:\w+\.)*(\w+: )(?:rank \d+: )?", r"\1", error) for error in _HEADING.findall(text))
    name = f"{element.get('classname', '').rpartition('.')[2]}.{element.get('name')}"
    outcome = "passed" if found is None else found.tag
    return name, Verdict(outcome, text, frozenset(errors), frozenset(findings), float(element.get("time", 0)))


@contextmanager
def busy_loops(number: int) -> Iterator[None]:
    """Keep so many processors busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _table(tried: Sequence[Tried]) -> Table:
    table = Table(Column("program", overflow="fold"), "ended", "reports", "alike", title="What the corpus reports")
    for one in tried:
        alike = "yes" if len(set(one.reports)) == 1 else "no"
        table.add_row(one.name, ", ".join(sorted(one.outcomes)), str(len(one.reports[0])), alike)
    return table


if __name__ == "__main__":
    typer.run(main)
