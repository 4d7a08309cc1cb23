"""Time the test harness by what it promises: overhead, verdicts, recovery, and what it leaves behind.

Every figure comes from a pytest of its own over generated tests. Verdicts are timed from the moment at which a rank
dies or the last rank enters the collective, which the tests write down, to the end of pytest's call.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_CONFTEST = """
import json, os

def pytest_runtest_logreport(report):
    record = {"test": report.nodeid, "when": report.when, "start": report.start, "stop": report.stop,
              "outcome": report.outcome, "text": str(report.longrepr or "")[:4000]}
    with open(os.environ["HARNESS_REPORTS"], "a") as file:
        file.write(json.dumps(record) + "\\n")
"""

_HEADER = """
import os, signal, time
import pytest, torch
import torch.distributed as dist

def now(rank):
    with open(os.environ["HARNESS_MOMENTS"], "a") as file:
        file.write(f"{os.environ['PYTEST_CURRENT_TEST'].split()[0]} {time.time()}\\n")
"""

_NO_OP = """
@pytest.mark.parametrize("number", range({count}))
@pytest.mark.ranks({ranks})
def test_no_op(number):
    pass
"""

_PLAIN = """
def test_no_op():
    pass
"""

_VERDICTS = """
@pytest.mark.parametrize("number", range(2 * {count}))
@pytest.mark.ranks(2)
def test_dies_every_other_time(rank, number):
    if number % 2 == 0:
        if rank:
            now(rank)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x == 2

@pytest.mark.parametrize("number", range({count}))
@pytest.mark.ranks(2)
def test_deadlock(rank, number):
    now(rank)
    if rank:
        dist.all_reduce(torch.ones(4))
    else:
        dist.broadcast(torch.ones(4), 0)

@pytest.mark.parametrize("number", range({count}))
@pytest.mark.ranks(2)
def test_early_return(rank, number):
    now(rank)
    if rank:
        dist.all_reduce(torch.ones(4))
