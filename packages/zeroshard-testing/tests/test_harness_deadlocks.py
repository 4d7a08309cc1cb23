"""When it is proven that ranks wait for one another for ever, and when it is not."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from zeroshard_testing import rank_inspector
from zeroshard_testing.deadlock import find_deadlock
from zeroshard_testing.issued import find_mismatch
from zeroshard_testing.rank_state import Awaited, GroupState, Messages, Operation, RankState

if TYPE_CHECKING:
    from conftest import Suite

KEY = "0:0,1"
SLOWLY_MADE = """
    import os, time

    import pytest
    from torch.distributed import distributed_c10d

    make = distributed_c10d._new_process_group_helper

    def slowly(*args, **kwargs):
        made = make(*args, **kwargs)
        # When the other ranks have left theirs.
        time.sleep(3)
        return made

    if os.environ.get("RANK") == "0":
        distributed_c10d._new_process_group_helper = slowly

    @pytest.mark.ranks(COUNT)
    def test_ends_at_once():
        pass
"""


MADE_BY_ALL = """
    import os, pathlib, time

    import pytest
    from torch.distributed import distributed_c10d

    made = pathlib.Path(__file__).with_name("made by rank 0")
    make = distributed_c10d._new_process_group_helper

    def slowly(*args, **kwargs):
        group = make(*args, **kwargs)
        time.sleep(1)
        made.touch()
        return group

    if os.environ.get("RANK") == "0":
        distributed_c10d._new_process_group_helper = slowly

    @pytest.mark.ranks(2)
    def test_begins_when_all_have_made_the_group():
        assert made.exists()
