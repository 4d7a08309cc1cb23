"""Tests that go wrong on ranks in every way we know of, and tests that are right: each has the verdict it deserves.

``corpus/wrong_<kind>*.py`` and ``corpus/right_<topic>*.py`` are run by a pytest of their own; each test here looks at
what became of one of their tests. Beside a wrong one stands what its report must begin with, or what the documentation
says of its passing all the same. A right one passes, or is skipped for the reason that stands beside it. In between are
healthy tests, which pass whatever came before.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

CORPUS = Path(__file__).parent / "corpus"
DOCUMENTATION = Path(__file__).parents[3] / "docs" / "testing.md"
PROCESSES = [
    pytest.param(0, id="n0"),
    pytest.param(
        4,
        id="n4",
        marks=[
            pytest.mark.exhaustive,
            pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="needs pytest-xdist"),
        ],
    ),
]
_PHASE = re.compile(r'failed on (?:setup|teardown) with "')


@dataclass(frozen=True)
class Case:
    """A test of the corpus, and what is to become of it."""

    name: str
    says: str | None
    may_skip: str | None
    unchecked: str | None
    is_exhaustive: bool

    @property
    def kind(self) -> str:
        """What the test is about: the second word of its file's name."""
        return self.name.split(".")[0].split("_")[1]


@dataclass(frozen=True)
class Verdict:
    """What became of one test."""

    kind: str
    text: str


@dataclass(frozen=True)
class Run:
    """What became of half of the corpus."""

    status: int
    output: str
    verdicts: dict[str, list[Verdict]]


def cases(half: str) -> dict[str, Case]:
    """Return the tests of the files whose names begin so, by ``file.Class.function``."""
    found = {}
    for path in sorted(CORPUS.glob(f"{half}_*.py")):
        tree = ast.parse(path.read_text())
        for name, function in functions(tree, path.stem):
            marks = [marked(function, mark) for mark in ("says", "may_skip", "unchecked")]
            found[name] = Case(name, *marks, "pytest.mark.exhaustive" in map(ast.unparse, function.decorator_list))
    return found


def functions(node: ast.AST, prefix: str) -> list[tuple[str, ast.AST]]:
    """Return the test functions below a node, also those under conditions, with their names."""
    found: list[tuple[str, ast.AST]] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if child.name.startswith("test_"):
                found.append((f"{prefix}.{child.name}", child))
        elif isinstance(child, ast.ClassDef):
            if child.name.startswith("Test"):
                found += functions(child, f"{prefix}.{child.name}")
        else:
            found += functions(child, prefix)
    return found


def marked(function: ast.AST, name: str) -> str | None:
    """Return the text that a function's marker of that name has."""
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).rpartition(".")[2] == name:
            return ast.literal_eval(decorator.args[0])
    return None


ALL_WRONG = cases("wrong")
HEALTHY = {name: case for name, case in ALL_WRONG.items() if ".test_healthy" in name}
WRONG = {name: case for name, case in ALL_WRONG.items() if name not in HEALTHY}
RIGHT = cases("right")


