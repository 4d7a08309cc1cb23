"""No pass that was not one, and every failure with its cause: one suite of tests that go wrong, run once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Suite

RunSuite = Callable[..., "Suite"]

WRONG = """
    import asyncio, os, signal, sys, time, unittest
    import pytest
    import torch
    import torch.distributed as dist

    @pytest.mark.ranks(2)
    def test_raises_on_one_rank(rank):
        print("hello from", rank)
        expected = [1, 2, 0]
        assert [1, 2, rank] == expected

    @pytest.mark.ranks(3)
    def test_raises_on_two_ranks_alike(rank):
        if rank:
            raise ValueError("alike")

    @pytest.mark.ranks(2)
    def test_raises_while_the_other_waits(rank):
        if rank == 0:
            raise ValueError("the cause")
        dist.all_reduce(torch.ones(1))

    @pytest.mark.ranks(2)
    def test_is_killed(rank):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    @pytest.mark.ranks(2)
    def test_passes_after_a_kill(rank):
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x == 2

    @pytest.mark.ranks(2)
    def test_exits_at_once(rank):
        if rank == 1:
            os._exit(0)

    @pytest.mark.ranks(2)
    def test_exits_politely(rank):
        if rank == 1:
            sys.exit(0)

    @pytest.mark.ranks(2)
    def test_skips_alone(rank):
        if rank == 1:
            pytest.skip("not today")

    @pytest.mark.ranks(2)
    def test_all_skip(rank):
        pytest.skip("nobody today")

    @pytest.mark.ranks(2, timeout=1)
    def test_hangs(rank):
        def stuck_here():
            time.sleep(60)
        if rank == 0:
            stuck_here()

    @pytest.mark.ranks(2)
    def test_passes_after_a_hang(rank):
        dist.barrier()

    @pytest.mark.ranks(2)
    def test_leaves_by_segmentation_fault(rank):
        if rank == 0:
            import ctypes
            ctypes.string_at(0)

    @pytest.mark.ranks(2)
    async def test_is_a_coroutine(rank):
        assert False

    class TestOfUnittest(unittest.TestCase):
        @pytest.mark.ranks(2)
        def test_method(self):
            pass

    @pytest.mark.ranks(2)
    def test_gets_what_cannot_be_sent(rank, capsys):
        pass

    @pytest.fixture
    def uses_rank(rank):
        return rank + 1

    @pytest.mark.ranks(2)
    def test_has_a_fixture_that_uses_the_rank(uses_rank):
        pass

    def test_wants_a_rank_without_being_marked(rank):
        pass

    @pytest.mark.ranks(2)
    @pytest.mark.xfail(strict=True)
    def test_is_expected_to_fail(rank):
        assert rank == 0

    class OwnError(LookupError):
        pass

    @pytest.mark.ranks(2)
    @pytest.mark.xfail(raises=(OSError, LookupError), strict=True)
    def test_is_expected_to_raise(rank):
        raise OwnError(rank)

    @pytest.mark.ranks(2)
    @pytest.mark.xfail(raises=OSError, strict=True)
    def test_raises_what_is_not_expected(rank):
        raise OwnError(rank)

    @pytest.mark.ranks(2)
    def test_dies_after_reporting(rank):
        if rank == 1:
            import threading
            timer = threading.Timer(0.2, os._exit, [3])
            timer.daemon = True
            timer.start()
        else:
            time.sleep(1)
