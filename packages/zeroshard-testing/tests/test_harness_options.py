"""Options, backends that are missing, other plugins, and what is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Suite

RunSuite = Callable[..., "Suite"]

pytest_plugins = ["pytester"]

BACKENDS = """
    import pytest

    @pytest.mark.ranks(2, backend="gloo")
    def test_gloo(): pass

    @pytest.mark.ranks(2, backend="fake")
    def test_fake(): pass

    @pytest.mark.ranks(2, backend=["nccl", "gloo-cuda"])
    def test_cuda(): pass

    def test_plain(): pass
"""
WITHOUT_CUDA = """
    import os
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
"""


def test_a_missing_backend_is_skipped_with_its_reason(suite: RunSuite) -> None:
    done = suite("-rs", test_backends=BACKENDS, conftest=WITHOUT_CUDA)
    assert "3 passed, 2 skipped" in done.text
    assert "backend nccl needs CUDA" in done.text


def test_a_required_backend_that_is_missing_fails(suite: RunSuite) -> None:
    done = suite("--ranks-require=nccl", test_backends=BACKENDS, conftest=WITHOUT_CUDA)
    assert done.cases["test_cuda[2-nccl]"].kind == "error"
    assert "--ranks-require=nccl" in done.cases["test_cuda[2-nccl]"].text
    assert done.cases["test_cuda[2-gloo-cuda]"].kind == "skipped"


def test_an_unknown_required_backend_is_refused(suite: RunSuite) -> None:
    done = suite("--ranks-require=nvlink", test_backends=BACKENDS)
    assert done.status == pytest.ExitCode.USAGE_ERROR
    assert "no test uses backend 'nvlink'" in done.text


def test_one_backend_can_be_selected(suite: RunSuite) -> None:
    done = suite("--ranks-backend=fake", test_backends=BACKENDS)
    assert set(done.cases) == {"test_fake[2-fake]"}
    assert "4 deselected" in done.text


@pytest.mark.parametrize(
    ("marker", "complaint"),
    [
        ("ranks()", "name at least one world size"),
        ("ranks(0)", "a number of ranks must be a positive int"),
        ("ranks(2, backend=[3])", "backend must be a name such as gloo"),
        ('ranks(2, checks="no:deadlocks")', "turns nothing off; there are no:deadlock"),
        ('ranks(2, checks="no:order")', "and to turn on order"),
        ("ranks(2, time=3)", "unknown argument 'time'"),
        ("ranks(2, fake_rank=1)", 'fake_rank needs backend="fake"'),
    ],
)
def test_a_marker_that_means_nothing_is_refused(pytester: pytest.Pytester, marker: str, complaint: str) -> None:
    pytester.makepyfile(f"import pytest\n@pytest.mark.{marker}\ndef test_it(): pass")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(errors=1)
    assert complaint in result.stdout.str()


def test_pdb_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.ranks(2)\ndef test_it(): pass")
    result = pytester.runpytest_inprocess("--pdb")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--pdb and --trace do not work in tests marked with ranks*another terminal*"])


def test_a_rank_is_debugged_in_another_terminal(suite: RunSuite) -> None:
    here, there = os.openpty()
    name = os.ttyname(there)
    os.write(here, b"print(f'rank {rank} of {world_size}')\ncontinue\n")
    body = f"""
        import pdb
        import pytest
        import torch.distributed as dist

        @pytest.mark.ranks(2)
        def test_it(rank, world_size):
            if rank:
                pdb.Pdb(stdin=open({name!r}), stdout=open({name!r}, "w")).set_trace()
            dist.barrier()
    """
    done = suite("--ranks-timeout=3600", test_it=body)
    assert done.cases["test_it[2-gloo]"].kind == "passed", done.text
    assert b"rank 1 of 2" in os.read(here, 10_000)


@pytest.mark.parametrize("options", [["--ranks-timeout=1"], ["-o", "ranks_timeout=1"]])
def test_a_timeout_is_that_of_the_run_unless_a_test_has_its_own(suite: RunSuite, options: list[str]) -> None:
    body = """
        import time
        import pytest
        from zeroshard_testing import run_on_ranks

        @pytest.mark.ranks(2)
        def test_hangs(rank):
            time.sleep(60)

        @pytest.mark.ranks(2, timeout=30)
        def test_has_its_own(rank):
            time.sleep(1.5)

        def test_calls():
            run_on_ranks(time.sleep, 2, 60)
    """
    done = suite(*options, test_it=body)
    assert done.cases["test_hangs[2-gloo]"].text.startswith("ranks 0, 1 timed out: no outcome after 1 s")
    assert done.cases["test_has_its_own[2-gloo]"].kind == "passed"
    assert "ranks 0, 1 timed out: no outcome after 1 s" in done.cases["test_calls"].text


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--override-ini=ranks_timeout=soon", "could not convert string to float: 'soon'"),
        ("--ranks-timeout=-1", "a timeout must be a positive number of seconds, not -1"),
        ("--ranks-timeout=0", "a timeout must be a positive number of seconds, not 0"),
    ],
)
def test_a_timeout_that_is_no_positive_number_is_refused(suite: RunSuite, option: str, told: str) -> None:
    done = suite(option, test_backends=BACKENDS)
    assert done.status == pytest.ExitCode.USAGE_ERROR
    assert f"--ranks-timeout, or ranks_timeout in the ini file: {told}" in done.text


def test_xdist_runs_rank_tests(suite: RunSuite) -> None:
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    done = suite("-n", "2", test_backends=BACKENDS, conftest=WITHOUT_CUDA)
    assert "3 passed, 2 skipped" in done.text


def test_importing_the_plugin_does_not_import_torch() -> None:
    program = "import sys, zeroshard_testing, zeroshard_testing.plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


INTERRUPTED = """
    import os, pathlib, time, pytest

    @pytest.mark.ranks(2)
    def test_first(rank):
        pass

    @pytest.mark.ranks(2)
    def test_waits(rank, world_size):
        pathlib.Path(f"pid-{rank}").write_text(f"{os.getpid()} {os.getppid()}")
        time.sleep(60)