def runs(names: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrise by test and number of processes; exhaustive tests are in the run by several alone."""
    run = [(name, processes) for name in names for processes in PROCESSES]
    return pytest.mark.parametrize(
        ("name", "processes"),
        [
            pytest.param(name, *processes.values, id=f"{name}-{processes.id}", marks=processes.marks)
            for name, processes in run
            if processes.marks or not {**ALL_WRONG, **RIGHT}[name].is_exhaustive
        ],
    )


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int], Run]]:
    """Run half of the corpus, once for all tests here."""
    halves: dict[tuple[str, int], Future[Run]] = {}

    def run_half(half: str, processes: int) -> Run:
        # Wrong tests wait more than they compute, so both halves run at a time where each is one process.
        for other in ("wrong", "right") if processes == 0 else (half,):
            if (other, processes) not in halves:
                folder = tmp_path_factory.mktemp(other)
                halves[other, processes] = executor.submit(run_corpus, other, processes, folder)
        return halves[half, processes].result()

    with ThreadPoolExecutor(2) as executor:
        yield run_half


def run_corpus(half: str, processes: int, folder: Path) -> Run:
    report = folder / "report.xml"
    # Loaded once: a fresh worker takes more than a second for it, in its first backward.
    loaded = ["-p", "torch._dynamo.compiled_autograd"]
    options = [
        *loaded,
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        f"--junitxml={report}",
        f"--basetemp={folder / 'tmp'}",
    ]
    options += ["-n", str(processes)] if processes else ["-m", "not exhaustive"]
    files = [path.name for path in sorted(CORPUS.glob(f"{half}_*.py"))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COLUMNS"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=CORPUS,
        env={**environment, "PYTHONDONTWRITEBYTECODE": "1"},
        text=True,
        errors="replace",
        timeout=1200,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return Run(done.returncode, done.stdout, verdicts(report) if report.exists() else {})


def verdicts(report: Path) -> dict[str, list[Verdict]]:
    """Return what became of each test, by ``file.Class.function``, for all of its parameters."""
    found: dict[str, list[Verdict]] = {}
    for element in ElementTree.parse(report).iter("testcase"):
        name = element.get("name", "").partition("[")[0]
        parts = [part for part in element if part.tag in ("failure", "error", "skipped")] or [element]
        for part in parts:
            text = _PHASE.sub("", part.get("message", ""), count=1)
            kind = "passed" if part is element else part.tag
            found.setdefault(f"{element.get('classname')}.{name}", []).append(Verdict(kind, f"{text}\n{part.text}"))
    return found


def of(done: Run, name: str) -> list[Verdict]:
    """Return what became of one test."""
    assert name in done.verdicts, f"{name} has no verdict\n{done.output}"
    return done.verdicts[name]


def is_skipped_as_it_may(case: Case, verdict: Verdict) -> bool:
    return case.may_skip is not None and verdict.kind == "skipped" and re.match(case.may_skip, verdict.text) is not None


@runs(WRONG)
def test_a_wrong_test_fails_with_its_cause(run: Callable[[str, int], Run], name: str, processes: int) -> None:
    case = WRONG[name]
    for verdict in of(run("wrong", processes), name):
        if case.unchecked is not None:
            assert verdict.kind == "passed", f"it is checked now: {verdict.text}"
            assert case.unchecked in " ".join(DOCUMENTATION.read_text().split())
        elif not is_skipped_as_it_may(case, verdict):
            assert verdict.kind in ("failure", "error"), f"{verdict.kind}: {verdict.text}"
            assert case.says is not None, "says nothing"
            assert re.match(case.says, verdict.text), verdict.text


@runs(HEALTHY)
def test_a_healthy_test_passes_after_wrong_ones(run: Callable[[str, int], Run], name: str, processes: int) -> None:
    assert [verdict for verdict in of(run("wrong", processes), name) if verdict.kind != "passed"] == []


@runs(RIGHT)
def test_a_right_test_is_not_a_failure(run: Callable[[str, int], Run], name: str, processes: int) -> None:
    case = RIGHT[name]
    for verdict in of(run("right", processes), name):
        if not is_skipped_as_it_may(case, verdict):
            assert verdict.kind == ("passed" if case.says is None else "skipped"), verdict.text
            assert re.match(case.says or "", verdict.text), verdict.text


@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize(("half", "status"), [("wrong", 1), ("right", 0)])
def test_the_whole_run_ends_as_its_tests_do(
    run: Callable[[str, int], Run], half: str, status: int, processes: int
) -> None:
    done = run(half, processes)
    assert done.status == status, done.output
    assert "INTERNALERROR" not in done.output
    everything = ALL_WRONG if half == "wrong" else RIGHT
    assert done.verdicts.keys() >= {name for name, case in everything.items() if processes or not case.is_exhaustive}


def test_the_corpus_is_as_large_as_it_claims() -> None:
    assert len(WRONG) >= 120
    assert len(RIGHT) >= 120
    assert len({case.kind for case in WRONG.values()}) >= 12


def test_a_deadlock_is_told_with_every_stack_and_the_last_collective(run: Callable[[str, int], Run]) -> None:
    [verdict] = of(run("wrong", 0), "wrong_mismatched.test_all_reduce_and_broadcast")
    assert "Last collective: all_reduce (collective #2 of the default group, float32[4]), unfinished" in verdict.text
    assert "Last collective: broadcast (collective #2 of the default group, float32[4]), unfinished" in verdict.text
    assert verdict.text.count("dist.barrier()") == 0
    assert "dist.all_reduce(ones(4))" in verdict.text
    assert "dist.broadcast(ones(4), 0)" in verdict.text


def test_a_rank_that_holds_pythons_lock_still_shows_where_it_stands(run: Callable[[str, int], Run]) -> None:
    [verdict] = of(run("wrong", 0), "wrong_hanging.test_hung_with_pythons_lock_held")
    assert "in test_hung_with_pythons_lock_held" in verdict.text


def test_a_property_that_fails_is_told_with_its_example(run: Callable[[str, int], Run]) -> None:
    [verdict] = of(run("wrong", 0), "wrong_properties.test_fails_on_one_rank_after_a_collective")
    assert re.search(r"rank = 1, size = \d{2,}\n", verdict.text)


def test_each_failure_leaves_a_log_file_for_each_rank(run: Callable[[str, int], Run]) -> None:
    [verdict] = of(run("wrong", 0), "wrong_raising.test_raised_on_one")
    assert "A log file for each rank:" in verdict.text


@pytest.mark.parametrize("processes", PROCESSES)
def test_a_worker_that_dies_after_the_last_test_fails_the_run(tmp_path: Path, processes: int) -> None:
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_last.py").write_text(LATE)
    options = ["-p", "no:cacheprovider", "-p", "no:randomly", *(["-n", "2", "--dist=loadfile"] if processes else [])]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=tmp_path, text=True, timeout=100, stdout=subprocess.PIPE
    )
    assert done.returncode == 1, done.stdout
    assert re.search(r"rank [01].* exited with status 3", done.stdout), done.stdout


LATE = """
import os, threading, time
import pytest

@pytest.mark.ranks(2)
def test_on_ranks(rank):
    if rank:
        timer = threading.Timer(0.2, os._exit, [3])
        timer.daemon = True
        timer.start()

def test_in_this_process():
    time.sleep(0.6)
"""
