"""The corpus of programs for the emulated accelerator: every seeded error is found, and nothing in what is right.

``emulated/wrong_*.py`` and ``emulated/right_*.py`` are run by a pytest of their own, once for a file. A wrong program
fails with the error of its kind, and its report names each line that is marked in it. A right one passes, and fails if
any one of its edges, which are marked too, is left out. Half of the corpus was written by someone who had read the page
alone. ``tools/emulated_corpus.py`` runs all of it many times, with delays.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from emulated_corpus import Verdict, programs, run_programs

pytestmark = pytest.mark.exhaustive

ERRORS = {
    "race": "RaceError: ",
    "freed in use": "RaceError: ",
    "different collectives": "DifferentCollectivesError: ",
    "host wait": "RuntimeError: the host waits for the device here, inside host_never_waits(): ",
}
_MARK = re.compile(r"# (access|call|wait|edge)$")
_SECTION = re.compile(r"# -{70} (\d)\. ")


@dataclass(frozen=True)
class Program:
    """A test function of the corpus.

    Attributes:
        kind: of its report, empty if there must be none.
        number: which of the nine kinds of errors it has, as its section says.
        lines: that are marked in it, and in what it uses of its file.
    """

    file: Path
    name: str
    kind: str
    number: int
    lines: tuple[int, ...]

    @property
    def full_name(self) -> str:
        return f"{self.file.stem}.{self.name}"


def functions(file: Path) -> list[Program]:
    """Return the test functions of a file."""
    lines = file.read_text(encoding="utf-8").splitlines()
    marked = [number for number, line in enumerate(lines, 1) if _MARK.search(line)]
    sections = {number: int(found[1]) for number, line in enumerate(lines, 1) if (found := _SECTION.match(line))}
    parts = [node for node in ast.parse("\n".join(lines)).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    lines_of = {part.name: [line for line in marked if part.lineno <= line <= part.end_lineno] for part in parts}
    found = []
    for part in parts:
        if part.name.startswith("test_"):
            used = {node.id for node in ast.walk(part) if isinstance(node, ast.Name)}
            own = [line for name, of in lines_of.items() if name == part.name or name in used for line in of]
            section = max((line for line in sections if line < part.lineno), default=0)
            found.append(Program(file, part.name, _kind(part), sections.get(section, 0), tuple(own)))
    return found


def _kind(function: ast.FunctionDef) -> str:
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "seeded":
            return ast.literal_eval(decorator.args[0])
    return ""


PROGRAMS = {program.full_name: program for file in programs() for program in functions(file)}
WRONG = {name: program for name, program in PROGRAMS.items() if program.kind}
RIGHT = {name: program for name, program in PROGRAMS.items() if not program.kind}
EDGES = {
    f"{program.file.name}:{line}": [one for one in RIGHT.values() if one.file == program.file and line in one.lines]
    for program in RIGHT.values()
    for line in program.lines
}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Program], dict[str, Verdict]]:
    """Return what became of a program, by world size and parameters; each file runs once for all tests here."""
    found: dict[Path, dict[str, Verdict]] = {}

    def of(program: Program) -> dict[str, Verdict]:
        if program.file not in found:
            found[program.file] = run_programs([program.file], tmp_path_factory.mktemp(program.file.stem))
        of_program = {
            name: verdict
            for name, verdict in found[program.file].items()
            if name.partition("[")[0] == program.full_name
        }
        assert of_program, f"{program.full_name} has not run"
        return of_program

    return of


@pytest.mark.parametrize("name", WRONG)
def test_a_seeded_error_is_reported_as_what_it_is(verdicts: Callable[[Program], dict[str, Verdict]], name: str) -> None:
    program = WRONG[name]
    for case, verdict in verdicts(program).items():
        assert verdict.outcome == "failure", f"{case} {verdict.outcome}"
        assert all(error.startswith(ERRORS[program.kind]) for error in verdict.errors), verdict.text
        assert any(all(named(part, program) for named in CHECKS) for part in parts(verdict, program)), verdict.text


def parts(verdict: Verdict, program: Program) -> list[str]:
    """Return what a report consists of: pairs of accesses, or what ranks issue, or where the host waits."""
    if program.kind == "host wait":
        return [verdict.text]
    if program.kind == "different collectives":
        return sorted(verdict.errors)
    return [part for part in verdict.text.split("\n\n") if part.startswith(f"{program.kind}: ")]


def names_every_line(part: str, program: Program) -> bool:
    return all(re.search(rf"\b{program.file.name}:{line}\b", part) for line in program.lines)


def shows_both_stacks(part: str, program: Program) -> bool:
    """Whether both accesses have a stack; what frees memory may be C++ code, in a thread without Python."""
    if program.kind not in ("race", "freed in use"):
        return "no Python frame" not in part
    headings = ("then: ", "first:") if program.kind == "race" else ("used: ", "memory:")
    return all(re.search(rf"^    {heading} .*\n(      while .*\n)?      /", part, re.MULTILINE) for heading in headings)


CHECKS = (names_every_line, shows_both_stacks)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_passes(verdicts: Callable[[Program], dict[str, Verdict]], name: str) -> None:
    for case, verdict in verdicts(RIGHT[name]).items():
        assert verdict.outcome == "passed", f"{case}: {verdict.text}"
        assert verdict.findings == frozenset()


@pytest.fixture(scope="module")
def without_edges(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    """Return what became of right programs that were run once for each of their edges, without it."""
    edges = {
        program.name: [edge for edge, users in EDGES.items() if program in users]
        for program in RIGHT.values()
        if program.lines
    }
    nodes = [f"{program.file}::{program.name}" for program in RIGHT.values() if program.lines]
    environment = {"EMULATED_CORPUS_WITHOUT_EDGES": json.dumps(edges)}
    return run_programs(nodes, tmp_path_factory.mktemp("edges"), environment=environment)


@pytest.mark.parametrize("edge", EDGES)
def test_a_right_program_fails_without_one_of_its_edges(without_edges: dict[str, Verdict], edge: str) -> None:
    found = {case: verdict for case, verdict in without_edges.items() if re.search(rf"{edge}\b", case)}
    assert {case.partition("[")[0] for case in found} == {program.full_name for program in EDGES[edge]}
    assert {case: verdict.outcome for case, verdict in found.items()} == dict.fromkeys(found, "failure")
    assert all(error.startswith("RaceError: ") for verdict in found.values() for error in verdict.errors)


def test_an_edge_is_left_out_for_a_whole_run_by_a_variable(tmp_path: Path) -> None:
    edge, (program, *_) = next(iter(EDGES.items()))
    found = run_programs([f"{program.file}::{program.name}"], tmp_path, environment={"ZEROSHARD_DROP_EDGE": edge})
    assert {verdict.outcome for verdict in found.values()} == {"failure"}


def test_the_corpus_has_every_kind_of_error() -> None:
    counts = Counter(program.number for program in WRONG.values())
    assert sorted(counts) == list(range(1, 10))
    assert min(counts.values()) >= 2
    by_page = [name for name in WRONG if "_by_page" in name]
    assert len(by_page) >= len(WRONG) / 2
    assert len(RIGHT) >= len(WRONG) / 2