"""


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory, run_suite: RunSuite) -> Suite:
    """The suite, run."""
    return run_suite(tmp_path_factory.mktemp("wrong"), test_wrong=WRONG)


def test_an_assertion_that_fails_on_one_rank_fails_the_test_with_the_rewritten_message(wrong: Suite) -> None:
    case = wrong.cases["test_raises_on_one_rank[2-gloo]"]
    assert case.kind == "failure"
    assert "rank 1 failed: assert [1, 2, 1] == [1, 2, 0]" in case.text
    assert "At index 2 diff: 1 != 0" in case.text
    assert "rank 0 passed" in case.text


def test_output_is_captured_for_each_rank(wrong: Suite) -> None:
    output = wrong.cases["test_raises_on_one_rank[2-gloo]"].output
    assert "hello from 0" in output
    assert "hello from 1" in output
    assert "Captured stdout rank 1 call" in wrong.text


def test_the_short_summary_names_the_rank_and_the_cause(wrong: Suite) -> None:
    assert "test_raises_on_two_ranks_alike[3-gloo] - ranks 1, 2" in wrong.text


def test_identical_tracebacks_are_shown_once_with_their_ranks(wrong: Suite) -> None:
    text = wrong.cases["test_raises_on_two_ranks_alike[3-gloo]"].text
    assert "= ranks 1, 2 failed: ValueError: alike =" in text
    assert text.count('raise ValueError("alike")') == 1


def test_a_waiting_peer_is_told_of_after_the_cause(wrong: Suite) -> None:
    text = wrong.cases["test_raises_while_the_other_waits[2-gloo]"].text
    assert text.startswith("rank 0 failed: ValueError: the cause")
    assert text.index("the cause") < text.index("rank 1 stuck in all_reduce")


def test_a_killed_rank_fails_the_test_and_is_named_before_those_that_lost_it(wrong: Suite) -> None:
    case = wrong.cases["test_is_killed[2-gloo]"]
    assert case.kind == "failure"
    assert case.text.startswith("rank 1 was killed by SIGKILL before it reported an outcome")


@pytest.mark.parametrize("name", ["test_passes_after_a_kill[2-gloo]", "test_passes_after_a_hang[2-gloo]"])
def test_the_next_test_finds_a_healthy_pool(wrong: Suite, name: str) -> None:
    assert wrong.cases[name].kind == "passed"


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("test_exits_at_once[2-gloo]", "rank 1 exited with status 0 before it reported an outcome"),
        ("test_exits_politely[2-gloo]", "rank 1 called sys.exit(0)"),
        ("test_leaves_by_segmentation_fault[2-gloo]", "rank 0 was killed by SIGSEGV"),
        ("test_dies_after_reporting[2-gloo]", "rank 1 exited with status 3 after it had reported 'passed'"),
    ],
)
def test_a_rank_that_ends_is_a_failure(wrong: Suite, name: str, cause: str) -> None:
    assert wrong.cases[name].kind == "failure"
    assert wrong.cases[name].text.startswith(cause)


def test_a_crash_shows_the_python_stack(wrong: Suite) -> None:
    text = wrong.cases["test_leaves_by_segmentation_fault[2-gloo]"].text
    assert "Fatal Python error: Segmentation fault" in text
    assert "in test_leaves_by_segmentation_fault" in text


def test_a_lone_skip_is_a_failure(wrong: Suite) -> None:
    case = wrong.cases["test_skips_alone[2-gloo]"]
    assert case.kind == "failure"
    assert case.text.startswith("rank 1 skipped alone: not today")


def test_a_skip_on_all_ranks_is_a_skip(wrong: Suite) -> None:
    case = wrong.cases["test_all_skip[2-gloo]"]
    assert case.kind == "skipped"
    assert "nobody today" in case.text


def test_a_timeout_shows_where_the_rank_stands(wrong: Suite) -> None:
    case = wrong.cases["test_hangs[2-gloo]"]
    assert case.kind == "failure"
    assert case.text.startswith("rank 0 timed out: no outcome after 1 s")
    assert "in stuck_here" in case.text
    assert "rank 1 passed" in case.text


def test_a_coroutine_does_not_pass_unrun(wrong: Suite) -> None:
    case = wrong.cases["test_is_a_coroutine[2-gloo]"]
    assert case.kind == "failure"
    assert "its body never ran" in case.text


def test_a_unittest_method_does_not_run_in_the_controller_unnoticed(wrong: Suite) -> None:
    case = wrong.cases["test_method"]
    assert case.kind in ("failure", "error")
    assert "only functions and methods of plain classes can run on ranks" in case.text


def test_a_value_that_cannot_be_sent_is_named(wrong: Suite) -> None:
    case = wrong.cases["test_gets_what_cannot_be_sent[2-gloo]"]
    assert case.kind == "failure"
    assert "'capsys', a CaptureFixture, cannot be sent to the ranks" in case.text


def test_a_fixture_that_uses_the_rank_is_told_why_it_cannot(wrong: Suite) -> None:
    case = wrong.cases["test_has_a_fixture_that_uses_the_rank[2-gloo]"]
    assert case.kind == "error"
    assert "'rank' exists on the ranks only" in case.text


def test_an_unmarked_test_is_told_to_be_marked(wrong: Suite) -> None:
    case = wrong.cases["test_wants_a_rank_without_being_marked"]
    assert case.kind == "error"
    assert "mark it with @pytest.mark.ranks(2)" in case.text


@pytest.mark.parametrize("name", ["test_is_expected_to_fail", "test_is_expected_to_raise"])
def test_an_expected_failure_is_one(wrong: Suite, name: str) -> None:
    assert wrong.cases[f"{name}[2-gloo]"].kind == "skipped"


def test_another_exception_than_the_expected_one_is_a_failure(wrong: Suite) -> None:
    case = wrong.cases["test_raises_what_is_not_expected[2-gloo]"]
    assert case.kind == "failure"
    assert "OwnError" in case.text
