"""Runs one trial under one harness, and reads what came of it: from the exit status, or else from pytest's report."""

from __future__ import annotations

import contextlib
import enum
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness_table.harnesses import INI, TOOLS, Harness
from harness_table.trials import Trial


class Verdict(enum.Enum):
    """What a harness made of a test."""

    PASSED = "passed"
    FAILED = "failed"
    FAILED_AT_LIMIT = "failed at its time limit"
    FAILED_WITHOUT_END = "reported as failed, but did not end"
    HANGS = "hangs"

    @property
    def caught(self) -> bool:
        """Whether the harness tells that the test is wrong."""
        return self not in (Verdict.PASSED, Verdict.HANGS)


@dataclass(frozen=True)
class Bounds:
    """How long a test may take.

    Attributes:
        limit: Seconds that each harness is given as its own time limit.
        bound: Seconds until the run is ended from outside.
    """

    limit: float
    bound: float

    def times(self, factor: int) -> Bounds:
        """Return longer bounds, for a run whose verdict is no question of time."""
        return Bounds(factor * self.limit, factor * self.bound)


@dataclass(frozen=True)
class Run:
    """One test file's run.

    Attributes:
        verdict: What the harness made of it.
        seconds: From the start of the process to its end.
        said: What pytest's summary said of it, to see whether that is the cause.
        test_seconds: Of each test, as pytest counts them.
    """

    verdict: Verdict
    seconds: float
    said: str
    test_seconds: tuple[float, ...] = ()


def run(harness: Harness, trial: Trial, bounds: Bounds, names: Sequence[str] = ("it",)) -> Run | None:
    """Run a trial once for each of ``names``, in one new process; None if the harness has no means for its form."""
    text = harness.write(trial, names, bounds.limit)
    if text is None:
        return None
    with tempfile.TemporaryDirectory(prefix="harness-table-") as folder:
        place = Path(folder)
        (place / "test_it.py").write_text(text)
        (place / "pytest.ini").write_text(INI)
        for file in harness.files:
            shutil.copy(file, place)
        status, seconds, output = _run_pytest(harness, place, bounds)
        failed, times = _report(place)
        return Run(verdict_of(status, failed, seconds, bounds), seconds, last_word(output), times)


def verdict_of(status: int | None, reported: bool, seconds: float, bounds: Bounds) -> Verdict:
    """Judge a run.

    Args:
        status: The exit status; None if the run was ended from outside.
        reported: Whether pytest's report has a failure.
        seconds: How long it took.
        bounds: How long it might take.

    Examples:
        >>> verdict_of(1, True, 4.0, Bounds(15, 30)), verdict_of(1, True, 17.0, Bounds(15, 30))
        (<Verdict.FAILED: 'failed'>, <Verdict.FAILED_AT_LIMIT: 'failed at its time limit'>)
    """
    if status is None:
        return Verdict.FAILED_WITHOUT_END if reported else Verdict.HANGS
    if status == 0:
        return Verdict.PASSED
    return Verdict.FAILED if seconds < bounds.limit else Verdict.FAILED_AT_LIMIT


def last_word(output: str) -> str:
    """Return what pytest's summary says of the test, or the last line if there is none, in at most 200 characters."""
    lines = [re.sub(r"\x1b\[\d*m", "", line).strip() for line in output.splitlines()]
    told = [line for line in lines if re.match(r"(FAILED|ERROR|!{5})", line)] or [line for line in lines if line]
    return (told[-1] if told else "")[:200]


def _run_pytest(harness: Harness, place: Path, bounds: Bounds) -> tuple[int | None, float, str]:
    command = [sys.executable, "-m", "pytest", "-rfE", "-p", "no:cacheprovider", "--junitxml=report.xml"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    paths = [str(TOOLS), *map(str, harness.python_path), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= harness.environment
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "300"}
    if harness.limit_variable is not None:
        environment[harness.limit_variable] = f"{bounds.limit:.0f}"
    # A file, for a process that outlives the run would keep a pipe open.
    with (place / "output.txt").open("w+", errors="replace") as output:
        started = time.perf_counter()
        process = subprocess.Popen(
            [*command, *harness.options, "test_it.py"],
            cwd=place,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(bounds.bound)
        finally:
            seconds = time.perf_counter() - started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, seconds, output.read()


def _report(place: Path) -> tuple[bool, tuple[float, ...]]:
    """Return whether pytest's report has a failure, and the seconds of its tests."""
    try:
        suites = ElementTree.parse(place / "report.xml")  # noqa: S314 - pytest has just written it
    except (OSError, ElementTree.ParseError):
        return False, ()
    failed = any(suites.find(f".//{kind}") is not None for kind in ("failure", "error"))
    return failed, tuple(float(case.get("time", "0")) for case in suites.iter("testcase"))
