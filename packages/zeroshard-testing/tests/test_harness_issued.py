"""What ranks that have all passed may have issued differently, and what they may not."""

from __future__ import annotations

import pytest
from zeroshard_testing.issued import (
    collectives_to_compare,
    differ,
    find_crossed,
    find_left_out,
    find_mismatch,
    find_other_tensors,
    find_unequal_groups,
    find_unmatched_messages,
    find_worlds_of_one,
)
from zeroshard_testing.rank_state import GroupState, Messages, Operation, RankState

KEY = "0:0,1"
ALL_REDUCE = Operation("all_reduce", "float32[4]")


def rank(*operations: Operation, failed: int = 0, messages_failed: bool = False, **messages: list[str]) -> RankState:
    """Return a rank that has finished, with what it has issued in a group of two."""
    found = {name.replace("_", " "): Messages(len(texts), tuple(texts)) for name, texts in messages.items()}
    group = GroupState(
        "the default group",
        (0, 1),
        len(operations),
        dict(enumerate(operations, 1)),
        found,
        failed=failed,
        messages_failed=messages_failed,
    )
    return RankState(True, groups={KEY: group})


def test_a_rank_that_issued_less_than_another_is_named():
    assert find_left_out({0: rank(ALL_REDUCE), 1: rank()}) == {
        1: "returned without all_reduce (collective #1 of the default group, float32[4]), which rank 0 has issued"
    }


def test_a_collective_that_has_failed_may_be_left_out_and_what_comes_after_it():
    assert find_left_out({0: rank(ALL_REDUCE, ALL_REDUCE, failed=1), 1: rank()}) == {}


def test_a_failure_excuses_nothing_that_came_before_it():
    assert set(find_left_out({0: rank(ALL_REDUCE, ALL_REDUCE, failed=2), 1: rank()})) == {1}


def test_nothing_is_compared_in_detail_where_python_has_issued_alike():
    group = GroupState("the default group", (0, 1), 1, checksum=7)
    alike = {number: RankState(True, groups={KEY: group}) for number in range(2)}
    assert not collectives_to_compare(alike)
    assert collectives_to_compare({**alike, 1: rank(ALL_REDUCE)})


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (("broadcast", "float32[2, 3]"), ("broadcast", "float32[6]"), False),
        (("broadcast", "float32[6]"), ("broadcast", "float32[7]"), True),
        (("gather", "float32[6]"), ("gather", "float32[7]"), True),
        (("all_gather", "float32[2], float32[3]"), ("all_gather", "float32[2], float32[3]"), False),
        (("all_to_all", "float32[6]"), ("all_to_all", "float32[7]"), False),
        (("gather", "float32[6]"), ("gather", "int32[6]"), True),
        (("all_reduce", "float32[6]"), ("reduce", "float32[6]"), True),
        (("barrier", ""), ("barrier", ""), False),
    ],
)
def test_kinds_dtypes_and_sizes_have_to_match(one: tuple[str, str], other: tuple[str, str], expected: bool):
    assert differ(Operation(*one), Operation(*other)) is expected


def test_operations_and_roots_have_to_match_where_they_are_known():
    by_max = Operation("all_reduce", "float32[4]", reduce_op="MAX")
    by_sum = Operation("all_reduce", "float32[4]", reduce_op="SUM")
    assert differ(by_max, by_sum)
    assert not differ(by_max, ALL_REDUCE)
    assert differ(Operation("broadcast", root=0), Operation("broadcast", root=1))
    assert not differ(Operation("broadcast", root=0), Operation("broadcast"))


def test_what_cpp_has_issued_may_be_known_by_another_name():
    inside = Operation("all_gather", "float32[4]", from_python=False)
    assert not differ(Operation("all_gather_into_tensor", "float32[4]"), inside)
    assert differ(Operation("broadcast", "float32[4]"), inside)


def test_what_cpp_has_issued_of_complex_numbers_is_of_real_ones():
    inside = Operation("all_reduce", "float32[4, 2]", from_python=False)
    assert not differ(Operation("all_reduce", "complex64[4]"), inside)
    assert differ(Operation("all_reduce", "complex64[4]"), Operation("all_reduce", "float32[4, 2]"))


def test_the_own_part_of_a_list_is_not_compared_with_the_list():
    inside = Operation("all_gather", "float32[4]", from_python=False)
    assert not differ(Operation("all_gather", "float32[4], float32[4]"), inside)
    assert differ(Operation("all_gather", "float32[5]", from_python=False), inside)


def test_a_failure_that_follows_from_an_abort_excuses_nothing():
    states = {0: rank(ALL_REDUCE), 1: rank(Operation("all_reduce", "float32[5]"), failed=1)}
    assert find_mismatch(states) is None
    assert find_mismatch(states, excuses_failures=False) is not None


