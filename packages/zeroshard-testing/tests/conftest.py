"""Runs suites of rank tests in a pytest of their own, and holds what became of each test."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

# Its files are run by the tests of the corpus, in runs of their own.
collect_ignore = ["corpus"]


@dataclass(frozen=True)
class Case:
    """One test of an inner suite."""

    kind: str
    text: str
    output: str


@dataclass(frozen=True)
class Suite:
    """What came of an inner suite."""

    status: int
    text: str
    cases: dict[str, Case]


def _run_suite(folder: Path, *options: str, **files: str) -> Suite:
    """Write files (``a__b`` stands for ``a/b.py``) into a folder and run pytest on them in a new process."""
    for name, text in files.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    (folder / "pytest.ini").touch()
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "junit_logging=all"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COLUMNS"))}
    done = subprocess.run(
        [*command, f"--junitxml={report}", *options],
        cwd=folder,
        env=environment,
        text=True,
        timeout=110,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    cases = {}
    if report.exists():
        for element in ElementTree.parse(report).iter("testcase"):
            cases[element.get("name", "")] = _case(element)
    return Suite(done.returncode, done.stdout, cases)


def _case(element: ElementTree.Element) -> Case:
    output = "".join(element.findtext(stream) or "" for stream in ("system-out", "system-err"))
    for kind in ("failure", "error", "skipped"):
        found = element.find(kind)
        if found is not None:
            return Case(kind, f"{found.get('message')}\n{found.text}", output)
    return Case("passed", "", output)


@pytest.fixture(scope="session")
def run_suite() -> Callable[..., Suite]:
    """Run an inner suite in a given folder."""
    return _run_suite


@pytest.fixture
def suite(tmp_path: Path) -> Callable[..., Suite]:
    """Run an inner suite for one test."""
    return partial(_run_suite, tmp_path)