"""


@pytest.mark.parametrize(
    ("how", "launch"), [(signal.SIGINT, "forkserver"), (signal.SIGKILL, "forkserver"), (signal.SIGKILL, "spawn")]
)
def test_nothing_is_left_after_an_interrupt(tmp_path: Path, how: signal.Signals, launch: str) -> None:
    (tmp_path / "test_it.py").write_text("\n".join(line[4:] for line in INTERRUPTED.splitlines()))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    # Whoever runs this may ignore SIGINT, as nohup and the background of a script do, and a child inherits that.
    program = "import signal, pytest; signal.signal(signal.SIGINT, signal.default_int_handler); pytest.console_main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "-p", "no:cacheprovider", f"--ranks-launch={launch}", f"--rootdir={tmp_path}"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
    )
    marks = [tmp_path / "pid-0", tmp_path / "pid-1"]
    assert _eventually(lambda: all(mark.exists() and mark.read_text() for mark in marks), 60)
    pids = {int(pid) for mark in marks for pid in mark.read_text().split()}
    process.send_signal(how)
    process.wait(30)
    assert _eventually(lambda: not any(_is_running(pid) for pid in pids), 10)
    assert [path for path in temporary.iterdir() if not path.name.startswith("pytest-of-")] == []


def _eventually(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # Whoever adopts orphans may be slow to bury them.
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_worker_that_dies_between_tests_fails_the_run(suite: RunSuite) -> None:
    done = suite(
        test_late="""
            import os, threading, time
            import pytest

            @pytest.mark.ranks(2)
            def test_leaves_a_thread_that_exits(rank):
                if rank == 1:
                    timer = threading.Timer(0.1, os._exit, [7])
                    timer.daemon = True
                    timer.start()

            def test_plain():
                time.sleep(1)

            @pytest.mark.ranks(2)
            def test_next(rank):
                pass
        """
    )
    assert "3 passed" in done.text
    assert "worker of rank 1 exited with status 7 after test_late.py::test_leaves_a_thread_that_exits" in done.text
    assert done.status == pytest.ExitCode.TESTS_FAILED


def test_an_exception_in_a_thread_of_a_rank_is_subject_to_filters(suite: RunSuite) -> None:
    body = """
        import threading
        import pytest

        @pytest.mark.ranks(2)
        @pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
        def test_thread(rank):
            thread = threading.Thread(target=lambda: 1 / 0)
            thread.start()
            thread.join()
    """
    done = suite(test_thread=body)
    assert done.cases["test_thread[2-gloo]"].kind == "failure"
    assert "ZeroDivisionError" in done.cases["test_thread[2-gloo]"].text