def test_a_mismatch_is_told_with_both_sides():
    where = "as collective #1 of the default group"
    found = find_mismatch({0: rank(ALL_REDUCE), 1: rank(Operation("broadcast", "float32[4]"))})
    assert found == f"rank 0 is in all_reduce of float32[4], rank 1 in broadcast of float32[4], {where}"


def in_order(*keys: str) -> RankState:
    """Return a rank that has issued a collective in each of these groups, in this order."""
    operations = {key: {1: Operation("barrier", serial=serial)} for serial, key in enumerate(keys)}
    return RankState(True, groups={key: GroupState(key, (0, 1), 1, one) for key, one in operations.items()})


def test_groups_that_ranks_share_are_used_in_one_order():
    assert find_crossed({0: in_order("1:0,1", "2:0,1"), 1: in_order("1:0,1", "2:0,1")}) is None
    assert find_crossed({0: in_order("1:0,1", "2:0"), 1: in_order("3:1", "1:0,1")}) is None
    assert find_crossed({}) is None
    found = find_crossed({0: in_order("1:0,1", "2:0,1"), 1: in_order("2:0,1", "1:0,1")})
    assert found == "rank 0 issues barrier #1 of group '1' before barrier #1 of group '2', and rank 1 after it"


def test_the_order_of_what_cpp_has_issued_is_not_known():
    states = {0: in_order("1:0,1", "2:0,1"), 1: in_order("2:0,1", "1:0,1")}
    states[1].groups["1:0,1"].operations[1] = Operation("barrier", from_python=False)
    assert find_crossed(states) is None


def test_a_world_of_its_own_on_every_rank_is_told():
    alone = RankState(True, begun={"0:0 0": 2})
    assert find_worlds_of_one({0: alone, 1: alone}) == "each of 2 ranks made a default group of only itself"
    for other in (RankState(True), RankState(True, begun={"0:0 0": 1, "0:0,1 1": 1}), RankState(True, groups={KEY: 0})):
        assert find_worlds_of_one({0: alone, 1: other}) is None
    assert find_worlds_of_one({0: alone}) is None


def begun(*groups: str) -> RankState:
    return RankState(True, begun={f"{group} 0": 1 for group in groups})


def test_groups_of_one_number_with_other_members_are_told():
    assert find_unequal_groups({0: begun("1:0,1", "2:0"), 1: begun("1:1", "2:0,1")}) == (
        "group '1' is the group of ranks 0, 1 on rank 0, and the group of rank 1 on rank 1: every "
        "rank must make the same calls of new_group, in the same order"
    )


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (["1:0,1", "2:0"], ["1:0,1"]),
        (["1:0,1", "1:0"], ["1:0"]),
        (["feed:0,1"], ["feed:1"]),
        (["1:0"], ["1:1"]),
        (["0:0", "1:0"], ["0:0,1", "1:1"]),
        (["0:0", "1:0"], ["0:0", "1:1"]),
    ],
    ids=[
        "not_yet_made",
        "default_group_made_anew",
        "hashed",
        "of_one_rank",
        "other_default_groups",
        "default_groups_of_one",
    ],
)
def test_groups_that_may_be_equal_are_not_told(here: list[str], there: list[str]) -> None:
    assert find_unequal_groups({0: begun(*here), 1: begun(*there)}) is None


def test_a_message_that_nobody_receives_is_told_of_its_sender():
    found = find_unmatched_messages({0: rank(send_1_7=["float32[4]"]), 1: rank()})
    assert found == {
        0: "passed, but has sent 1 message to rank 1 with tag 7, which were never received in the default group"
    }


def test_a_message_that_nobody_sends_is_told_of_its_receiver():
    assert set(find_unmatched_messages({0: rank(), 1: rank(recv_0_0=["float32[4]"] * 2)})) == {1}


def test_receives_from_anyone_take_what_is_left():
    messages = {"recv_-1_0": ["float32[4]"]}
    assert find_unmatched_messages({0: rank(send_1_0=["float32[4]"]), 1: rank(**messages)}) == {}
    assert set(find_unmatched_messages({0: rank(), 1: rank(**messages)})) == {1}


def test_a_message_is_received_as_what_it_was_sent():
    states = {0: rank(send_1_0=["float32[4]"]), 1: rank(recv_0_0=["int32[4]"])}
    assert "sends float32[4], and rank 1 receives it as int32[4]" in find_unmatched_messages(states)[1]
    assert "sends float32[4], and rank 1 receives it as int32[4]" in find_other_tensors(states)
    states[1] = rank(recv_0_0=["float32[2, 2]"])
    assert find_unmatched_messages(states) == {}
    assert find_other_tensors(states) is None
    states[1] = rank(**{"recv_0_0": ["int32[4]"], "recv_-1_0": ["float32[4]"]})
    assert find_other_tensors(states) is None


def test_after_a_failed_wait_messages_are_not_compared():
    assert find_unmatched_messages({0: rank(send_1_0=["float32[4]"]), 1: rank(messages_failed=True)}) == {}
