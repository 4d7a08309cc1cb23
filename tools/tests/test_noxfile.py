"""What the sessions check beside what they run: that tests were executed, and that a wheel has the licence."""

from __future__ import annotations

import importlib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def noxfile() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        return importlib.import_module("noxfile")


class Session:
    """What the checks use of a nox session; ``report`` is what pytest would write, None with ``--install-only``."""

    def __init__(self, folder: Path, report: str | None = None) -> None:
        self.folder, self.report, self.logged = folder, report, []

    def create_tmp(self) -> str:
        return str(self.folder)

    def run(self, *_: str, **__: object) -> bool | None:
        if self.report is None:
            return None
        (self.folder / "report.xml").write_text(self.report)
        return True

    def log(self, text: str) -> None:
        self.logged.append(text)

    def error(self, text: str) -> None:
        raise RuntimeError(text)


def suite(tests: int, skipped: int) -> str:
    return f'<testsuites><testsuite tests="{tests}" skipped="{skipped}"/></testsuites>'


def test_a_session_that_only_installs_reads_no_report(noxfile: Any, tmp_path: Path) -> None:
    session = Session(tmp_path)
    noxfile._pytest(session, "tests")
    assert session.logged == []


def test_tests_that_were_executed_are_counted(noxfile: Any, tmp_path: Path) -> None:
    session = Session(tmp_path, suite(5, 2))
    noxfile._pytest(session, "tests")
    assert session.logged == ["3 tests executed, 2 skipped"]


def test_a_session_that_requires_all_fails_where_a_test_is_skipped(noxfile: Any, tmp_path: Path) -> None:
    noxfile._pytest(Session(tmp_path, suite(5, 0)), "tests", may_skip=False)
    with pytest.raises(RuntimeError, match="2 tests were skipped, and --require allows none"):
        noxfile._pytest(Session(tmp_path, suite(5, 2)), "tests", may_skip=False)


@pytest.mark.parametrize("tests", [0, 2])
def test_a_session_that_executes_no_test_fails(noxfile: Any, tmp_path: Path, tests: int) -> None:
    with pytest.raises(RuntimeError, match=f"no test was executed; {tests} were skipped"):
        noxfile._pytest(Session(tmp_path, suite(tests, tests)), "tests")


@pytest.mark.parametrize("content", [None, b"another licence", "own"])
def test_a_wheel_without_this_licence_fails(noxfile: Any, tmp_path: Path, content: bytes | str | None) -> None:
    info = f"zeroshard_core-{noxfile._version('zeroshard-core')}"
    with zipfile.ZipFile(tmp_path / f"{info}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}.dist-info/METADATA", "")
        if content is not None:
            licence = (ROOT / "LICENSE").read_bytes() if content == "own" else content
            wheel.writestr(f"{info}.dist-info/licenses/LICENSE", licence)
    if content == "own":
        noxfile._check_licence(Session(tmp_path), "zeroshard-core", tmp_path)
        return
    with pytest.raises(RuntimeError, match="lacks the licence"):
        noxfile._check_licence(Session(tmp_path), "zeroshard-core", tmp_path)