"""


@dataclass(frozen=True)
class Figure:
    """One measured figure.

    Attributes:
        what: What was measured.
        value: Its median.
        worst: The largest value seen.
        bound: What it may be at most.
        unit: The unit of the three.
        count: Number of values.
    """

    what: str
    value: float
    worst: float
    bound: float
    unit: str
    count: int


def main() -> int:
    """Run the benchmark; the exit status is 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=int, default=200, help="number of no-op tests (default: %(default)s)")
    parser.add_argument(
        "--verdicts", type=int, default=15, help="times that each verdict is timed (default: %(default)s)"
    )
    parser.add_argument(
        "--many", type=int, default=1000, help="tests before leftovers are looked for (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    arguments = parser.parse_args()
    figures = []
    for figure in _figures(arguments.tests, arguments.verdicts, arguments.many):
        figures.append(figure)
        met = "" if figure.value <= figure.bound else "   MISSED"
        print(
            f"{figure.what}: {figure.value:.4g} {figure.unit} (largest {figure.worst:.4g} of {figure.count}), at most "
            f"{figure.bound:g}{met}",
            file=sys.stderr if arguments.json else sys.stdout,
            flush=True,
        )
    if arguments.json:
        print(json.dumps([asdict(figure) for figure in figures]))
    return 0 if all(figure.value <= figure.bound for figure in figures) else 1


def _figures(tests: int, verdicts: int, many: int) -> Iterator[Figure]:
    for ranks, bound in ((2, 5), (4, 10)):
        reports, _ = _run(_NO_OP.format(count=tests + 1, ranks=ranks))
        spans = _spans(reports)
        cold = [_seconds(_NO_OP.format(count=1, ranks=ranks)) - _seconds(_PLAIN) for _ in range(5)]
        yield _figure(f"cold start: a run of one test, {ranks} ranks, beyond one of a plain test", cold, 3, "s")
        warm = [1e3 * span for span in spans[1:]]
        yield _figure(f"overhead of a test, {ranks} ranks", warm, bound, "ms")
    reports, moments = _run(_VERDICTS.format(count=verdicts))
    for name, what, bound in (
        ("test_dies_every_other_time", "dead rank to verdict", 100),
        ("test_deadlock", "deadlock to verdict", 500),
        ("test_early_return", "early return to verdict", 500),
    ):
        failed = [report for report in reports if f"::{name}[" in report["test"] and report["outcome"] == "failed"]
        assert len(failed) == verdicts, f"{len(failed)} of {verdicts} tests called {name} failed"
        delays = [1e3 * (report["stop"] - moments[report["test"]]) for report in failed]
        yield _figure(what, delays, bound, "ms")
    calls = [report for report in reports if report["when"] == "call" and "::test_dies" in report["test"]]
    after = [1e3 * (next_["stop"] - dead["stop"]) for dead, next_ in zip(calls[::2], calls[1::2], strict=True)]
    yield _figure("dead rank's verdict to the end of the next test", after, 100, "ms")
    yield from _leftovers(many)
    failures = [_parallel_failures() for _ in range(5)]
    yield Figure("failures of 200 tests with -n 4", statistics.median(failures), max(failures), 0, "tests", 5)


def _leftovers(many: int) -> Iterator[Figure]:
    source = _NO_OP.format(count=many, ranks=2)
    for what, interrupt_after in ((f"{many} tests", None), ("Ctrl-C", 4.0)):
        with tempfile.TemporaryDirectory(prefix="bench-harness-tmp-") as name:
            before = _shared_memory()
            _run(source, interrupt_after=interrupt_after, temporary=name)
            left = sorted((_shared_memory() - before) | _files(Path(name)) | _processes(name))
            yield Figure(f"left after {what}: {'; '.join(left) or 'nothing'}", len(left), len(left), 0, "things", 1)


def _figure(what: str, values: list[float], bound: float, unit: str) -> Figure:
    return Figure(what, statistics.median(values), max(values), bound, unit, len(values))


def _spans(reports: list[dict[str, Any]]) -> list[float]:
    """Return the seconds from the start of each test's setup to the end of its teardown."""
    starts = [report["start"] for report in reports if report["when"] == "setup"]
    stops = [report["stop"] for report in reports if report["when"] == "teardown"]
    return [stop - start for start, stop in zip(starts, stops, strict=True)]


def _seconds(source: str) -> float:
    """Return the seconds that a whole run of pytest takes."""
    start = time.perf_counter()
    _run(source)
    return time.perf_counter() - start


def _run(
    source: str, *options: str, interrupt_after: float | None = None, temporary: str | None = None
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Run generated tests; return pytest's reports, and the last moment that each test wrote down."""
    with tempfile.TemporaryDirectory(prefix="bench-harness-") as name:
        folder = Path(name)
        (folder / "conftest.py").write_text(_CONFTEST)
        (folder / "test_generated.py").write_text(textwrap.dedent(_HEADER) + source)
        (folder / "pytest.ini").write_text("[pytest]\n")
        environment = {
            **os.environ,
            "HARNESS_REPORTS": str(folder / "reports"),
            "HARNESS_MOMENTS": str(folder / "moments"),
            "TMPDIR": temporary or name,
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--basetemp={folder / 'tmp'}",
            *options,
        ]
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        if interrupt_after is not None:
            time.sleep(interrupt_after)
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=600)
        lines = _lines(folder / "reports")
        moments = dict(line.rsplit(" ", 1) for line in _lines(folder / "moments"))
        return [json.loads(line) for line in lines], {test: float(moment) for test, moment in moments.items()}


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _parallel_failures() -> int:
    reports, _ = _run(_NO_OP.format(count=200, ranks=2), "-n", "4")
    passed = {report["test"] for report in reports if report["when"] == "call" and report["outcome"] == "passed"}
    return 200 - len(passed)


def _processes(marker: str) -> set[str]:
    """Return the processes that have a text in their environment; sockets live no longer than their processes."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (path / "environ").read_text() and int(path.name) != os.getpid():
                found.add(f"process {path.name}: {(path / 'cmdline').read_text()[:80]}")
        except OSError:
            continue
    return found


def _files(folder: Path) -> set[str]:
    return {f"temporary file {path.name}" for path in folder.iterdir()}


def _shared_memory() -> set[str]:
    folder = Path("/dev/shm")  # noqa: S108 - only looked at
    return {f"shared memory {path.name}" for path in folder.iterdir()} if folder.is_dir() else set()


if __name__ == "__main__":
    sys.exit(main())
