"""Beside other plugins: pytest-xdist, pytest-cov, pytest-timeout; and what the run says of its own checks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from conftest import Suite

RunSuite = Callable[..., "Suite"]

DIES_AFTER_THE_LAST = """
    import os, threading
    import pytest

    @pytest.mark.ranks(2)
    def test_leaves_a_thread_that_exits(rank):
        if rank == 1:
            threading.Thread(target=lambda: os._exit(7), daemon=True).start()
            threading.Event().wait(0.0)
"""
LEFT_OUT = """
    import pytest
    import torch
    import torch.distributed as dist

    @pytest.mark.ranks(2)
    def test_right(rank):
        dist.all_reduce(torch.ones(2))

    @pytest.mark.ranks(2)
    def test_left_out(rank):
        dist.barrier()
        if rank == 0:
            dist.broadcast(torch.ones(4), 0, async_op=True)

    @pytest.mark.ranks(2, checks="no:collectives")
    def test_left_out_unchecked(rank):
        test_left_out(rank)

    @pytest.mark.ranks(2, checks="no:messages")
    def test_fails_with_a_check_off(rank):
        raise ValueError("for its report")
"""
# Loaded with -p, and so in the process that workers are forked from: stands for a torch that has changed.
WITHOUT_FIELDS = """
    import torch
    dump = torch._C._distributed_c10d._dump_fr_trace

    def renamed(*args):
        return dump(*args).replace(b"collective_seq_id", b"collective_seq_no")

    torch._C._distributed_c10d._dump_fr_trace = renamed
"""
WITHOUT_NUMBERS = """
    import torch.distributed as dist
    del dist.ProcessGroup._get_sequence_number_for_group
"""

WITH_OTHER_ARGUMENTS = """
    from torch.distributed import distributed_c10d
    make = distributed_c10d._new_process_group_helper
    distributed_c10d._new_process_group_helper = lambda *args, **kwargs: make(*args, **kwargs)
