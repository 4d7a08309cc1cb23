"""What the emulated accelerator costs: its compilation, and its tests beside the same tests on gloo, in processor time.

Run as ``python tools/bench/emulated.py``; ``--json`` prints the figures for machines, and test files named after the
options run instead of the usual ones. With ``--before FOLDER``, a checkout of the repository, tests on gloo are timed
there too, in turn with this one, which tells what tests that do not use it pay for it.

Every test runs on both backends in one pytest. The time of a test is that of its ranks, all threads, from the end of
the test before; the first test of a worker, which loads the device, is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).parents[2]
TESTS = ("tests/gradients/test_ddp_hooks.py", "tests/step/test_parity.py")
_PACKAGES = ("zeroshard-core", "zeroshard-comm", "zeroshard", "zeroshard-integrations", "zeroshard-testing")


def ratios(times: Mapping[str, float]) -> dict[str, float]:
    """Return, for each test that ran on both backends, its time on the emulated one over that on gloo.

    >>> ratios({"test_a[2-gloo]": 2.0, "test_a[2-emulated]": 5.0, "test_b[2-gloo]": 1.0})
    {'test_a[2]': 2.5}
    """
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for name, seconds in times.items():
        backend = re.search(r"-(gloo|emulated)(?=[-\]])", name)
        if backend:
            found[name.replace(backend[0], "", 1)][backend[1]] = seconds
    return {name: pair["emulated"] / pair["gloo"] for name, pair in found.items() if len(pair) == 2}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description="What the emulated accelerator costs, in processor time.")
    parser.add_argument("tests", nargs="*", default=list(TESTS), help="test files to run instead of the usual ones")
    parser.add_argument("--before", type=Path, help="a checkout in which to time tests on gloo too")
    parser.add_argument("--pairs", type=int, default=5, help="how often to time tests on gloo in both")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        console.print("compiling")
        program = "from zeroshard_testing.emulated.build import build; build()"
        figures["compilation, s"] = _run([sys.executable, "-c", program], {"ZEROSHARD_CACHE": folder})
        console.print("tests on both backends")
        _pytest(ROOT, options.tests, "exhaustive or not exhaustive", {"ZEROSHARD_TEST_TIMES": f"{folder}/times"})
        times: dict[str, float] = defaultdict(float)
        for file in Path(folder).glob("times.*"):
            # The first test of a worker has loaded its backend.
            for line in file.read_text().splitlines()[1:]:
                seconds, name = line.split(" ", 1)
                times[name] += float(seconds)
    found = sorted(ratios(times).values())
    figures |= {
        "tests on both": len(found),
        "emulated over gloo, median": statistics.median(found),
        "upper quartile": found[len(found) * 3 // 4],
    }
    if options.before is not None:
        pairs = []
        for _ in track(range(options.pairs), "tests on gloo, here and before", console=console):
            before = _pytest(options.before, options.tests, "not exhaustive", {}, "--ranks-backend=gloo-cpu")
            pairs.append(_pytest(ROOT, options.tests, "not exhaustive", {}, "--ranks-backend=gloo-cpu") / before)
        figures["gloo over before, median"] = statistics.median(pairs)
        figures["gloo over before, all"] = [round(pair, 3) for pair in sorted(pairs)]
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        table = Table("figure", "value")
        for name, value in figures.items():
            table.add_row(name, f"{value:.3g}" if isinstance(value, float) else str(value))
        Console().print(table)
    return 0


def _pytest(root: Path, tests: Sequence[str], marks: str, environment: Mapping[str, str], *options: str) -> float:
    """Run tests of a checkout from its sources, and return the processor time of all processes, in seconds."""
    sources = os.pathsep.join(str(root / "packages" / name / "src") for name in _PACKAGES)
    path = os.pathsep.join([sources, str(Path(__file__).parent)])
    times = ["-p", "rank_times"] if environment else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, *times, *options, *tests]
    return _run(command, {"PYTHONPATH": path, **environment}, cwd=root)


def _run(command: Sequence[str], environment: Mapping[str, str], cwd: Path = ROOT) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    raise SystemExit(main())
