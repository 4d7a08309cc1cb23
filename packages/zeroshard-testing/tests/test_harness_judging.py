"""The one place that decides what a pass is, without processes."""

from __future__ import annotations

import pytest
from zeroshard_testing import raises_on
from zeroshard_testing.outcome import Outcome, is_echo
from zeroshard_testing.stacks import readable_stacks
from zeroshard_testing.verdict import judge

PASSED = Outcome("passed")
RESET = Outcome("failed", "RuntimeError: Connection reset by peer", "trace", moment=1.0)


@pytest.mark.parametrize("kind", ["failed", "skipped", "xfailed", "died", "stopped", "timed out"])
def test_one_rank_that_did_not_pass_is_enough_for_a_failure(kind):
    assert judge({0: PASSED, 1: Outcome(kind, "why")}).kind == "failed"


@pytest.mark.parametrize("kind", ["passed", "skipped", "xfailed"])
def test_ranks_that_agree_make_the_verdict(kind):
    assert judge({0: Outcome(kind, "why"), 1: Outcome(kind, "why")}).kind == kind


@pytest.mark.parametrize("kind", ["failed", "died", "stopped", "timed out"])
def test_ranks_that_agree_on_a_failure_fail(kind):
    assert judge({0: Outcome(kind, "why"), 1: Outcome(kind, "why")}).kind == "failed"


def test_a_death_comes_before_an_earlier_exception():
    verdict = judge({0: Outcome("failed", "ValueError: x", moment=1.0), 1: Outcome("died", "was killed", moment=2.0)})
    assert verdict.summary == "rank 1 was killed"


def test_an_assertion_comes_before_an_earlier_consequence():
    verdict = judge({0: RESET, 1: Outcome("failed", "assert 1 == 2", moment=2.0)})
    assert verdict.summary == "rank 1 failed: assert 1 == 2"
    assert verdict.text.index("assert 1 == 2") < verdict.text.index("Connection reset by peer (a consequence)")


def test_the_earliest_of_two_exceptions_is_the_cause():
    verdict = judge({0: Outcome("failed", "late", moment=2.0), 1: Outcome("failed", "early", moment=1.0)})
    assert verdict.summary == "rank 1 failed: early"


def test_a_consequence_alone_is_still_a_failure():
    assert judge({0: PASSED, 1: RESET}).summary == "rank 1 failed: RuntimeError: Connection reset by peer"


def test_tracebacks_that_differ_in_addresses_alone_are_one():
    outcomes = {rank: Outcome("failed", "bad", f"<T at 0x7f00000000{rank}0>") for rank in range(3)}
    assert judge(outcomes).text.count("<T at") == 1


@pytest.mark.parametrize("text", ["Connection closed by peer", "Broken pipe", "remote process exited or there was"])
def test_what_a_peer_says_when_a_rank_has_gone_is_a_consequence(text):
    assert is_echo(text)


def test_stacks_end_where_the_test_was_called():
    text = (
        'Stack (most recent call first):\n  File "/x/test_it.py", line 3 in test_it\n'
        '  File "/x/zeroshard_testing/worker.py", line 5 in runtest\n  File "/x/pluggy.py", line 1 in call\n\n'
        "Extension modules: numpy (total: 1)"
    )
    assert readable_stacks(text) == 'Stack (most recent call first):\n  File "/x/test_it.py", line 3 in test_it'


def test_stacks_that_hold_no_frame_of_the_test_are_whole():
    text = 'Stack (most recent call first):\n  File "/x/zeroshard_testing/worker.py", line 5 in runtest'
    assert readable_stacks(text) == text


def test_raises_on_outside_of_ranks_says_so() -> None:
    with pytest.raises(RuntimeError, match="this process is not a rank"), raises_on(ranks=0):
        pass
