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


def run_of(steps, *, found=None, budget=60.0, share=dict):
    run = Run(Budget(budget), lambda *_: None, machine={"GPU": NO_GPU} if found is None else found)
    run.run(steps, share)
    return run


def verdicts(run):
    return {outcome.name: f"{outcome.verdict}: {outcome.detail}".rstrip(": ") for outcome in run.outcomes}


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
    deadline = time.monotonic() + 10
    while is_alive(int(ended.output)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(int(ended.output))


def test_a_step_that_cannot_be_killed_does_not_hold_the_run(monkeypatch):
    # Given a process that ends by no signal, as one in the driver's hands,
    monkeypatch.setattr(running, "_GRACE", 0.01)
    monkeypatch.setattr(running, "_DEAD", 0.01)
    monkeypatch.setattr(running.os, "killpg", lambda *_: None)
    # when it is ended,
    ended = run_process(("sh", "-c", "trap '' INT; sleep 2"), 0.2, {})
    # then the run goes on, and says so.
    assert judge(ended, 1, counts_tests=False) == ("timed out", "after 1 s and could not be killed")


def test_a_rank_that_cannot_be_killed_fails(monkeypatch, capsys):
    class Stuck:
        pid = 7

        def __init__(self, *_, **__): ...

        def poll(self):
            return 1

        def kill(self): ...

        def wait(self, timeout):
            raise subprocess.TimeoutExpired("rank", timeout)

    monkeypatch.setattr(measure.subprocess, "Popen", Stuck)
    assert measure.start_ranks(1, []) == 1
    assert capsys.readouterr().out == "process 7 could not be killed\n"


def test_a_step_finds_the_modules_of_the_caller_too(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/of/the/caller:/second")
    run = run_of([step("2", "import sys; print('|', '/second' in sys.path, '|')")])
    assert run.outcomes[0].body == "| True |"
    monkeypatch.delenv("PYTHONPATH")
    assert pythonpath().endswith("/tools")


def first_step(monkeypatch, code):
    monkeypatch.setattr(running, "VERSIONS", replace(VERSIONS, command=python(code)))
    run = Run(Budget(FULL), lambda *_: None)
    run.find_machine()
    return run


def test_the_machine_is_the_last_line_of_json_among_others(monkeypatch):
    run = first_step(monkeypatch, 'print(\'{"GPU": "none"}\\nWARNING: a leak\')')
    assert (verdicts(run), run.machine) == ({"1": "passed"}, {"GPU": NO_GPU})


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        ("print('hello')", "no JSON"),
        ("print('{hello')", "no JSON"),
        ("raise SystemExit('no torch')", "exit status 1: no torch"),
    ],
)
def test_a_machine_that_cannot_be_told_is_a_step_that_failed(monkeypatch, code, detail):
    run = first_step(monkeypatch, code)
    run.run([step("2")], dict)
    assert verdicts(run) == {"1": f"failed: {detail}", "2": "skipped: step 1 failed"}
    assert "```text" in run.outcomes[0].body


def test_a_gpu_that_torch_cannot_use_is_an_error_unless_it_is_hidden(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 PCIe (UUID: GPU-0)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)

    def init():
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(machine.torch.cuda, "init", init)
    reason = "nvidia-smi lists NVIDIA H100 PCIe, and torch cannot use it: the driver is too old"
    assert machine.why_unusable() == reason
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.why_unusable() == ""


