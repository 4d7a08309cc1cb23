"""Drops, one at a time, each edge that orders streams in the packages, and reports the edges that no test misses.

Run as ``python tools/dropped_edges.py`` where the packages are installed; tests given as arguments replace `TESTS`.
An edge is a call of ``wait_stream``, ``wait_event``, ``wait`` or ``record_stream``, named by its call site: the
innermost frames up to one outside the function that only passes it on.

The edges are those that the tests reach on the emulated accelerator. Each is dropped in a run of its own, which stops
at the first test that fails: that test *misses* the edge. An edge that no test misses must be listed in `MASKED`, with
its reason. An edge that a test misses, or that no test reaches, must not be listed there.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ("tests/emulated/test_emulated_edges.py",)
MASKED = ROOT / "tools" / "dropped_edges.json"
"""Edges that no test misses, by `Edge.name`, with the reason."""
_CALLS = ("wait_stream", "wait_event", "wait", "record_stream")
_PACKAGES = tuple(f"packages/{name}/src/" for name in ("zeroshard-comm", "zeroshard", "zeroshard-integrations"))


@dataclass(frozen=True)
class Edge:
    """An edge by its call site: files and lines, innermost first."""

    frames: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the edge in `MASKED`, with functions instead of lines, which change."""
        return " < ".join(map(_function_of, self.frames))


@dataclass(frozen=True)
class Result:
    """The result of dropping an edge: the test that failed first, empty if none failed."""

    edge: str
    place: str
    missed_by: str


def edges_in(lines: Iterable[str]) -> list[Edge]:
    """Return the edges of our packages among call sites as the emulated accelerator writes them, each once.

    Innermost is a call that makes an edge. At most three frames are kept: a function that only passes an edge on has
    many callers.
    """
    found = set()
    for line in lines:
        frames = [frame.removeprefix(f"{ROOT}/") for frame in line.split(" < ")]
        if not frames[0].startswith(_PACKAGES) or not _makes_an_edge(frames[0]):
            continue
        ours = [frame for frame in frames if frame.startswith(_PACKAGES)]
        consecutive = frames[: next((at for at, frame in enumerate(frames) if frame not in ours), len(frames))]
        found.add(Edge(tuple(consecutive[:3])))
    return sorted(found, key=lambda edge: edge.frames)


def problems(results: Sequence[Result], masked: Mapping[str, str]) -> list[str]:
    """Return what is wrong: edges that no test misses and that are not listed, and stale entries of the list."""
    unmissed = {result.edge for result in results if not result.missed_by}
    reached = {result.edge for result in results}
    places = {result.edge: result.place for result in results}
    return [
        *(f"no test misses {name} ({places[name]})" for name in sorted(unmissed - masked.keys())),
        *(f"{name} is listed as masked, but a test misses it" for name in sorted(masked.keys() & reached - unmissed)),
        *(f"{name} is listed as masked, but no test reaches it" for name in sorted(masked.keys() - reached)),
    ]


def main(tests: Sequence[str]) -> int:
    """Drop each edge, print the test that misses it, and return 1 if something is wrong with the list."""
    with tempfile.TemporaryDirectory() as folder:
        status, first = _run(tests, {"ZEROSHARD_DROP_EDGE": "", "ZEROSHARD_EDGES": f"{folder}/edges"})
        lines = [line for file in Path(folder).iterdir() for line in file.read_text().splitlines()]
    if status:
        print(f"the tests fail with every edge in place: {first}")
        return 1
    results = []
    for edge in edges_in(lines):
        _, failed = _run([*tests, "-x"], {"ZEROSHARD_DROP_EDGE": " < ".join(edge.frames)})
        results.append(Result(edge.name, edge.frames[0], failed))
        print(f"{edge.name} is missed by {failed or 'no test'}", flush=True)
    wrong = problems(results, json.loads(MASKED.read_text()))
    print(*wrong, f"{len(results)} edges, {len(wrong)} problems", sep="\n")
    return 1 if wrong or not results else 0


def _run(tests: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Run tests on the emulated accelerator, and return pytest's exit status and the first test that failed."""
    options = ["-q", "-p", "no:cacheprovider", "-m", "exhaustive or not exhaustive", "--tb=no", "-rf"]
    command = [sys.executable, "-m", "pytest", *options, "--ranks-backend=emulated", "--ranks-require=emulated", *tests]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    return done.returncode, failed[0] if failed else ""


def _makes_an_edge(frame: str) -> bool:
    path, _, line = frame.rpartition(":")
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _CALLS
        and node.lineno <= int(line) <= (node.end_lineno or node.lineno)
        for node in ast.walk(_parsed(path))
    )


def _function_of(frame: str) -> str:
    """Return the function at a line of a file, such as ``"side_stream.SideStream.join"``."""
    path, _, line = frame.rpartition(":")
    names = [Path(path).stem]
    node: ast.AST = _parsed(path)
    while True:
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        inside = [
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, kinds) and child.lineno <= int(line) <= (child.end_lineno or child.lineno)
        ]
        if not inside:
            return ".".join(names)
        node = inside[0]
        names.append(inside[0].name)


def _parsed(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:] or TESTS))
