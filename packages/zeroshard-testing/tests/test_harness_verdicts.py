"""What the report of a failure holds beyond its first line, which test_harness_corpus.py looks at."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Suite

RunSuite = Callable[..., "Suite"]

WRONG = """
    import time
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

    @pytest.mark.ranks(2, timeout=1)
    def test_hangs(rank):
        def stuck_here():
            time.sleep(60)
        if rank == 0:
            stuck_here()

    @pytest.mark.ranks(2)
    def test_leaves_by_segmentation_fault(rank):
        if rank == 0:
            import ctypes
            ctypes.string_at(0)
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


def test_a_crash_shows_the_python_stack(wrong: Suite) -> None:
    text = wrong.cases["test_leaves_by_segmentation_fault[2-gloo]"].text
    assert "Fatal Python error: Segmentation fault" in text
    assert "in test_leaves_by_segmentation_fault" in text


def test_a_timeout_shows_where_the_rank_stands(wrong: Suite) -> None:
    case = wrong.cases["test_hangs[2-gloo]"]
    assert case.kind == "failure"
    assert case.text.startswith("rank 0 timed out: no outcome after 1 s")
    assert "in stuck_here" in case.text
    assert "rank 1 passed" in case.text
