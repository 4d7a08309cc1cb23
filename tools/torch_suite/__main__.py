"""Runs PyTorch's distributed tests with PyTorch's own runner and with zeroshard-testing, and compares.

``python tools/torch_suite --help``. The tests are those of ``torch.testing._internal.distributed.distributed_test``,
which comes with torch's wheel; they need the packages expecttest and numpy. Both runners get the same class, the same
environment variables, and one process for each world size.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

WORLD_SIZES = (2, 4)

# The module that both runners import. Without the call in setUp, PyTorch's runner starts no rank, and all tests pass.
CASES = """\
from torch.testing._internal.distributed import distributed_test


class TestSuite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()
"""
RANK_TESTS = """\
import os

import torch_suite_cases
from zeroshard_testing.torch_cases import as_rank_tests

TestSuite = as_rank_tests(torch_suite_cases.TestSuite, int(os.environ["WORLD_SIZE"]), init=True)
"""


@dataclass(frozen=True)
class Verdict:
    """What became of one method.

    Attributes:
        method: Its name.
        verdict: ``"passed"``, ``"skipped"`` or ``"failed"``.
        seconds: How long it took, without the start of the runner.
        text: Why it was skipped, or how it failed.
    """

    method: str
    verdict: str
    seconds: float
    text: str


@dataclass(frozen=True)
class Run:
    """What became of all methods under one runner at one world size.

    Attributes:
        verdicts: By the name of the method.
        seconds: From the start of the runner's process to its end.
    """

    verdicts: dict[str, Verdict]
    seconds: float


class RunnerError(Exception):
    """A runner ended without a verdict for each method; the text is what it said last."""


Runner = Callable[[Path, int, Sequence[str], Callable[[int], None]], Run]
"""Takes a folder to work in, a world size, the names of methods, and whom to tell how many have ended."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def compare(
    *,
    methods: Annotated[
        int, typer.Option(min=1, help="How many of the methods that run on gloo and a CPU; they are taken evenly.")
    ] = 60,
    skips: Annotated[
        bool, typer.Option(help="Take one skipped method for each reason as well, some 35, of which 4 start ranks.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run methods of PyTorch's distributed_test at 2 and 4 ranks with both runners, and compare verdicts and seconds.

    First all methods run with zeroshard-testing at 4 ranks, to find out which of them run on this machine. A method
    takes PyTorch's runner some 5 s at 2 ranks and 10 s at 4. The exit code is 0 if all verdicts are equal, 1 if some
    are not, 2 if a runner breaks off.
    """
    # Also when this program is ended, no rank and no file is left.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    busy = os.getloadavg()[0]
    try:
        with (
            tempfile.TemporaryDirectory(prefix="torch-suite-") as folder,
            Progress(console=Console(stderr=True)) as bar,
        ):
            Path(folder, "torch_suite_cases.py").write_text(CASES, encoding="utf-8")
            Path(folder, "rank_tests.py").write_text(RANK_TESTS, encoding="utf-8")
            finding = bar.add_task("which methods run", total=None)
            found = run_with_pytest(Path(folder), max(WORLD_SIZES), [], lambda _: None)
            bar.remove_task(finding)
            chosen = choose(found, methods, skips=skips)
            runs = {
                (name, size): _with_progress(bar, f"{name}, {size} ranks", runner, Path(folder), size, chosen)
                for size in WORLD_SIZES
                for name, runner in RUNNERS.items()
            }
    except RunnerError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from error
    if as_json:
        report = [{"runner": name, "world_size": size, **asdict(run)} for (name, size), run in runs.items()]
        print(json.dumps({"methods": len(found.verdicts), "runs": report}, indent=1))
    else:
        show(runs, chosen, found)
        print(
            f"this machine: {os.cpu_count()} CPUs, load {busy:.1f} before the runs, {os.getloadavg()[0]:.1f} after them"
        )
    raise typer.Exit(0 if all(_equal(runs, method) for method in chosen) else 1)


def run_with_torch(folder: Path, world_size: int, methods: Sequence[str], tell: Callable[[int], None]) -> Run:
    """Run methods with PyTorch's own runner; see `Runner`."""
    log, verdicts = folder / f"torch-{world_size}.log", folder / f"torch-{world_size}.jsonl"
    verdicts.touch()

    def read() -> Iterator[Verdict]:
        for line in verdicts.read_text(encoding="utf-8").splitlines():
            yield Verdict(**json.loads(line))

    runner = [sys.executable, str(Path(__file__).with_name("torch_runner.py"))]
    command = [*runner, str(verdicts), "torch_suite_cases", "TestSuite", *methods]
    seconds = _finish(command, _environment(folder, world_size), log, lambda: tell(len(list(read()))))
    return _complete(Run({verdict.method: verdict for verdict in read()}, seconds), methods, log)


def run_with_pytest(folder: Path, world_size: int, methods: Sequence[str], tell: Callable[[int], None]) -> Run:
    """Run methods with pytest and zeroshard-testing; see `Runner`. All there are if ``methods`` is empty."""
    log, report, module = folder / f"pytest-{world_size}.log", folder / "report.xml", folder / "rank_tests.py"
    report.unlink(missing_ok=True)
    tests = [f"{module}::TestSuite::{method}" for method in methods] or [str(module)]
    own = ["-c", os.devnull, f"--rootdir={folder}", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-W", "ignore"]
    command = [sys.executable, "-m", "pytest", *own, f"--junitxml={report}", *tests]
    seconds = _finish(command, _environment(folder, world_size), log, lambda: None)
    if not report.exists():
        raise RunnerError(_end_of(log))
    cases = ElementTree.parse(report).iter("testcase")  # noqa: S314 - pytest has just written it
    verdicts = [_verdict_of(case) for case in cases]
    tell(len(verdicts))
    return _complete(Run({verdict.method: verdict for verdict in verdicts}, seconds), methods, log)


RUNNERS: dict[str, Runner] = {"PyTorch": run_with_torch, "zeroshard": run_with_pytest}


def choose(found: Run, number: int, *, skips: bool) -> list[str]:
    """Return ``number`` of the methods that were not skipped, evenly, and one skipped method for each reason."""
    running = [name for name, verdict in found.verdicts.items() if verdict.verdict != "skipped"]
    number = min(number, len(running))
    skipped = {verdict.text: name for name, verdict in found.verdicts.items() if verdict.verdict == "skipped"}
    evenly = [running[index * len(running) // number] for index in range(number)]
    return sorted([*evenly, *(skipped.values() if skips else ())])


def show(runs: dict[tuple[str, int], Run], chosen: Sequence[str], found: Run) -> None:
    """Print a row for each method, then sums."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table(Column("method", no_wrap=True), *(f"{name} {size}" for name, size in runs), "equal")
    for method in chosen:
        verdicts = [run.verdicts[method].verdict for run in runs.values()]
        table.add_row(method, *verdicts, "yes" if _equal(runs, method) else "[red]no[/]")
    console.print(table)
    sums = Table("runner", "ranks", "passed", "skipped", "failed", "seconds", "seconds of methods")
    for (name, size), run in runs.items():
        counts = Counter(verdict.verdict for verdict in run.verdicts.values())
        spent = sum(verdict.seconds for verdict in run.verdicts.values())
        numbers = [str(counts[verdict]) for verdict in ("passed", "skipped", "failed")]
        sums.add_row(name, str(size), *numbers, f"{run.seconds:.1f}", f"{spent:.1f}")
    console.print(sums)
    equal = sum(_equal(runs, method) for method in chosen)
    console.print(f"{equal} of {len(chosen)} methods have equal verdicts at all world sizes")
    total = {name: sum(run.seconds for (of, _), run in runs.items() if of == name) for name in RUNNERS}
    console.print("; ".join(f"{name}: {seconds:.0f} s" for name, seconds in total.items()))
    left_out = Counter(
        "that are skipped" if verdict.verdict == "skipped" else "that run"
        for name, verdict in found.verdicts.items()
        if name not in chosen
    )
    console.print(f"left out of {len(found.verdicts)}: " + ", ".join(f"{n} {what}" for what, n in left_out.items()))


def _equal(runs: dict[tuple[str, int], Run], method: str) -> bool:
    return all(len({runs[name, size].verdicts[method].verdict for name in RUNNERS}) == 1 for size in WORLD_SIZES)


def _with_progress(bar: Progress, title: str, runner: Runner, folder: Path, size: int, methods: Sequence[str]) -> Run:
    task = bar.add_task(title, total=len(methods))
    return runner(folder, size, methods, lambda ended: bar.update(task, completed=ended))


def _environment(folder: Path, world_size: int) -> dict[str, str]:
    """Return what PyTorch's tests look for when they are imported, and what makes both runners alike."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    (folder / "init").unlink(missing_ok=True)
    return {
        **environment,
        "BACKEND": "gloo",
        "WORLD_SIZE": str(world_size),
        "TEMP_DIR": str(folder),
        "INIT_METHOD": (folder / "init").as_uri(),
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [environment.get("PYTHONPATH")])]),
    }


def _finish(command: Sequence[str], environment: dict[str, str], log: Path, look: Callable[[], None]) -> float:
    """Run a command to its end, looking in meanwhile; return the seconds it took."""
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=log.parent,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                look()
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                # With the ranks that PyTorch's runner has spawned.
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
    look()
    return time.monotonic() - began


def _verdict_of(case: ElementTree.Element) -> Verdict:
    name = case.get("name", "").partition("[")[0]
    kinds = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    for child in case:
        if child.tag in kinds:
            return Verdict(name, kinds[child.tag], float(case.get("time", "0")), child.get("message", ""))
    return Verdict(name, "passed", float(case.get("time", "0")), "")


def _complete(run: Run, methods: Sequence[str], log: Path) -> Run:
    missing = [method for method in methods if method not in run.verdicts]
    if missing or not run.verdicts:
        raise RunnerError(f"no verdict for {', '.join(missing) or 'any method'}\n{_end_of(log)}")
    return run


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:])


if __name__ == "__main__":
    app(prog_name="torch_suite")