"""


@pytest.mark.parametrize(
    "options", [(), pytest.param(("-n", "2"), marks=pytest.mark.exhaustive)], ids=["alone", "xdist"]
)
def test_a_worker_that_dies_after_the_last_test_fails_the_run(suite: RunSuite, options: tuple[str, ...]) -> None:
    if options:
        pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    done = suite(*options, test_last=DIES_AFTER_THE_LAST)
    assert done.status == pytest.ExitCode.TESTS_FAILED, done.text
    assert "exited with status 7" in done.text


@pytest.mark.exhaustive
def test_the_summary_line_keeps_the_cause_under_xdist(suite: RunSuite) -> None:
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    done = suite("-n", "1", "-rf", test_left_out=LEFT_OUT)
    line = next(line for line in done.text.splitlines() if line.startswith("FAILED") and "test_left_out[" in line)
    assert " - rank 1 returned" in line


def test_the_run_says_which_checks_are_on(suite: RunSuite) -> None:
    done = suite(test_left_out=LEFT_OUT)
    assert "ranks: checks on: deadlock, collectives, messages, faults" in done.text
    assert {name: case.kind for name, case in done.cases.items()} == {
        "test_right[2-gloo]": "passed",
        "test_left_out[2-gloo]": "failure",
        "test_left_out_unchecked[2-gloo]": "passed",
        "test_fails_with_a_check_off[2-gloo]": "failure",
    }
    assert "Checks that were off: messages" in done.cases["test_fails_with_a_check_off[2-gloo]"].text


def test_a_check_is_turned_off_in_the_ini_file(suite: RunSuite) -> None:
    done = suite("-o", "ranks_checks=no:collectives order", test_left_out=LEFT_OUT)
    assert "ranks: checks on: deadlock, messages, faults, races, order" in done.text
    assert "ranks: check off: collectives (by the ini file)" in done.text
    assert done.cases["test_left_out[2-gloo]"].kind == "passed"


def test_an_unknown_check_is_refused(suite: RunSuite) -> None:
    done = suite("-o", "ranks_checks=no:deadlocks", test_left_out=LEFT_OUT)
    assert done.status == pytest.ExitCode.USAGE_ERROR
    assert "'no:deadlocks' turns nothing off" in done.text


def test_a_flight_recorder_with_other_fields_turns_off_what_needs_it_and_nothing_else(suite: RunSuite) -> None:
    done = suite("-p", "other_torch", test_left_out=LEFT_OUT, other_torch=WITHOUT_FIELDS)
    assert "ranks: check off: deadlock (KeyError: 'collective_seq_id'; torch is " in done.text
    assert done.cases["test_right[2-gloo]"].kind == "passed", done.text
    assert done.cases["test_left_out[2-gloo]"].kind == "failure"


@pytest.mark.exhaustive
def test_a_group_constructor_with_other_arguments_turns_off_what_needs_it_and_nothing_else(suite: RunSuite) -> None:
    done = suite("-p", "other_torch", test_left_out=LEFT_OUT, other_torch=WITH_OTHER_ARGUMENTS)
    assert "ranks: check off: deadlock (LookupError: torch makes process groups with a function other" in done.text
    assert done.cases["test_right[2-gloo]"].kind == "passed", done.text
    assert done.cases["test_left_out[2-gloo]"].kind == "failure"


@pytest.mark.exhaustive
def test_without_sequence_numbers_no_right_test_fails(suite: RunSuite) -> None:
    done = suite("-p", "other_torch", test_left_out=LEFT_OUT, other_torch=WITHOUT_NUMBERS)
    assert "ranks: check off: collectives (AttributeError" in done.text
    assert done.cases["test_right[2-gloo]"].kind == "passed", done.text
    assert done.cases["test_left_out[2-gloo]"].kind == "passed"


def test_lines_that_run_on_ranks_are_covered(suite: RunSuite, tmp_path: Path) -> None:
    pytest.importorskip("pytest_cov", reason="pytest-cov is not installed")
    code = """
        def on_ranks(rank):
            if rank == 0:
                return "first"
            return "other"

        def never():
            return 1
    """
    tests = """
        import pytest
        from code_to_cover import on_ranks

        @pytest.mark.ranks(2)
        def test_it(rank):
            assert on_ranks(rank)
    """
    done = suite("--cov=code_to_cover", "--cov-report=term-missing", test_it=tests, code_to_cover=code)
    line = next(line for line in done.text.splitlines() if line.startswith("code_to_cover"))
    # The body of the function that no rank calls, and nothing else.
    assert line.split()[-1] == "8", line
    assert not list(tmp_path.glob(".coverage.*")), "the workers' files have been combined"


def test_a_timeout_of_pytest_timeout_during_boot_leaves_a_pool_that_works(suite: RunSuite) -> None:
    pytest.importorskip("pytest_timeout", reason="pytest-timeout is not installed")
    body = """
        import pytest

        @pytest.mark.ranks(2)
        @pytest.mark.timeout(0.05, method="signal")
        def test_times_out(rank):
            pass

        @pytest.mark.ranks(2)
        def test_afterwards(rank):
            pass
    """
    # The header would boot the pool before the first test.
    done = suite("-p", "no:terminal", test_it=body) if sys.platform == "linux" else suite(test_it=body)
    kinds = {name: case.kind for name, case in done.cases.items()}
    assert kinds["test_afterwards[2-gloo]"] == "passed", done.text


@pytest.mark.exhaustive
def test_deadlocks_are_proven_under_torch_s_own_debug_level(suite: RunSuite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    body = """
        import pytest
        import torch
        import torch.distributed as dist

        @pytest.mark.ranks(2, timeout=20)
        def test_returned_early(rank):
            dist.all_reduce(torch.ones(3))
            if rank == 0:
                dist.all_reduce(torch.ones(4))

        @pytest.mark.ranks(2)
        def test_right(rank):
            dist.all_reduce(torch.ones(3))
            dist.barrier()
    """
    done = suite(test_detail=body)
    assert done.cases["test_right[2-gloo]"].kind == "passed", done.text
    assert "rank 0 stuck in all_reduce" in done.cases["test_returned_early[2-gloo]"].text


def test_run_on_ranks_works_in_a_script(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle", reason="functions of scripts travel by cloudpickle")
    import subprocess

    script = tmp_path / "script.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "from zeroshard_testing import RanksFailure, run_on_ranks\n"
        "def total(x):\n"
        "    dist.all_reduce(x)\n"
        "    return x, dist.get_rank()\n"
        "def fails():\n"
        "    assert dist.get_rank() == 0\n"
        "found = run_on_ranks(total, 2, torch.ones(2))\n"
        "assert [rank for _, rank in found] == [0, 1] and found[1][0].tolist() == [2, 2], found\n"
        "assert run_on_ranks(lambda: dist.get_world_size(), 3) == [3, 3, 3]\n"
        "try:\n"
        "    run_on_ranks(fails, 2)\n"
        "except RanksFailure as failure:\n"
        "    assert 'rank 1 failed: AssertionError' in str(failure), failure\n"
        "else:\n"
        "    raise SystemExit('no failure')\n"
    )
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_habits_of_a_project_hold(suite: RunSuite) -> None:
    fixtures = """
        import pytest

        @pytest.fixture(scope="package")
        def of_the_folder(rank):
            return [rank]
    """
    tests = """
        import pytest

        @pytest.mark.ranks(2)
        def test_{}(rank, of_the_folder, of_a_plugin):
            assert of_the_folder == [rank]
            assert of_a_plugin == 7
    """
    plugin = """
        import pytest

        @pytest.fixture
        def of_a_plugin():
            return 7
    """
    files = {"below__conftest": fixtures, "below__test_a": tests.format("a"), "below__test_b": tests.format("b")}
    done = suite("-W", "error", conftest="pytest_plugins = ['a_plugin']", a_plugin=plugin, **files)
    assert {name: case.kind for name, case in done.cases.items()} == {
        "test_a[2-gloo]": "passed",
        "test_b[2-gloo]": "passed",
    }, done.text


def test_files_outside_the_root_folder_run(suite: RunSuite, tmp_path: Path) -> None:
    (tmp_path / "ci").mkdir()
    (tmp_path / "ci" / "pytest.ini").touch()
    done = suite(
        "-c",
        "ci/pytest.ini",
        "elsewhere",
        elsewhere__test_a="""
        import pytest

        @pytest.fixture(scope="module")
        def calls():
            return []

        @pytest.mark.parametrize("number", [1, 2])
        @pytest.mark.ranks(2)
        def test_it(calls, number):
            calls.append(number)
            assert len(calls) == number
    """,
    )
    assert {case.kind for case in done.cases.values()} == {"passed"}, done.text


@pytest.mark.exhaustive
def test_checks_that_are_off_are_told_under_xdist(suite: RunSuite) -> None:
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    done = suite("-n", "2", "-o", "ranks_checks=no:collectives", test_left_out=LEFT_OUT)
    assert done.text.count("ranks: check off: collectives (by the ini file)") == 1


def test_an_expected_failure_of_a_call_is_expected(suite: RunSuite) -> None:
    done = suite(
        test_calls="""
        import os
        import pytest
        from functools import partial
        from zeroshard_testing import RanksFailure, run_on_ranks

        def divide(x, y):
            return x // y

        @pytest.mark.xfail(raises=RanksFailure, strict=True)
        def test_expected():
            run_on_ranks(divide, 2, 1, 0)

        os.environ["CUDA_VISIBLE_DEVICES"] = ""

        def test_without_the_backend():
            with pytest.raises(RuntimeError, match="backend nccl needs CUDA"):
                run_on_ranks(divide, 2, 1, 1, backend="nccl")

        def test_partial():
            assert run_on_ranks(partial(divide, 7), 2, 3) == [2, 2]

        def test_traceback():
            run_on_ranks(divide, 2, 1, 0)
    """
    )
    kinds = {name: case.kind for name, case in done.cases.items()}
    assert kinds == {
        "test_expected": "skipped",
        "test_without_the_backend": "passed",
        "test_partial": "passed",
        "test_traceback": "failure",
    }, done.text
    assert "pluggy" not in done.cases["test_traceback"].text


def test_a_teardown_that_fails_before_new_processes_fails_the_run(suite: RunSuite) -> None:
    done = suite(
        test_teardown="""
        import pytest

        @pytest.fixture(scope="module")
        def wrong():
            yield
            raise ValueError("found in teardown")

        @pytest.mark.ranks(2)
        def test_first(wrong):
            pass

        @pytest.mark.ranks(2, isolation="process")
        def test_second():
            pass
    """
    )
    assert done.status == pytest.ExitCode.TESTS_FAILED, done.text
    assert "found in teardown" in done.text


def test_parameters_of_rank_fixtures_are_for_marked_tests_alone(suite: RunSuite) -> None:
    done = suite(
        test_parameters="""
        import pytest
        from zeroshard_testing import rank_fixture

        @rank_fixture(autouse=True, params=["a", "b"])
        def letter(request, rank):
            return request.param

        def test_plain():
            pass

        @pytest.mark.ranks(2)
        def test_marked(letter):
            pass
    """
    )
    assert {case.kind for case in done.cases.values()} == {"passed"}, done.text
    assert len(done.cases) == 3
    assert "test_plain" in done.cases


def test_a_thread_that_ends_a_rank_after_the_last_test_is_waited_for(suite: RunSuite) -> None:
    done = suite(
        test_last="""
        import os, threading
        import pytest

        @pytest.mark.ranks(2)
        def test_last(rank):
            if rank:
                threading.Timer(0.05, os._exit, [3]).start()
    """
    )
    assert done.status == pytest.ExitCode.TESTS_FAILED, done.text
    assert "exited with status 3" in done.text


@pytest.mark.skipif(torch.__version__ < "2.12", reason="a failed assert_close loads sympy since torch 2.12")
def test_workers_after_a_failure_have_loaded_what_it_made_torch_load(suite: RunSuite) -> None:
    body = """
        import os, sys
        from pathlib import Path
        import pytest
        import torch

        pytestmark = pytest.mark.ranks(2)

        def test_first():
            assert "sympy" not in sys.modules

        def test_fails():
            torch.testing.assert_close(torch.ones(3), torch.zeros(3))

        def test_after_it():
            assert {"sympy", "torch.fx.experimental.symbolic_shapes"} <= sys.modules.keys()
            # What has threads cannot be forked.
            threads = Path(f"/proc/{os.getppid()}/task")
            assert not threads.exists() or len(list(threads.iterdir())) == 1
    """
    done = suite("-p", "no:randomly", test_red=body)
    kinds = {name: case.kind for name, case in done.cases.items()}
    assert kinds == {
        "test_first[2-gloo]": "passed",
        "test_fails[2-gloo]": "failure",
        "test_after_it[2-gloo]": "passed",
    }, done.text
