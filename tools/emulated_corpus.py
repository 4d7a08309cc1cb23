"""Runs the programs of ``tests/emulated/corpus`` several times, and checks that all runs report the same.

Run as ``python tools/emulated_corpus.py`` where the packages are installed: 20 runs, or the number in the argument,
with random delays of up to 50 ms in the threads that move the data of collectives, and two busy loops beside them. The
exit status is 1 if a program of a file ``right_*`` fails, one of ``wrong_*`` passes, or the reports of any program
differ between runs.

Of a race or of memory freed in use, the kind and both call sites are compared, of all ranks together. Of other errors
the text is compared, without gloo's own words and without what ranks report about the end of another rank.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORPUS = ROOT / "tests" / "emulated" / "corpus"
_HEADING = re.compile(r"^=* ?ranks? [\d, -]+ failed: (.*?) ?=*$", re.MULTILINE)
_LIMIT = 1200.0
# Characters of an error's first line.
_COMPARED = 300
# Loaded once: a rank that has failed gets a fresh worker, which would need a second or more to load these.
_LOADED = ("torch._dynamo.compiled_autograd", "torch.distributed.fsdp", "zeroshard_integrations.ddp")


@dataclass(frozen=True)
class Verdict:
    """The result of one program at one world size, with one choice of its parameters.

    Attributes:
        outcome: ``"passed"``, ``"failure"``, ``"error"`` or ``"skipped"``.
        text: what pytest prints about a failure.
        errors: the class and first line of each error, each once, without the ranks that had it.
        findings: what the checker has found on all ranks, as `zeroshard_testing.emulated.report.Finding.key`.
    """

    outcome: str
    text: str
    errors: frozenset[str]
    findings: frozenset[tuple[str, ...]]

    @property
    def reports(self) -> frozenset[str]:
        """The part of the result that must be equal in all runs, because it does not depend on timing."""
        # Gloo's own words, and which ranks had stopped when another one looked, depend on timing, and so does the
        # place where a heading is cut off, after the names of the ranks.
        causes = (
            error.partition("gloo: ")[0][:_COMPARED] for error in self.errors if not error.endswith("(a consequence)")
        )
        errors = (error for error in causes if "RaceError" not in error)
        return frozenset([*errors, *(" | ".join(finding) for finding in self.findings)])


def main(runs: int = 20) -> int:
    """Run the corpus several times, compare what is reported, and return the exit status."""
    found: dict[str, list[Verdict]] = {}
    with tempfile.TemporaryDirectory() as folder, busy_loops(2):
        for run in range(1, runs + 1):
            environment = {"ZEROSHARD_EMULATED_DELAYS": f"0.05:{run}"}
            verdicts = run_programs(programs(), Path(folder) / str(run), environment=environment)
            for name, verdict in verdicts.items():
                found.setdefault(name, []).append(verdict)
            print(f"run {run} of {runs}: {len(verdicts)} programs", file=sys.stderr, flush=True)
    wrong = {name: text for name, verdicts in found.items() if (text := problem(name, verdicts, runs))}
    for name, text in wrong.items():
        print(f"{name}: {text}")
    print(f"{len(found) - len(wrong)} of {len(found)} programs are reported as expected, and equally in {runs} runs")
    return int(bool(wrong) or not found)


def problem(name: str, verdicts: Sequence[Verdict], runs: int) -> str:
    """Return what is wrong with a program's verdicts; empty if nothing is."""
    due, outcomes = "passed" if name.startswith("right") else "failure", {verdict.outcome for verdict in verdicts}
    if outcomes != {due} or len(verdicts) < runs:
        return f"{', '.join(sorted(outcomes))} in {len(verdicts)} of {runs} runs, expected {due}"
    reports = [verdict.reports for verdict in verdicts]
    differing = sorted(frozenset().union(*reports) - reports[0].intersection(*reports))
    return "\n  ".join(["only some runs report:", *differing]) if differing else ""


def programs() -> list[Path]:
    """Return the files of the corpus."""
    return [*sorted(CORPUS.glob("wrong_*.py")), *sorted(CORPUS.glob("right_*.py"))]


def run_programs(
    files: Sequence[Path | str], folder: Path, *, environment: Mapping[str, str] | None = None
) -> dict[str, Verdict]:
    """Run files of the corpus, or nodes in them, in a separate pytest, which writes to a folder.

    Returns:
        The verdicts by file, function and parameters, such as ``"right_by_page.test_ddp[2-emulated]"``.

    Raises:
        RuntimeError: Pytest ended early; the message has its output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "report.xml"
    loaded = [argument for module in _LOADED for argument in ("-p", module)]
    options = [*loaded, "-p", "no:cacheprovider", "--tb=short", "-m", "exhaustive or not exhaustive"]
    options += ["--ranks-require=emulated", f"--junitxml={report}", f"--basetemp={folder / 'tmp'}"]
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
    if done.returncode not in (0, 1) or not report.exists():
        raise RuntimeError(f"pytest has ended with status {done.returncode}:\n{done.stdout}")
    # pytest has just written it.
    return dict(map(_verdict, ElementTree.parse(report).iter("testcase")))  # noqa: S314


def _verdict(element: ElementTree.Element) -> tuple[str, Verdict]:
    found = next((part for part in element if part.tag in ("failure", "error", "skipped")), None)
    text = "" if found is None else f"{found.get('message', '')}\n{found.text or ''}"
    findings = (
        tuple(json.loads(one.get("value", ""))) for one in element.iter("property") if one.get("name") == "finding"
    )
    # Which rank found it depends on timing.
    errors = (re.sub(r"^(?:\w+\.)*(\w+: )(?:rank \d+: )?", r"\1", error) for error in _HEADING.findall(text))
    name = f"{element.get('classname', '').rpartition('.')[2]}.{element.get('name')}"
    return name, Verdict("passed" if found is None else found.tag, text, frozenset(errors), frozenset(findings))


@contextmanager
def busy_loops(number: int) -> Iterator[None]:
    """Keep this number of processors busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


if __name__ == "__main__":
    raise SystemExit(main(*map(int, sys.argv[1:])))
