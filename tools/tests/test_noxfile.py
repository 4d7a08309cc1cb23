"""The sessions: where they run by themselves, what README and build script call, and what they check of their own."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IN_A_VENV = (
    "python3 -m venv --without-pip .venv && python3 -m pip --python .venv/bin/python install -q nox"
    " && .venv/bin/nox -s "
)


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(("workflow", "tags"), [("ci", ["ci"]), ("nightly", ["nightly", "gpu"])])
def test_a_workflow_has_the_sessions_with_its_tags(workflow, tags):
    # Given the sessions as nox lists them, and the rows of a workflow's matrices,
    command = [sys.executable, "-m", "nox", "-l", "--json", "-t", *tags]
    listed = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    rows = re.findall(r"^ {10}- (\D.*)$", text_of(f".github/workflows/{workflow}.yml"), re.MULTILINE)
    # when they are compared,
    named = [session for row in rows for session in row.partition(" -- ")[0].split()]
    # then the workflow has each session with one of its tags once, and no other.
    assert sorted(named) == sorted(each["session"] for each in listed)


def test_every_python_and_the_oldest_torch_that_packages_allow_are_tested():
    for package in ROOT.glob("packages/*/pyproject.toml"):
        text = package.read_text(encoding="utf-8")
        pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
        assert f"python: {json.dumps(pythons)}\n        sessions: [unit]" in text_of(".github/workflows/ci.yml")
        assert re.findall(r'requires-python = ">=(.*)"', text) == pythons[:1]
        [floor] = re.findall(r'"torch>=([\d.]+)"', text)
        assert f'OLDEST = "{floor}.0"' in text_of("noxfile.py")


@pytest.mark.parametrize(
    ("file", "session"), [("README.md", "quickstart"), ("README.md", "tests"), (".ci/run", "tests")]
)
def test_readme_and_build_script_have_the_same_command(file, session):
    assert f"{IN_A_VENV}{session}\n" in text_of(file)


def test_the_build_script_fails_when_the_tests_do(tmp_path):
    # Given a repository of the build script alone, where the first session fails,
    script, nox = tmp_path / ".ci" / "run", tmp_path / ".venv" / "bin" / "nox"
    for path, text in ((script, text_of(".ci/run")), (nox, "#!/bin/sh\necho $2; exit 1\n")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "python3").symlink_to("/bin/true")
    # when it runs,
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["/bin/bash", script], env=environment, capture_output=True, text=True, check=False)
    # then it fails too, and does not go on.
    assert (done.returncode, done.stdout) == (1, "tests\n")


@pytest.fixture(scope="module")
def noxfile():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        return importlib.import_module("noxfile")


class Session:
    """What the checks use of a nox session; ``report`` is what pytest would write, None with ``--install-only``."""

    def __init__(self, folder, report=None):
        self.folder, self.report, self.logged = folder, report, []

    def create_tmp(self):
        return str(self.folder)

    def run(self, *_, **__):
        if self.report is not None:
            (self.folder / "report.xml").write_text(self.report)
        return None if self.report is None else True

    def log(self, text):
        self.logged.append(text)

    def error(self, text):
        raise RuntimeError(text)


def suite(tests, skipped):
    return f'<testsuites><testsuite tests="{tests}" skipped="{skipped}"/></testsuites>'


def test_tests_that_were_executed_are_counted_unless_nox_only_installs(noxfile, tmp_path):
    only_installs, tests = Session(tmp_path), Session(tmp_path, suite(5, 2))
    noxfile._pytest(only_installs, "tests")
    noxfile._pytest(tests, "tests")
    assert (only_installs.logged, tests.logged) == ([], ["3 tests executed, 2 skipped"])


@pytest.mark.parametrize(
    ("tests", "skipped", "may_skip", "error"),
    [
        (5, 2, False, "2 tests were skipped, and --require allows none"),
        (0, 0, True, "no test was executed; 0 were skipped"),
        (2, 2, True, "no test was executed; 2 were skipped"),
    ],
)
def test_a_session_fails_if_no_test_is_executed_or_one_is_skipped_that_must_not(
    noxfile, tmp_path, tests, skipped, may_skip, error
):
    with pytest.raises(RuntimeError, match=error):
        noxfile._pytest(Session(tmp_path, suite(tests, skipped)), "tests", may_skip=may_skip)


@pytest.mark.parametrize("content", [None, b"another license", (ROOT / "LICENSE").read_bytes()])
def test_a_wheel_needs_this_license(noxfile, tmp_path, content):
    info = f"zeroshard_core-{noxfile._version('zeroshard-core')}"
    with zipfile.ZipFile(tmp_path / f"{info}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}.dist-info/METADATA", "")
        if content is not None:
            wheel.writestr(f"{info}.dist-info/licenses/LICENSE", content)
    is_right = content == (ROOT / "LICENSE").read_bytes()
    with nullcontext() if is_right else pytest.raises(RuntimeError, match="lacks the license"):
        noxfile._check_license(Session(tmp_path), "zeroshard-core", tmp_path)