"""


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


def making(key: str = KEY, place: int = 0):
    """Return a rank that is making a group, of which it is the member at that place."""
    return RankState(False, (Awaited("group", key),), "mark", begun={f"{key} {place}": 1})


def test_a_collective_that_a_finished_rank_has_not_issued_never_completes():
    found = find_deadlock({0: state("all_reduce"), 1: state(finished=True)})
    assert "stuck in all_reduce (collective #1 of the default group, float32[4])" in found[0]
    assert "rank 1 never joins, it has ended" in found[0]


def test_a_collective_that_all_have_issued_may_complete():
    assert find_deadlock({0: state("all_reduce"), 1: state("all_reduce")}) == {}
    assert find_deadlock({0: state("all_reduce"), 1: state("all_reduce", done=1, finished=True)}) == {}


def test_different_collectives_at_one_number_are_a_mismatch():
    states = {0: state("all_reduce"), 1: state("broadcast")}
    found = find_deadlock(states)
    assert set(found) == {0, 1}
    where = "as collective #1 of the default group"
    assert find_mismatch(states) == f"rank 0 is in all_reduce of float32[4], rank 1 in broadcast of float32[4], {where}"


def test_one_rank_that_may_go_on_is_enough_for_hope():
    running = RankState()
    assert find_deadlock({0: state("all_reduce"), 1: running}) == {}


def test_a_rank_with_one_collective_that_may_complete_is_not_stuck():
    states = {0: state("all_reduce", "all_reduce"), 1: state("all_reduce", finished=True)}
    assert find_deadlock(states) == {}


def test_a_rank_that_has_no_pending_collective_is_about_to_go_on():
    assert find_deadlock({0: state("all_reduce", done=1), 1: state(finished=True)}) == {}


def test_a_rank_of_which_nothing_is_known_proves_nothing():
    assert find_deadlock({0: state("all_reduce"), 1: RankState(finished=True)}) == {}


def test_nobody_running_is_no_deadlock():
    assert find_deadlock({0: state(finished=True), 1: state(finished=True)}) == {}


def test_two_ranks_that_receive_from_each_other_are_stuck():
    assert find_deadlock({0: receiving(1), 1: receiving(0)})


def test_a_message_that_was_sent_may_arrive():
    assert find_deadlock({0: receiving(1), 1: receiving(0, send_0_0=1)}) == {}


def test_a_message_with_another_tag_does_not():
    found = find_deadlock({0: receiving(1, tag=5), 1: receiving(0, send_0_4=1)})
    assert "stuck waiting for message 1 from rank 1 with tag 5" in found[0]


def test_the_messages_that_came_before_are_counted():
    assert find_deadlock({0: receiving(1, number=1), 1: receiving(0, send_0_0=1)})


def test_two_ranks_that_meet_over_a_store_may_find_each_other():
    assert find_deadlock({0: making(), 1: state(kind="store")}) == {}
    assert find_deadlock({0: state(kind="store"), 1: state(kind="store")}) == {}
    assert find_deadlock({0: state(kind="store"), 1: state(finished=True)})


def test_a_call_that_torch_has_not_numbered_yet_has_begun():
    states = {0: state("all_reduce"), 1: state("all_reduce")}
    groups = {rank: {KEY: replace(one.groups[KEY], issued=0)} for rank, one in states.items()}
    assert find_deadlock({rank: replace(one, groups=groups[rank]) for rank, one in states.items()}) == {}


def test_a_group_that_a_member_has_not_begun_to_make_is_never_made():
    here = replace(making("1:0,1"), groups=state(finished=True).groups)
    for other, fate in ((state(finished=True), "has ended"), (state("all_reduce"), "waits for something else")):
        found = find_deadlock({0: here, 1: other})
        assert found[0] == f"stuck waiting for the other ranks of a new process group: rank 1 {fate}"


def test_a_group_that_all_members_have_begun_to_make_may_be_made():
    assert find_deadlock({0: making(), 1: making(place=1)}) == {}
    assert find_deadlock({0: making(), 1: RankState(finished=True, begun={f"{KEY} 1": 1})}) == {}


def test_a_group_of_one_waits_for_nobody():
    assert find_deadlock({0: making("0:0")}) == {}
    assert find_deadlock({0: RankState(finished=True), 1: making("1:1")}) == {}


def test_ranks_that_are_no_members_of_a_group_need_not_begin_it():
    made = RankState(finished=True, begun={"1:0,2 1": 1})
    assert find_deadlock({0: making("1:0,2"), 1: RankState(finished=True), 2: made}) == {}


def test_a_member_may_be_another_rank_than_it_is_called():
    made = RankState(finished=True, begun={f"{KEY} 1": 1})
    assert find_deadlock({0: making(), 1: RankState(finished=True), 2: made}) == {}


def test_a_group_that_is_made_again_must_be_begun_again():
    again = RankState(False, (Awaited("group", KEY, number=1),), "mark", begun={f"{KEY} 0": 2})
    assert find_deadlock({0: again, 1: RankState(finished=True, begun={f"{KEY} 1": 1})})
    assert find_deadlock({0: again, 1: RankState(finished=True, begun={f"{KEY} 1": 2})}) == {}


def test_two_ranks_that_make_groups_in_another_order_are_stuck():
    assert find_deadlock({0: making("1:0,1"), 1: making("2:0,1", place=1)})


def test_a_process_that_a_rank_has_started_may_be_a_member():
    assert find_deadlock({0: making(), 1: RankState(finished=True, has_children=True)}) == {}


@pytest.mark.parametrize("count", [1, *(pytest.param(count, marks=pytest.mark.exhaustive) for count in (2, 3))])
def test_nothing_is_proven_of_the_group_that_is_made_for_a_test(suite: Callable[..., Suite], count: int) -> None:
    done = suite(test_slow=SLOWLY_MADE.replace("COUNT", str(count)))
    assert {name: case.kind for name, case in done.cases.items()} == {f"test_ends_at_once[{count}-gloo]": "passed"}, (
        done.text
    )


def test_no_rank_begins_a_test_before_all_have_made_its_group(suite: Callable[..., Suite]) -> None:
    # Else one that ends the group at once closes connections that others still make.
    done = suite(test_slow=MADE_BY_ALL)
    assert {case.kind for case in done.cases.values()} == {"passed"}, done.text


def test_a_look_at_the_threads_keeps_nothing_alive() -> None:
    class Model:
        pass

    ready, go = threading.Event(), threading.Event()
    left = []

    def use() -> weakref.ref[Model]:
        model = Model()
        ready.set()
        go.wait()
        return weakref.ref(model)

    thread = threading.Thread(target=lambda: left.append(use()() is not None))
    thread.start()
    ready.wait()
    looked = rank_inspector._what_threads_do()
    go.set()
    thread.join()
    assert left == [False]
    assert looked[thread.ident].is_idle


IN_TORCH = """
def step(values, ready, go):
    value = values.pop()
    dropped = weakref.ref(value)
    ready.release()
    go.acquire()
    value = None
    return dropped() is not None
"""


def test_what_a_function_of_torch_drops_is_not_kept_until_it_ends() -> None:
    class Tensor:
        pass

    names: dict[str, Any] = {"weakref": weakref}
    exec(compile(IN_TORCH, str(Path(torch.__file__).with_name("made_up.py")), "exec"), names)
    # Locks, because the innermost frame is to be the function's own.
    ready, go = threading.Lock(), threading.Lock()
    left = []
    ready.acquire()
    go.acquire()
    thread = threading.Thread(target=lambda: left.append(names["step"]([Tensor()], ready, go)))
    thread.start()
    ready.acquire()
    rank_inspector._what_threads_do()
    go.release()
    thread.join()
    assert left == [False]