def test_the_run_goes_on_after_steps_that_fail_and_hang():
    run = run_of(
        [
            step("1a", "raise SystemExit(3)"),
            step("1b", "import time; time.sleep(60)", limit=0.5),
            step("1c", "import os; os.kill(os.getpid(), 9)"),
            step("1d", command=("no-such-program",)),
            step("1e"),
        ]
    )
    assert verdicts(run) == {
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


def test_no_step_begins_if_sharing_has_used_up_the_budget():
    steps = [step("3b", environment=sharing.ENVIRONMENT)]
    run = Run(Budget(30.0), lambda *_: None, machine=ON_GPU)

    def share():
        run.budget = Budget(9.0)
        return {}

    run.run(steps, share)
    assert verdicts(run) == {"3b": "skipped: the budget of 9 s is spent"}


@pytest.mark.parametrize("budget", [FULL, 360.0])
def test_slow_tests_leave_time_for_all_steps_up_to_captures(budget):
    # Given that two steps take all of their time, and are ended late, and the others half of theirs,
    told = Budget(budget)
    spent = 0.0
    for each in [VERSIONS, *table(2)]:
        if each.name == "7c":
            break
        limit = told.limit_of(each)
        assert limit >= 10
        spent += limit + 5 if each.name in ("2b", "3c") else limit / 2
    # then there is time for the last of them.
    assert spent <= budget - 15


def test_limits_shrink_with_the_budget_and_grow_with_the_factor():
    assert Budget(FULL).limit_of(step("2")) == 30
    assert Budget(FULL / 2).limit_of(step("2")) == 15
    assert Budget(FULL / 8).limit_of(step("2")) == 10
    assert Budget(FULL, slow=4).limit_of(step("2")) == 120


def test_without_a_machine_no_step_runs():
    run = run_of([step("2")], found={})
    assert verdicts(run) == {"2": "skipped: step 1 failed"}


def test_without_a_gpu_a_substitute_runs_under_its_own_name_or_the_reason_is_given():
    fails = "raise SystemExit(1)"
    run = run_of(
        [
            step("2", fails, without_gpu=Substitute("stand-in: gloo, CPU", python("pass"))),
            step("3", fails, without_gpu="no GPU, and NCCL needs one"),
        ]
    )
    assert run.outcomes[0].title == "shows 2 (stand-in: gloo, CPU)"
    assert verdicts(run) == {"2": "passed", "3": "skipped: no GPU, and NCCL needs one"}


def test_on_a_gpu_the_steps_themselves_run_and_those_of_two_nccl_ranks_share():
    prints = "import os; print('|', os.environ.get('MPS'), os.environ.get('NCCL_MULTI_RANK_GPU_ENABLE'), '|')"
    steps = [
        step("2", prints, without_gpu="no GPU"),
        step("3", prints, without_gpu="no GPU", environment=sharing.ENVIRONMENT),
    ]
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
def test_tests_are_counted_by_the_lines_of_pytest(output):
    assert find_tests(output) == [
        ("PASSED", "tests/test_a.py::test_one[2-gloo-clipped by the norm]"),
        ("SKIPPED", "tests/test_a.py::test_two"),
        ("FAILED", "tests/test_a.py::test_three"),
    ]
    counts = "1 passed, 1 skipped, 1 failed"
    assert judge(Ended(1, output, 1.0), 9, counts_tests=True) == ("failed", f"exit status 1: {counts}")
    assert judge(Ended(None, output, 9.0), 9, counts_tests=True) == ("timed out", f"after 9 s: {counts}")
    assert "FAILED tests/test_a.py::test_three" in body_of(output, is_well=False)


@pytest.mark.parametrize(
    "output",
    [
        f"{VERBOSE}tests/test_a.py::test_four[a b] \n!!!!! KeyboardInterrupt !!!!!",
        f"{WITH_XDIST}tests/test_a.py::test_four[a b] \n!!!!! KeyboardInterrupt !!!!!",
    ],
    ids=["verbose", "xdist"],
)
def test_the_report_names_the_tests_that_were_running(output):
    body = body_of(output, is_well=False)
    assert [line for line in body.splitlines() if "running" in line] == ["running: tests/test_a.py::test_four[a b]"]


@pytest.mark.parametrize("output", ["", "tests/test_a.py::test_two SKIPPED (no CUDA device) [100%]"])
def test_a_step_in_which_no_test_ran_has_failed(output):
    verdict, detail = judge(Ended(0, output, 1.0), 9, counts_tests=True)
    assert (verdict, detail.partition(":")[0]) == ("failed", "no test ran")


def test_the_report_has_the_device_first_then_a_row_for_each_step_then_their_tables():
    outcomes = [
        Outcome("1", "versions", "passed", "", 2.0),
        Outcome(
            "4", "host waits", "failed", "exit status 1", 7.6, "| trainer | verdict |\n| --- | --- |\n| DDP | ok |"
        ),
        Outcome("8b", "compute-sanitizer", "skipped", "compute-sanitizer is not installed"),
    ]
    report = report_of(ON_GPU, "0123abc", ["MPS serves the steps on two NCCL ranks."], outcomes)
    lines = report.splitlines()
    assert lines[0] == "# gpu-check: NVIDIA H100 PCIe"
    assert lines[2].startswith("3 steps: 1 passed, 1 failed, 1 skipped.")
    assert {"| NCCL | 2.28.9 |", "| commit | 0123abc |", "MPS serves the steps on two NCCL ranks."} <= {*lines}
    assert "| 4 | host waits | failed: exit status 1 | 8 |" in lines
    assert "| 8b | compute-sanitizer | skipped: compute-sanitizer is not installed | 0 |" in lines
    assert lines.index("## 4 host waits") < lines.index("| DDP | ok |")


def test_a_step_that_fails_leaves_the_rows_that_it_printed_and_the_end_of_its_output():
    body = body_of(
        "| a | b |\n| --- | --- |\n| 1 | ok |\nhost:1 NCCL WARN Duplicate GPU detected\ntrace", is_well=False
    )
    assert body.splitlines()[:4] == ["| a | b |", "| --- | --- |", "| 1 | ok |", ""]
    assert body.count("Duplicate GPU detected") == 2
    assert body.splitlines()[-2:] == ["trace", "```"]


def test_steps_are_chosen_by_name_or_number():
    steps = table(2)
    assert len({each.name for each in steps}) == len(steps)
    assert [each.name for each in select(steps, ["1", "5", "7a"])] == ["5a", "5b", "5c", "7a"]
    assert select(steps, []) == steps
    with pytest.raises(ValueError, match="no step 9, 3d"):
        select(steps, ["9", "3d", "4"])


def test_without_a_gpu_every_step_has_a_stand_in_or_a_reason():
    told = [
        each.without_gpu.name if isinstance(each.without_gpu, Substitute) else each.without_gpu for each in table(2)
    ]
    assert all(text.startswith(("stand-in: ", "no GPU")) for text in told)


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
    program, log = tmp_path / "nvidia-cuda-mps-control", tmp_path / "log"
    program.write_text(f'#!/bin/sh\n[ "$1" = -d ] && echo started >>{log} || cat >>{log}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sharing.sys, "executable", "true" if works else "false")
    notes = []
    with sharing.served_by_mps(notes) as served:
        assert bool(served) is works
        assert log.read_text() == "started\n"
    assert log.read_text() == "started\nquit\n"
    assert [note.partition(":")[0] for note in notes] == [
        "MPS serves the steps on two NCCL ranks." if works else "MPS is installed and does not work"
    ]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_mps_that_does_not_quit_is_killed(tmp_path, monkeypatch):
    program, notes = tmp_path / "nvidia-cuda-mps-control", []
    starts = 'sleep 60 & echo $! >"$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"'
    program.write_text(f'#!/bin/sh\n[ "$1" = -d ] || exit 0\n{starts}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sharing.sys, "executable", "true")
    monkeypatch.setattr(sharing, "_PATIENCE", 0.2)
    with sharing.served_by_mps(notes) as served:
        pid = int(Path(served["CUDA_MPS_PIPE_DIRECTORY"], "nvidia-cuda-mps-control.pid").read_text())
        assert is_alive(pid)
    assert notes[1:] == ["MPS did not quit and was killed."]
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(pid)


def test_tests_of_the_cpu_are_there_for_gloo_on_the_gpu():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "gpu_check.pytest_plugin"]
    command += ["--ranks-backend=gloo-cuda", "tests/checkpoint/test_init_state.py"]
    environment = {**os.environ, "PYTHONPATH": pythonpath(), sharing.ALSO_ON: "gloo-cuda"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert "[2-gloo-cuda" in done.stdout, done.stdout + done.stderr


def test_sharded_gradients_are_compared_with_ddp(monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", pythonpath())
    assert measure.start_ranks(2, ["sharded", "--ranks=2", "--backend=gloo", "--iterations=1"]) == 0
    rows = [line.split(" | ") for line in capfd.readouterr().out.splitlines() if line.startswith("|")]
    assert [row[0] for row in rows[2:]] == [
        "| DDP",
        "| split",
        "| whole, sharded gradients",
        "| split, sharded gradients",
    ]
    assert all(row[2] == "ok" for row in rows[2:])


def check(tmp_path, *arguments):
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_some_steps_without_a_gpu(tmp_path):
    done = check(tmp_path, "--only=1,5c,7a", "--slow=4")

    assert done.returncode == 0, done.stdout + done.stderr
    report = (tmp_path / "report.md").read_text()
    assert report.startswith("# gpu-check: no GPU\n\n3 steps: 2 passed, 1 skipped.")
    assert "| 5c | memory of GPT-2 124M, two ranks over gloo (stand-in: gloo, CPU, a tiny model) | passed |" in report
    assert "| 7a | CUDA graph of step() at one rank | skipped: no GPU, and the CPU has no CUDA graphs | 0 |" in report
    assert "| split | 2 |" in report
    assert "##### 1 versions" in (tmp_path / "log.txt").read_text()
    assert "to keep it" not in done.stdout


def test_an_unknown_step_is_refused(tmp_path):
    done = check(tmp_path, "--only=9")
    assert done.returncode == 2
    assert "gpu_check: no step 9; there are: 1, 2a" in done.stderr


def test_a_report_of_a_gpu_is_kept_by_its_name_and_listed_on_the_page(tmp_path, monkeypatch, capsys):
    from bench.page import gpus_of

    # Given a machine with a GPU,
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    monkeypatch.setattr(cli, "table", lambda workers: [step("4"), step("5", "1 / 0")])
    monkeypatch.setattr(running, "VERSIONS", replace(VERSIONS, command=python(f"print({json.dumps(ON_GPU)!r})")))
    assert "There is no report of a GPU yet." in gpus_of([])
    (tmp_path / "docs" / "measured").mkdir(parents=True)
    # when its report is kept as the last line says,
    status = cli.main(["--out", str(tmp_path / "out"), "--commit=0123abc"])
    copy = capsys.readouterr().out.splitlines()[-1].partition(": ")[2].split()
    subprocess.run(copy, check=True)
    # then it has the name of the device, and the page a row for it and a place in the contents.
    kept = Path(copy[-1])
    section = gpus_of([kept])
    assert (status, kept.name) == (1, "nvidia-h100-pcie.md")
    row = "| [NVIDIA H100 PCIe](measured/nvidia-h100-pcie.md) | 2.11.0 | 13.0 | 2.28.9 | 0123abc | 2 passed, 1 failed |"
    assert row in section
    assert "```{toctree}\n:hidden:\n\nmeasured/nvidia-h100-pcie\n```" in section


@pytest.mark.exhaustive
def test_all_steps_without_a_gpu(tmp_path):
    done = check(tmp_path, "--slow=4", "--budget=1800")

    assert done.returncode == 0, done.stdout + done.stderr
    report = (tmp_path / "report.md").read_text()
    assert all(f"\n| {each.name} | {each.title}" in report for each in (VERSIONS, *table(2)))
    assert "| failed" not in report
    assert "| timed out" not in report
