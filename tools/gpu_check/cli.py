"""Reads the command line, runs the steps, and writes the folder of results."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from gpu_check.report import report_of, slug
from gpu_check.running import Budget, Outcome, Run
from gpu_check.sharing import served_by_mps
from gpu_check.steps import FULL, ROOT, select, table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps, write the report, and return the exit status: 1 if a step failed or timed out."""
    options = _parser().parse_args(arguments)
    try:
        steps = select(table(options.workers), options.only)
    except ValueError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    report, log = options.out / "report.md", options.out / "log.txt"
    log.write_text("", encoding="utf-8")
    notes: list[str] = []
    commit = options.commit or _commit()

    def write_report() -> None:
        report.write_text(report_of(run.machine, commit, notes, run.outcomes), encoding="utf-8")

    def record_outcome(outcome: Outcome, output: str) -> None:
        detail = f": {outcome.detail}" if outcome.detail else ""
        print(f"{outcome.name} {outcome.title}: {outcome.verdict}{detail}, {outcome.seconds:.0f} s", flush=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(f"\n##### {outcome.name} {outcome.title}\n{output}")
        # Write it after each step, so that the report survives the end of this process.
        write_report()

    run = Run(Budget(options.budget, options.slow), record_outcome)
    run.find_machine()
    with ExitStack() as stack:
        run.run(steps, cache(lambda: stack.enter_context(served_by_mps(notes))))
    # Including the outcome of the last step.
    write_report()
    print(f"{time.monotonic() - run.budget.began:.0f} s; the report: {report}")
    if run.has_gpu:
        print(f"to keep it: cp {report} {ROOT}/docs/measured/{slug(run.machine['GPU'])}.md")
    return int(any(outcome.verdict in ("failed", "timed out") for outcome in run.outcomes))


def _commit() -> str:
    """Return the commit of the checkout; "unknown" without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("gpu_check", description="Check one GPU, and write report.md and log.txt.")
    given = os.environ.get
    workers = 4 if (os.cpu_count() or 1) > 4 else 2
    add = parser.add_argument
    add("--out", type=Path, default=given("OUT", "gpu-check-out"), help="folder of results; also OUT")
    add("--budget", type=float, default=given("BUDGET_S", FULL), help=f"seconds for all, {FULL:g}; also BUDGET_S")
    add("--slow", type=float, default=given("SLOW", "1"), help="factor for every step's time limit; also SLOW")
    add("--workers", type=int, default=given("WORKERS", workers), help="tests at a time, by pytest-xdist; also WORKERS")
    names = "names of steps, such as 1,3b,5; step 1 always runs"
    add("--only", type=lambda text: text.split(","), default=[], help=names)
    add("--commit", default=given("COMMIT", ""), help="name of sources that are not a git checkout; also COMMIT")
    return parser
