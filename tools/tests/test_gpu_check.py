"""The check of a machine with one GPU, without one: its steps end, go on after failures, and say what they ran on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from gpu_check import cli, machine, measure, running, sharing
from gpu_check.report import report_of
from gpu_check.running import Budget, Ended, Outcome, Run, body_of, find_tests, judge, run_process
from gpu_check.sharing import is_alive
from gpu_check.steps import FULL, NO_GPU, ROOT, VERSIONS, Step, Substitute, pythonpath, select, table

SCRIPT = ROOT / "tools" / "gpu_check" / "gpu_check.sh"
ON_GPU = {"GPU": "NVIDIA H100 PCIe", "torch": "2.11.0", "CUDA": "13.0", "NCCL": "2.28.9"}


def python(code):
    return (sys.executable, "-c", code)


def step(name, code="pass", **changes):
    fields = {"title": f"shows {name}", "limit": 30, "command": python(code), "without_gpu": None}
    return Step(name, **(fields | changes))


def run_of(steps, *, found=None, share=dict):
    run = Run(Budget(60.0), lambda *_: None, machine={"GPU": NO_GPU} if found is None else found)
    run.run(steps, share)
    return run


def verdicts(run):
    return {outcome.name: f"{outcome.verdict}: {outcome.detail}".rstrip(": ") for outcome in run.outcomes}


def program(monkeypatch, folder, name, code):
    """Write a program that is found before all others."""
    (folder / name).write_text(f"#!/bin/sh\n{code}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def wait_until_gone(pid):
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(pid)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize(("leader", "limit", "status"), [("time.sleep(60)", 3, None), ("pass", 30, 0)])
def test_the_process_group_of_a_step_ends_with_it(monkeypatch, leader, limit, status):
    # Given a step that ignores interrupts, and another process that it has started,
    monkeypatch.setattr(running, "_GRACE", 0.1)
    started = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid"
    ignores = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    code = f"import signal, subprocess, sys, time; {ignores}; print({started}, flush=True); {leader}"
    # when it ends, or is ended,
    ended = run_process(python(code), limit, {})
    # then both are gone, and what was printed is there.
    assert ended.status == status
    wait_until_gone(int(ended.output))


@pytest.mark.parametrize(
    ("code", "verdict", "found"),
    [
        ('print(\'{"GPU": "none"}\\nWARNING: a leak\')', "passed", {"GPU": NO_GPU}),
        ("print('{hello')", "failed: no JSON", {}),
        ("raise SystemExit('no torch')", "failed: exit status 1: no torch", {}),
    ],
)
def test_the_machine_is_the_last_line_of_json_and_without_one_no_step_runs(monkeypatch, code, verdict, found):
    monkeypatch.setattr(running, "VERSIONS", replace(VERSIONS, command=python(code)))
    run = Run(Budget(FULL), lambda *_: None)
    run.find_machine()
    run.run([step("2")], dict)
    assert (run.machine, verdicts(run)) == (found, {"1": verdict, "2": "passed" if found else "skipped: step 1 failed"})


def test_a_gpu_that_torch_cannot_use_is_an_error_unless_it_is_hidden(tmp_path, monkeypatch):
    def init():
        raise RuntimeError("the driver is too old")

    program(monkeypatch, tmp_path, "nvidia-smi", "echo 'GPU 0: NVIDIA H100 PCIe (UUID: GPU-0)'")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine.torch.cuda, "init", init)
    reason = "nvidia-smi lists NVIDIA H100 PCIe, but torch cannot use it: the driver is too old"
    assert machine.why_unusable() == reason
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.why_unusable() == ""


def test_the_run_goes_on_after_steps_that_fail_and_hang():
    steps = [
        step("1a", "raise SystemExit(3)"),
        step("1b", "import time; time.sleep(60)", limit=0.5),
        step("1c", "import os; os.kill(os.getpid(), 9)"),
        step("1d", command=("no-such-program",)),
        step("1e"),
    ]
    assert verdicts(run_of(steps)) == {
        "1a": "failed: exit status 3",
        "1b": "timed out: after 0 s",
        "1c": "failed: killed by SIGKILL",
        "1d": "skipped: no-such-program is not installed",
        "1e": "passed",
    }


def test_no_step_begins_once_the_budget_is_spent():
    run = Run(Budget(9.0), lambda *_: None)
    run.find_machine()
    run.run([step("2"), step("3")], dict)
    assert verdicts(run) == dict.fromkeys("123", "skipped: the budget of 9 s is spent")


def test_limits_shrink_with_the_budget_and_grow_with_the_factor():
    budgets = (Budget(FULL), Budget(FULL / 2), Budget(FULL / 8), Budget(FULL, slow=4))
    assert [budget.limit_of(step("2")) for budget in budgets] == [30, 15, 10, 120]


@pytest.mark.parametrize("budget", [FULL, 360.0])
def test_slow_tests_leave_time_for_all_steps_up_to_captures(budget):
    # Given that two steps take all of their time, and are ended late, and the others half of theirs,
    told, spent = Budget(budget), 0.0
    for each in [VERSIONS, *table(2)]:
        if each.name == "7c":
            break
        limit = told.limit_of(each)
        assert limit >= 10
        spent += limit + 5 if each.name in ("2b", "3c") else limit / 2
    # then there is time for the last of them.
    assert spent <= budget - 15


def test_without_a_gpu_a_substitute_runs_under_its_own_name_or_the_reason_is_given():
    substitute = Substitute("substitute: gloo, CPU", python("pass"))
    run = run_of([step("2", "1 / 0", without_gpu=substitute), step("3", "1 / 0", without_gpu="no GPU")])
    assert run.outcomes[0].title == "shows 2 (substitute: gloo, CPU)"
    assert verdicts(run) == {"2": "passed", "3": "skipped: no GPU"}
    for each in table(2):
        name = each.without_gpu.name if isinstance(each.without_gpu, Substitute) else each.without_gpu
        assert name.startswith(("substitute: ", "no GPU"))


def test_on_a_gpu_the_steps_themselves_run_and_those_of_two_nccl_ranks_share():
    prints = "import os; print('|', os.environ.get('MPS'), os.environ.get('NCCL_MULTI_RANK_GPU_ENABLE'), '|')"
    steps = [step("2", prints, without_gpu="no GPU"), step("3", prints, environment=sharing.ENVIRONMENT)]
    run = run_of(steps, found=ON_GPU, share=lambda: {"MPS": "on"})
    assert [outcome.body for outcome in run.outcomes] == ["| None None |", "| on 1 |"]


@pytest.mark.parametrize(
    ("first", "limit", "second"),
    [
        ("pass", 30, "passed"),
        ("while True: ...", 0.1, "skipped: step 3b timed out"),
        ("print('| whole | ok |'); 1 / 0", 30, "passed"),
        ("print('| whole | `no` |'); 1 / 0", 30, "skipped: step 3b failed"),
        ("print('| whole | ok |\\nDuplicate GPU detected'); 1 / 0", 30, "skipped: step 3b failed"),
    ],
)
def test_a_step_is_skipped_if_one_that_it_needs_hangs_or_does_not_work_at_all(first, limit, second):
    run = run_of([step("3b", first, limit=limit), step("7b", after=("3b", "3c"))], found=ON_GPU)
    assert verdicts(run)["7b"] == second


VERBOSE = """\
tests/test_a.py::test_one[2-gloo-clipped by the norm] PASSED             [ 33%]
tests/test_a.py::test_two SKIPPED (no CUDA device)                       [ 66%]
tests/test_a.py::test_three FAILED                                       [100%]
FAILED tests/test_a.py::test_three - RuntimeError: no
"""
WITH_XDIST = """\
scheduling tests via LoadScheduling
tests/test_a.py::test_one[2-gloo-clipped by the norm]
[gw0] [ 33%] PASSED tests/test_a.py::test_one[2-gloo-clipped by the norm]
[gw1] [ 66%] SKIPPED tests/test_a.py::test_two
[gw0] [100%] FAILED tests/test_a.py::test_three
"""


@pytest.mark.parametrize("output", [VERBOSE, WITH_XDIST], ids=["verbose", "xdist"])
def test_tests_are_counted_by_the_lines_of_pytest_and_those_that_were_running_are_named(output):
    found = {name.rpartition("::")[2]: outcome for outcome, name in find_tests(output)}
    assert found == {"test_one[2-gloo-clipped by the norm]": "PASSED", "test_two": "SKIPPED", "test_three": "FAILED"}
    counts = "1 passed, 1 skipped, 1 failed"
    assert judge(Ended(1, output, 1.0), 9, counts_tests=True) == ("failed", f"exit status 1: {counts}")
    assert judge(Ended(None, output, 9.0), 9, counts_tests=True) == ("timed out", f"after 9 s: {counts}")
    body = body_of(f"{output}tests/test_a.py::test_four[a b] \n!!!!! KeyboardInterrupt !!!!!", is_well=False)
    assert "FAILED tests/test_a.py::test_three" in body
    assert [line for line in body.splitlines() if "running" in line] == ["running: tests/test_a.py::test_four[a b]"]


@pytest.mark.parametrize("output", ["", "tests/test_a.py::test_two SKIPPED (no CUDA device) [100%]"])
def test_a_step_in_which_no_test_ran_has_failed(output):
    verdict, detail = judge(Ended(0, output, 1.0), 9, counts_tests=True)
    assert (verdict, detail.partition(":")[0]) == ("failed", "no test ran")


def test_the_report_has_the_device_first_then_a_row_for_each_step_then_their_tables():
    rows = "| trainer | verdict |\n| --- | --- |\n| DDP | ok |"
    body = body_of(f"{rows}\nhost:1 NCCL WARN Duplicate GPU detected\ntrace", is_well=False)
    outcomes = [
        Outcome("1", "versions", "passed", "", 2.0),
        Outcome("4", "host waits", "failed", "exit status 1", 7.6, body),
        Outcome("8b", "compute-sanitizer", "skipped", "compute-sanitizer is not installed"),
    ]
    report = report_of(ON_GPU, "0123abc", ["MPS serves the steps on two NCCL ranks."], outcomes)
    assert report.startswith("# gpu-check: NVIDIA H100 PCIe\n\n3 steps: 1 passed, 1 failed, 1 skipped.")
    lines = report.splitlines()
    assert {"| NCCL | 2.28.9 |", "| commit | 0123abc |", "MPS serves the steps on two NCCL ranks."} <= {*lines}
    assert "| 4 | host waits | failed: exit status 1 | 8 |" in lines
    assert "| 8b | compute-sanitizer | skipped: compute-sanitizer is not installed | 0 |" in lines
    assert f"\n## 4 host waits\n\n{rows}\n\n```text\nhost:1 NCCL WARN Duplicate GPU detected\n" in report
    assert report.endswith("trace\n```\n")


def test_steps_are_chosen_by_name_or_number(capsys):
    steps = table(2)
    assert len({each.name for each in steps}) == len(steps)
    assert [each.name for each in select(steps, ["1", "5", "7a"])] == ["5a", "5b", "5c", "7a"]
    assert select(steps, []) == steps
    assert cli.main(["--only=9,3d,4"]) == 2
    assert capsys.readouterr().err.startswith("gpu_check: no step 9, 3d; there are: 1, 2a, 2b,")


@pytest.mark.parametrize(("version", "claims"), [((2, 28, 9), True), ((2, 30, 3), False), ((), True)])
def test_ranks_that_share_a_gpu_claim_a_host_each_up_to_nccl_2_29(monkeypatch, version, claims):
    monkeypatch.setattr(machine, "nccl_version", lambda: version)
    # So that monkeypatch takes it away in the end.
    monkeypatch.setenv("NCCL_HOSTID", "")
    sharing.claim_host()
    assert os.environ["NCCL_HOSTID"] == ""
    monkeypatch.setenv(sharing.SHARED, "1")
    sharing.claim_host()
    assert os.environ["NCCL_HOSTID"] == (f"process-{os.getpid()}" if claims else "")


@pytest.mark.parametrize("works", [True, False])
def test_mps_that_was_started_is_told_to_quit(tmp_path, monkeypatch, works):
    log, notes = tmp_path / "log", []
    program(monkeypatch, tmp_path, "nvidia-cuda-mps-control", f'[ "$1" = -d ] && echo started >>{log} || cat >>{log}')
    monkeypatch.setattr(sharing.sys, "executable", "true" if works else "false")
    with sharing.served_by_mps(notes) as served:
        assert bool(served) is works
        assert log.read_text() == "started\n"
    assert log.read_text() == "started\nquit\n"
    told = "MPS serves the steps on two NCCL ranks." if works else "MPS is installed but does not work"
    assert [note.partition(":")[0] for note in notes] == [told]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_mps_that_does_not_quit_is_killed(tmp_path, monkeypatch):
    starts, notes = 'sleep 60 & echo $! >"$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"', []
    program(monkeypatch, tmp_path, "nvidia-cuda-mps-control", f'[ "$1" = -d ] || exit 0\n{starts}')
    monkeypatch.setattr(sharing.sys, "executable", "true")
    monkeypatch.setattr(sharing, "_PATIENCE", 0.2)
    with sharing.served_by_mps(notes) as served:
        pid = int(Path(served["CUDA_MPS_PIPE_DIRECTORY"], "nvidia-cuda-mps-control.pid").read_text())
        assert is_alive(pid)
    assert notes[1:] == ["MPS did not quit and was killed."]
    wait_until_gone(pid)


def test_tests_of_the_cpu_are_there_for_gloo_on_the_gpu():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "gpu_check.pytest_plugin"]
    command += ["--ranks-backend=gloo-cuda", "tests/checkpoint/test_init_state.py"]
    environment = {**os.environ, "PYTHONPATH": pythonpath(), sharing.ALSO_ON: "gloo-cuda"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert "[2-gloo-cuda" in done.stdout, done.stdout + done.stderr


def test_sharded_gradients_are_compared_with_ddp(monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", pythonpath())
    assert measure.start_ranks(2, ["sharded", "--ranks=2", "--backend=gloo", "--iterations=1"]) == 0
    rows = [line.strip("| ").split(" | ") for line in capfd.readouterr().out.splitlines() if line.startswith("|")]
    trainers = ["DDP", "split", "whole, sharded gradients", "split, sharded gradients"]
    assert [(row[0], row[2]) for row in rows[2:]] == [(trainer, "ok") for trainer in trainers]


def check(tmp_path, *arguments):
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_some_steps_without_a_gpu(tmp_path):
    done = check(tmp_path, "--only=1,5c,7a", "--slow=4")
    assert done.returncode == 0, done.stdout + done.stderr
    report = (tmp_path / "report.md").read_text()
    assert report.startswith("# gpu-check: no GPU\n\n3 steps: 2 passed, 1 skipped.")
    assert "| 5c | memory of GPT-2 124M, two ranks over gloo (substitute: gloo, CPU, a tiny model) | passed |" in report
    assert "| 7a | CUDA graph of step() at one rank | skipped: no GPU, and the CPU has no CUDA graphs | 0 |" in report
    assert "| split | 2 |" in report
    assert "##### 1 versions" in (tmp_path / "log.txt").read_text()
    assert "to keep it" not in done.stdout


def test_a_report_of_a_gpu_is_kept_by_its_name(tmp_path, monkeypatch, capsys):
    # Given a machine with a GPU,
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    monkeypatch.setattr(cli, "table", lambda workers: [step("4"), step("5", "1 / 0")])
    monkeypatch.setattr(running, "VERSIONS", replace(VERSIONS, command=python(f"print({json.dumps(ON_GPU)!r})")))
    # when it is checked and a step fails, then the last line says where its report goes.
    assert cli.main(["--out", str(tmp_path / "out"), "--commit=0123abc"]) == 1
    kept = f"cp {tmp_path}/out/report.md {tmp_path}/docs/measured/nvidia-h100-pcie.md"
    assert capsys.readouterr().out.splitlines()[-1] == f"to keep it: {kept}"


@pytest.mark.exhaustive
def test_all_steps_without_a_gpu(tmp_path):
    done = check(tmp_path, "--slow=4", "--budget=1800")
    assert done.returncode == 0, done.stdout + done.stderr
    report = (tmp_path / "report.md").read_text()
    assert all(f"\n| {each.name} | {each.title}" in report for each in (VERSIONS, *table(2)))
    assert "| failed" not in report
    assert "| timed out" not in report
