"""When it is proven that ranks wait for one another for ever, and when it is not."""

from __future__ import annotations

from zeroshard_testing.deadlock import find_deadlock
from zeroshard_testing.issued import find_mismatch
from zeroshard_testing.rank_state import Awaited, GroupState, Messages, Operation, RankState

KEY = "0:0,1"


def state(*operations: str, kind: str = "collective", done: int = 0, finished: bool = False, **messages: int):
    """Return a rank that has issued operations in the default group, the first ``done`` of them completed."""
    issued = {number: Operation(name, "float32[4]", number > done) for number, name in enumerate(operations, 1)}
    counts = {name.replace("_", " "): Messages(count) for name, count in messages.items()}
    group = GroupState("the default group", (0, 1), len(operations), issued, counts)
    awaited = () if finished else (Awaited(kind),)
    return RankState(finished, awaited, "mark", {KEY: group})


def receiving(peer: int, number: int = 0, tag: int = 0, **messages: int):
    counts = {name.replace("_", " "): Messages(count) for name, count in messages.items()}
    group = GroupState("the default group", (0, 1), 0, {}, counts)
    return RankState(False, (Awaited("recv", KEY, peer, tag, number),), "mark", {KEY: group})


def test_a_collective_that_a_finished_rank_has_not_issued_never_completes():
    found = find_deadlock({0: state("all_reduce"), 1: state(finished=True)})
    assert found is not None
    assert "stuck in all_reduce (collective #1 of the default group, float32[4])" in found.reasons[0]
    assert "rank 1 never joins, it has ended" in found.reasons[0]


def test_a_collective_that_all_have_issued_may_complete():
    assert find_deadlock({0: state("all_reduce"), 1: state("all_reduce")}) is None
    assert find_deadlock({0: state("all_reduce"), 1: state("all_reduce", done=1, finished=True)}) is None


def test_different_collectives_at_one_number_are_a_mismatch():
    states = {0: state("all_reduce"), 1: state("broadcast")}
    found = find_deadlock(states)
    assert found is not None
    assert set(found.reasons) == {0, 1}
    where = "as collective #1 of the default group"
    assert find_mismatch(states) == f"rank 0 is in all_reduce of float32[4], rank 1 in broadcast of float32[4], {where}"


def test_one_rank_that_may_go_on_is_enough_for_hope():
    running = RankState()
    assert find_deadlock({0: state("all_reduce"), 1: running}) is None


def test_a_rank_with_one_collective_that_may_complete_is_not_stuck():
    states = {0: state("all_reduce", "all_reduce"), 1: state("all_reduce", finished=True)}
    assert find_deadlock(states) is None


def test_a_rank_that_has_no_pending_collective_is_about_to_go_on():
    assert find_deadlock({0: state("all_reduce", done=1), 1: state(finished=True)}) is None


def test_a_rank_of_which_nothing_is_known_proves_nothing():
    assert find_deadlock({0: state("all_reduce"), 1: RankState(finished=True)}) is None


def test_nobody_running_is_no_deadlock():
    assert find_deadlock({0: state(finished=True), 1: state(finished=True)}) is None


def test_two_ranks_that_receive_from_each_other_are_stuck():
    assert find_deadlock({0: receiving(1), 1: receiving(0)}) is not None


def test_a_message_that_was_sent_may_arrive():
    assert find_deadlock({0: receiving(1), 1: receiving(0, send_0_0=1)}) is None


def test_a_message_with_another_tag_does_not():
    found = find_deadlock({0: receiving(1, tag=5), 1: receiving(0, send_0_4=1)})
    assert found is not None
    assert "stuck waiting for message 1 from rank 1 with tag 5" in found.reasons[0]


def test_the_messages_that_came_before_are_counted():
    assert find_deadlock({0: receiving(1, number=1), 1: receiving(0, send_0_0=1)}) is not None


def test_two_ranks_that_meet_over_a_store_may_find_each_other():
    assert find_deadlock({0: state(kind="group"), 1: state(kind="store")}) is None
    assert find_deadlock({0: state(kind="group"), 1: state(finished=True)}) is not None
