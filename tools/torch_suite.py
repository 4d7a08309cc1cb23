"""Runs PyTorch's distributed tests as PyTorch runs them, and on the ranks of zeroshard-testing, and compares.

Run as ``python tools/torch_suite.py``; an argument replaces the number of methods, 60. The tests are the methods of
``torch.testing._internal.distributed.distributed_test``, which comes with torch's wheel; they need the packages
expecttest and numpy. Both sides run the same class under pytest, at 2 and 4 ranks over gloo. As PyTorch runs them, each
method starts its own ranks, which takes about 10 s.

First all methods run on ranks, to find out which of them are skipped on this machine. Then the chosen ones run on both
sides: an even choice of the methods that run, and one skipped method for each reason. The exit status is 1 if a method
passes, fails or is skipped on only one side. This is expected of no method.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

WORLD_SIZES = (2, 4)
_LIMIT = 3600.0
# Without the call in setUp PyTorch's class starts no rank, and all tests pass.
MODULES = {
    "as_pytorch": """\
from torch.testing._internal.distributed import distributed_test


class TestSuite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()
""",
    "on_ranks": """\
import os

import as_pytorch
from zeroshard_testing.torch_cases import as_rank_tests

TestSuite = as_rank_tests(as_pytorch.TestSuite, int(os.environ["WORLD_SIZE"]), init=True)
""",
}


def run(folder: Path, module: str, world_size: int, methods: Sequence[str] = ()) -> Mapping[str, str]:
    """Run methods of a module's class, or all; return ``"passed"``, ``"failed"`` or why it was skipped, by name."""
    report = folder / "report.xml"
    for left in (report, folder / "init"):
        left.unlink(missing_ok=True)
    tests = [f"{module}.py::TestSuite::{method}" for method in methods] or [f"{module}.py"]
    options = ["-c", os.devnull, "--rootdir=.", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-W", "ignore"]
    environment = {
        # PyTorch's tests read these when they are imported.
        "BACKEND": "gloo",
        "WORLD_SIZE": str(world_size),
        "TEMP_DIR": str(folder),
        "INIT_METHOD": (folder / "init").as_uri(),
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTEST_ADDOPTS": "",
    }
    command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *tests]
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_LIMIT,
        check=False,
    )
    # pytest has just written it.
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []  # noqa: S314
    results = {case.get("name", "").partition("[")[0]: _result(case) for case in cases}
    if not results or not results.keys() >= {*methods}:
        raise RuntimeError(f"no result for {sorted({*methods} - results.keys())}\n{done.stdout[-3000:]}")
    return results


def _result(case: ElementTree.Element) -> str:
    for child in case:
        if child.tag in ("failure", "error"):
            return "failed"
        if child.tag == "skipped":
            return f"skipped: {child.get('message', '')}"
    return "passed"


def choose(found: Mapping[str, str], number: int) -> list[str]:
    """Return about this number of the methods that run, evenly chosen, and one skipped method for each reason."""
    skipped = {result: name for name, result in found.items() if result.startswith("skipped")}
    running = [name for name, result in found.items() if result not in skipped]
    return sorted({*running[:: max(1, len(running) // number)], *skipped.values()})


def main(number: int = 60) -> int:
    """Run and compare; return the exit status."""
    differing = 0
    with tempfile.TemporaryDirectory(prefix="torch-suite-") as name:
        folder = Path(name)
        for module, source in MODULES.items():
            (folder / f"{module}.py").write_text(source, encoding="utf-8")
        found = run(folder, "on_ranks", max(WORLD_SIZES))
        methods = choose(found, number)
        print(f"{len(methods)} of {len(found)} methods", flush=True)
        for world_size in WORLD_SIZES:
            theirs, ours = (run(folder, module, world_size, methods) for module in MODULES)
            kinds = {method: (theirs[method].partition(":")[0], ours[method].partition(":")[0]) for method in methods}
            for method, (expected, seen) in kinds.items():
                if expected != seen:
                    differing += 1
                    print(f"{method} at {world_size} ranks: {theirs[method]} as PyTorch runs it, here {ours[method]}")
            print(f"{world_size} ranks: {dict(Counter(seen for _, seen in kinds.values()))}", flush=True)
    print(f"{differing} results differ")
    return int(differing > 0)


if __name__ == "__main__":
    raise SystemExit(main(*map(int, sys.argv[1:])))
