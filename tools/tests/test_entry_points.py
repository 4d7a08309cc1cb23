"""The ways into the repository say the same: the README, the build script, the workflows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IN_A_VENV = (
    "python3 -m venv --without-pip .venv && python3 -m pip --python .venv/bin/python install -q nox"
    " && .venv/bin/nox -s "
)


def lines(name):
    return [line.strip() for line in (ROOT / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("session", ["quickstart", "tests"])
def test_the_readme_has_the_command(session):
    assert IN_A_VENV + session in lines("README.md")


def test_the_build_script_calls_the_readmes_test_command():
    assert IN_A_VENV + "tests" in lines(".ci/run")


@pytest.mark.parametrize("broken", ["venv", "pip", "nox"])
def test_the_build_script_fails_when_a_part_of_the_command_does(tmp_path, broken):
    # Given a repository of the build script alone, on a machine where one part of the command fails,
    script = tmp_path / ".ci" / "run"
    script.parent.mkdir()
    script.write_text((ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    environment = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "BROKEN": broken}
    stub = '#!/bin/sh\ncase "$*" in *"$BROKEN"*) exit 1;; esac\ncase "$*" in *lint*) touch linted;; esac\n'
    for name in ("bin/python3", ".venv/bin/nox"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(stub)
        path.chmod(0o755)
    if broken == "nox":
        (tmp_path / ".venv" / "bin" / "nox").write_text("#!/bin/sh\nexit 1\n")
        environment["BROKEN"] = "no such part"
    # when it runs,
    done = subprocess.run(["/bin/bash", str(script)], env=environment, cwd=tmp_path, check=False)
    # then it fails, and does not go on.
    assert done.returncode != 0
    assert not (tmp_path / "linted").exists()


@pytest.mark.parametrize("workflow", ["ci", "nightly"])
def test_the_workflows_take_their_sessions_from_nox_and_pin_actions_by_major_version(workflow):
    text = lines(f".github/workflows/{workflow}.yml")
    assert any("nox -l --json -t" in line and "tools/ci_matrix.py" in line for line in text)
    assert "concurrency:" in text
    assert "cache: pip" in text
    for line in text:
        if "uses:" in line:
            assert line.rpartition("@")[2].removeprefix("v").isdigit(), line


def test_every_python_and_the_oldest_torch_that_packages_allow_are_tested():
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    sessions = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    for package in ROOT.glob("packages/*/pyproject.toml"):
        text = package.read_text(encoding="utf-8")
        pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
        assert f"--python {' '.join(pythons)})" in workflow
        assert re.findall(r'requires-python = ">=(.*)"', text) == pythons[:1]
        [floor] = re.findall(r'"torch>=([\d.]+)"', text)
        assert f'OLDEST = "{floor}.0"' in sessions


def sessions_of(tag):
    listed = subprocess.run(
        [sys.executable, "-m", "nox", "-l", "--json", "-t", tag], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {entry["session"] for entry in json.loads(listed.stdout)}


def test_each_backend_that_needs_no_gpu_has_a_job_on_every_change():
    assert {
        "ranks(backend='gloo-cpu')",
        "ranks(backend='fake')",
        "emulated(torch='2.13')",
        "tests-newest",
    } <= sessions_of("ci")


def test_the_oldest_torch_has_its_jobs_in_the_night_alone():
    oldest = {"tests-oldest", "emulated(torch='2.11')"}
    assert oldest <= sessions_of("nightly")
    assert not oldest & sessions_of("ci")
