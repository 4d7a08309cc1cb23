"""What moves the data of collectives on the emulated accelerator, and compares what ranks issue, on CPU tensors."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from itertools import count, permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from zeroshard_testing.emulated.mover import Mover, delay_up_to, live_movers
from zeroshard_testing.emulated.order import Call, Entry, Message, describe, end_of, find_difference
from zeroshard_testing.emulated.order import find_message_difference as find_other_message

pytestmark = pytest.mark.exhaustive

SOON = 20


class Group:
    """A mover, and the tickets that it has completed."""

    def __init__(self, ranks: list[int], name: str, timeout: float) -> None:
        self.results: dict[int, Future[str]] = {}
        self._tickets = count()
        store = dist.distributed_c10d._get_default_store()
        place = ranks.index(dist.get_rank())
        self.mover = Mover(store, place, ranks, name, timedelta(seconds=timeout), self._complete)

    def _complete(self, ticket: int, error: str) -> None:
        # Raises if it is called again.
        self.results[ticket].set_result(error)

    def start(self, *calls: tuple[Any, ...]) -> Future[str]:
        ticket = next(self._tickets)
        self.results[ticket] = Future()
        self.mover.issue(ticket, [_whole(*call) for call in calls], _stack())
        return self.results[ticket]

    def run(self, *call: Any) -> str:
        return self.start(call).result(SOON)


def _stack() -> list[tuple[str, int, str]]:
    """Return the Python frames of the caller, as the process group gives them to its mover."""
    frames = traceback.extract_stack()[:-1]
    return [(frame.filename, frame.lineno or 0, frame.name) for frame in reversed(frames)]


def _whole(name, inputs=(), outputs=(), root=-1, reduce_op="", sizes=()):
    return name, [tensor.clone().contiguous() for tensor in inputs], list(outputs), root, reduce_op, list(sizes)


@pytest.fixture
def group() -> Iterator[Callable[..., Group]]:
    """Make groups, of all ranks unless some are named; of other ranks, none."""
    made: list[Group] = []

    def make(ranks=None, name="0", timeout=SOON) -> Group | None:
        ranks = list(range(dist.get_world_size())) if ranks is None else ranks
        if dist.get_rank() not in ranks:
            return None
        made.append(Group(ranks, name, timeout))
        return made[-1]

    yield make
    for one in made:
        one.mover.close()
    delay_up_to(0, 0)


def summed(group: Group, elements: int = 4, **named: Any) -> str:
    return all_reduce(group, torch.ones(elements), **named)


def all_reduce(group: Group, tensor: torch.Tensor, reduce_op: str = "SUM") -> str:
    return group.run("all_reduce", [tensor], [tensor], -1, reduce_op)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * dist.get_rank() + seed))


# The data, against torch.distributed on gloo.


@pytest.mark.parametrize("reduce_op", ["SUM", "AVG", "PRODUCT", "MIN", "MAX"])
@pytest.mark.ranks(1, 2, 3)
def test_reductions_are_bitwise_those_of_gloo(group, rank, world_size, reduce_op):
    # An average is a sum of what was multiplied before, as NCCL's is.
    factor = 1 / world_size if reduce_op == "AVG" else 1
    mine, operation = group(), getattr(dist.ReduceOp, "SUM" if reduce_op == "AVG" else reduce_op)
    for shape in [(), (0,), (1,), (1001,), (7, 12)]:
        found, expected = (drawn(*shape) for _ in range(2))
        assert all_reduce(mine, found, reduce_op) == ""
        dist.all_reduce(expected.mul_(factor), operation)
        assert torch.equal(found, expected)

    whole, found, expected = drawn(world_size * 1001), torch.zeros(7, 143), torch.zeros(7, 143)
    assert mine.run("reduce_scatter_tensor", [whole], [found], -1, reduce_op) == ""
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    reduce_scatter(expected.view(-1), whole * factor, operation)
    assert torch.equal(found, expected)

    parts = [drawn(101, seed=place) for place in range(world_size)]
    found, expected = torch.zeros(101), torch.zeros(101)
    assert mine.run("reduce_scatter", parts, [found], -1, reduce_op) == ""
    dist.reduce_scatter(expected, [part * factor for part in parts], operation)
    assert torch.equal(found, expected)

    root = world_size - 1
    found, expected = drawn(1001), drawn(1001).mul_(factor)
    assert mine.run("reduce", [found], [found] if rank == root else [], root, reduce_op) == ""
    dist.reduce(expected, root, operation)
    assert rank != root or torch.equal(found, expected)


@pytest.mark.parametrize("reduce_op", ["BAND", "BOR", "BXOR", "SUM"])
@pytest.mark.ranks(2)
def test_integers_are_reduced_by_bits_too(group, rank, reduce_op):
    found, expected = (torch.arange(6) + 3 * rank for _ in range(2))
    assert all_reduce(group(), found, reduce_op) == ""
    dist.all_reduce(expected, getattr(dist.ReduceOp, reduce_op))
    assert torch.equal(found, expected)


@pytest.mark.ranks(3)
def test_a_strided_tensor_is_reduced_as_gloo_reduces_its_memory(group):
    found, expected = (drawn(11, 13).t() for _ in range(2))
    assert all_reduce(group(), found) == ""
    dist.all_reduce(expected)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16, torch.int16, torch.complex64])
@pytest.mark.ranks(1, 2, 3)
def test_what_only_moves_does_so_in_every_dtype(group, rank, world_size, dtype):
    mine, others, root = group(), range(world_size), world_size - 1
    values = [(torch.arange(6) + 10 * one).to(dtype).view(2, 3) for one in others]

    def empty(number):
        # Dense, and in another order than the values that are moved there.
        return [torch.zeros(3, 2, dtype=dtype).t() for _ in range(number)]

    outputs = empty(world_size)
    assert mine.run("all_gather", [values[rank]], outputs) == ""
    assert all(map(torch.equal, outputs, values))

    whole = torch.zeros(2 * world_size, 3, dtype=dtype)
    assert mine.run("all_gather_into_tensor", [values[rank]], [whole]) == ""
    assert torch.equal(whole, torch.cat(values))

    outputs = empty(world_size if rank == root else 0)
    assert mine.run("gather", [values[rank]], outputs, root) == ""
    assert all(map(torch.equal, outputs, values))

    (output,) = empty(1)
    assert mine.run("scatter", values if rank == root else [], [output], root) == ""
    assert torch.equal(output, values[rank])

    (output,) = empty(1)
    broadcast = ([values[rank]], []) if rank == root else ([], [output])
    assert mine.run("broadcast", *broadcast, root) == ""
    assert rank == root or torch.equal(output, values[root])

    outputs = empty(world_size)
    assert mine.run("all_to_all", [(value + rank).to(dtype) for value in values], outputs) == ""
    assert all(torch.equal(output, (values[rank] + one).to(dtype)) for one, output in enumerate(outputs))

    assert mine.run("barrier") == ""


@pytest.mark.ranks(1, 2, 3)
def test_ranks_may_bring_tensors_of_different_sizes(group, rank, world_size):
    mine, others = group(), range(world_size)
    outputs = [torch.zeros(2 * one) for one in others]
    assert mine.run("all_gather", [torch.full((2 * rank,), float(rank))], outputs) == ""
    assert all(output.tolist() == [one] * 2 * one for one, output in enumerate(outputs))

    output = torch.zeros(rank + 1)
    assert mine.run("reduce_scatter", [torch.ones(one + 1) for one in others], [output], -1, "SUM") == ""
    assert output.tolist() == [world_size] * (rank + 1)

    # From rank i to rank j, i + 2 * j rows of two.
    given, taken = [rank + 2 * one for one in others], [one + 2 * rank for one in others]
    found, expected = torch.zeros(sum(taken), 2), torch.zeros(sum(taken), 2)
    assert mine.run("all_to_all_single", [drawn(sum(given), 2)], [found], -1, "", [*taken, *given]) == ""
    dist.all_to_all_single(expected, drawn(sum(given), 2), taken, given)
    assert torch.equal(found, expected)

    found, expected = torch.zeros(2 * world_size), torch.zeros(2 * world_size)
    assert mine.run("all_to_all_single", [drawn(2 * world_size)], [found]) == ""
    dist.all_to_all_single(expected, drawn(2 * world_size))
    assert torch.equal(found, expected)


@pytest.mark.ranks(1, 2)
def test_what_was_coalesced_completes_together_and_is_compared_whole(group, rank, world_size):
    mine = group()
    tensors = [torch.full((place + 1,), 1.0 + rank) for place in range(40)]
    assert mine.start(*(("all_reduce", [one], [one], -1, "SUM") for one in tensors)).result(SOON) == ""
    assert all(one.tolist() == [sum(range(1, world_size + 1))] * len(one) for one in tensors)


@pytest.mark.ranks(2)
def test_issuing_does_not_wait_and_collectives_keep_their_order(group, rank):
    mine, tensor = group(), torch.zeros(1)
    delay_up_to(0.01, seed=rank)
    if rank:
        time.sleep(0.2)
    done = []
    for number in range(10):
        sent = torch.tensor([float(number)])
        done.append(mine.start(("broadcast", [sent] if rank else [], [] if rank else [tensor], 1)))
    assert [one.result(SOON) for one in done] == [""] * 10
    assert rank or tensor.item() == 9


# What differs.


def _issue(group, name):
    """Issue one of these, and return its error."""
    rank, size, four, five = dist.get_rank(), dist.get_world_size(), torch.ones(4), torch.ones(5)
    fours = [four] * size

    def batch(*reduce_ops):
        return group.start(*(("all_reduce", [four], [four], -1, one) for one in reduce_ops)).result(SOON)

    def broadcast(root):
        return group.run("broadcast", [four] if rank == root else [], [] if rank == root else [four], root)

    def split(*sizes):
        return group.run("all_to_all_single", [torch.ones(size)], [torch.ones(size)], -1, "", sizes)

    return {
        "all_reduce": lambda: summed(group),
        "five elements": lambda: summed(group, 5),
        "int32": lambda: all_reduce(group, four.int()),
        "MAX": lambda: summed(group, reduce_op="MAX"),
        "broadcast": lambda: broadcast(0),
        "broadcast from 1": lambda: broadcast(1),
        "all_gather": lambda: group.run("all_gather", [four], fours),
        "all_gather into five": lambda: group.run("all_gather", [four], [five, *fours[1:]]),
        "all_gather_into_tensor": lambda: group.run("all_gather_into_tensor", [four], [torch.ones(4 * size)]),
        "reduce_scatter": lambda: group.run("reduce_scatter", fours, [four], -1, "SUM"),
        "reduce_scatter of five": lambda: group.run("reduce_scatter", [four, *[five] * (size - 1)], [four], -1, "SUM"),
        "all_to_all": lambda: group.run("all_to_all", fours, fours),
        "all_to_all of five": lambda: group.run("all_to_all", [five] * size, fours),
        "splits": lambda: split(1, 1, 1, 1),
        "no splits": lambda: split(2, 0, 2, 0),
        "batch": lambda: batch(*["SUM"] * 5),
        "batch with MAX": lambda: batch("SUM", "SUM", "SUM", "MAX", "SUM"),
        "barrier": lambda: group.run("barrier"),
        "the end": lambda: group.mover.end().result(SOON),
    }[name]()


@pytest.mark.parametrize(
    ("here", "there", "issued"),
    [
        ("all_reduce", "five elements", ["all_reduce of float32[4] by SUM", "all_reduce of float32[5] by SUM"]),
        ("all_reduce", "int32", ["all_reduce of float32[4] by SUM", "all_reduce of int32[4] by SUM"]),
        ("all_reduce", "MAX", ["all_reduce of float32[4] by SUM", "all_reduce of float32[4] by MAX"]),
        ("all_reduce", "broadcast", ["all_reduce of float32[4] by SUM", "broadcast of float32[4] from rank 0"]),
        ("broadcast", "broadcast from 1", ["broadcast of float32[4] from rank 0", "of float32[4] from rank 1"]),
        ("all_gather", "all_gather into five", ["rank 0 has 4 elements for rank 1, which takes 5"]),
        ("reduce_scatter of five", "reduce_scatter", ["rank 0 has 5 elements for rank 1, which takes 4"]),
        ("all_to_all", "all_to_all of five", ["rank 1 has 5 elements for rank 0, which takes 4"]),
        ("splits", "no splits", ["rank 0 has 1 element for rank 1, which takes 2"]),
        ("batch", "all_reduce", ["a batch of 5 (all_reduce of", "; and 2 more)"]),
        (
            "batch",
            "batch with MAX",
            ["call 4 of a batch of 5: rank 0 issues all_reduce of", "by MAX"],
        ),
        ("all_gather", "all_gather_into_tensor", ["all_gather of float32[4] into", "into float32[8]"]),
        ("all_reduce", "the end", ["issues all_reduce of float32[4] by SUM", "rank 1 is at the end of the test"]),
        ("barrier", "the end", ["rank 0 issues barrier (", "rank 1 is at the end of the test"]),
    ],
)
@pytest.mark.ranks(2)
def test_a_difference_is_an_error_on_both_ranks_with_the_text_of_both(group, rank, here, there, issued):
    mine = group()
    assert summed(mine) == ""
    error = _issue(mine, there if rank else here)
    assert error.startswith("ranks differ in collective number 2 of the default group")
    for text in (*issued, "rank 0 issues", "test_emulated_mover.py:", "in start < "):
        assert text in error
    assert "rank 1 issues" in error or "rank 1 is at" in error


@pytest.mark.ranks(3)
def test_ranks_that_issue_alike_are_named_together(group, rank):
    tensor = torch.ones(5 if rank == 1 else 4)
    error = all_reduce(group(), tensor)
    assert error.startswith("ranks differ in collective number 1 of the default group: ranks 0, 2 issue")
    assert "ranks 0, 2 issue all_reduce of float32[4] by SUM (test_emulated_mover.py:" in error
    assert ", rank 1 issues all_reduce of float32[5] by SUM (test_emulated_mover.py:" in error


@pytest.mark.ranks(3)
def test_a_group_is_called_by_its_ranks_and_ranks_are_those_of_the_default_group(group, rank):
    mine = group([1, 2], "some")
    if mine is not None:
        error = _issue(mine, "MAX" if rank == 1 else "all_reduce")
        assert "number 1 of the group of ranks 1, 2: rank 1 issues" in error


@pytest.mark.ranks(2)
def test_after_an_error_nothing_completes_any_more(group, rank):
    mine = group()
    error = summed(mine, 4 + rank)
    assert summed(mine) == error
    assert mine.mover.end().result(SOON) == error
    assert mine.start(("send", [torch.ones(1)], [], 1 - rank, "", [0])).result(SOON) == error


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda one: ("all_reduce", [one], [one], -1, "PREMUL_SUM"), "does not support reduce operation 'PREMUL_SUM'"),
        (lambda one: ("all_reduce", [one.int()], [one.int()], -1, "AVG"), "AVG does not support integers): rank"),
        (lambda one: ("reduce_scatter_tensor", [one[:3]], [one[:1]], -1, "SUM"), "3 elements cannot be divided into 2"),
        (lambda one: ("all_to_all_single", [one], [one], -1, "", [1, 2, 2, 2]), "add up to 4, not [1, 2]"),
        (lambda one: ("all_gather", [one], [one]), "needs one tensor for each of 2 ranks"),
        (lambda one: ("all_gather", [one], [one.int()] * 2), "different dtypes"),
        (lambda one: ("all_reduce_sparse", [one], [one]), "not support the collective 'all_reduce_sparse'"),
        (lambda one: ("all_reduce", [one.short()], [one.short()], -1, "SUM"), "does not reduce int16): ranks 0, 1"),
        (lambda one: ("all_reduce", [one], [one], -1, "BAND"), "BAND supports only integers"),
    ],
)
@pytest.mark.ranks(2)
def test_what_cannot_run_is_an_error_by_name(group, rank, call, expected):
    error = group().run(*call(torch.ones(4)))
    assert error.startswith("collective number 1 of the default group cannot run on rank 0 (")
    assert expected in error


@pytest.mark.ranks(2)
def test_what_one_rank_cannot_run_is_an_error_on_both(group, rank):
    tensor = torch.ones(4)
    error = group().run("reduce_scatter_tensor", [tensor[: 3 + rank]], [tensor[:2]], -1, "SUM")
    assert "cannot run on rank 0 (3 elements cannot be divided into 2 equal parts): rank 0" in error


@pytest.mark.ranks(2)
def test_texts_longer_than_the_buffer_are_compared_whole(group, rank):
    mine, tensors = group(), [torch.ones(1) for _ in range(100)]
    for last, expected in (("SUM", ""), ("MAX" if rank else "SUM", "call 100 of a batch of 100")):
        calls = [("all_reduce", [one], [one], -1, "SUM") for one in tensors]
        calls[-1] = (*calls[-1][:-1], last)
        error = mine.start(*calls).result(SOON)
        assert expected in error
        assert bool(error) == bool(expected)


# Order across groups.


@pytest.mark.ranks(3)
def test_groups_that_share_ranks_have_one_order(group, rank):
    whole, pair = group(), group([0, 1], "pair")
    assert summed(whole) == ""
    if pair is not None:
        assert summed(pair) == ""
    if rank == 0:
        first, second = pair.start(("barrier",)), whole.start(("barrier",))
    else:
        second = whole.start(("barrier",))
        first = pair.start(("barrier",)) if pair is not None else None
    error = second.result(SOON)
    assert error.startswith(
        "ranks 0 and 1 issue collectives of two groups in different orders: rank 0 first issues barrier (test_"
    )
    assert ", number 2 of the group of ranks 0, 1 and rank 1 first issues barrier (test_" in error
    assert error.endswith(", number 2 of the default group; NCCL may hang")
    if first is not None:
        assert first.result(SOON) == error


@pytest.mark.ranks(3)
def test_groups_that_share_one_rank_have_no_common_order(group, rank):
    one, other = group([0, 1], "one"), group([1, 2], "other")
    for mine in (one, other) if rank < 2 else (other, one):
        assert mine is None or summed(mine) == ""


@pytest.mark.ranks(2)
def test_a_group_that_one_rank_has_closed_is_not_compared(group, rank):
    whole, other = group(), group(name="other")
    assert summed(other) == ""
    if rank == 0:
        other.mover.close()
    assert summed(whole) == ""
    with contextlib.suppress(AssertionError):
        # A group that only this rank knows.
        group([rank], f"alone on {rank}")
    assert summed(whole) == ""


@pytest.mark.ranks(2)
def test_messages_are_not_counted(group, rank):
    whole, other = group(), group(name="other")
    tensor = torch.ones(1)
    if rank == 0:
        other.start(("send", [tensor], [], 1, "", [0]))
        assert summed(whole) == ""
    else:
        assert summed(whole) == ""
        assert other.run("recv", [], [tensor], 0, "", [0]) == ""


@given(st.lists(st.sampled_from("ab"), max_size=8))
def test_one_order_of_two_groups_is_no_difference_and_any_other_is_one(order):
    keys = {"a": "0:0,1", "b": "1:0,1"}

    def entries(rank, names):
        issued = {"a": 0, "b": 0}
        for name in names:
            issued[name] += 1
            (other,) = {"a", "b"} - {name}
            before = {keys[other]: issued[other]}
            yield name, Entry(rank, issued[name], (describe(Call("barrier", [], []), rank, [0, 1]),), "", before)

    def difference(one, other):
        # As each group pairs them: the n-th of one rank with the n-th of the other.
        for name in "ab":
            here, there = (
                [entry for where, entry in entries(rank, names) if where == name]
                for rank, names in ((0, one), (1, other))
            )
            if any(find_difference(keys[name], pair) for pair in zip(here, there, strict=True)):
                return True
        return False

    for other in set(permutations(order)) if len(order) < 6 else {tuple(order), tuple(reversed(order))}:
        assert difference(tuple(order), other) == (tuple(order) != other)


def test_what_a_rank_describes_survives_its_message():
    call = Call("all_gather", [torch.ones(2)], [torch.ones(2), torch.ones(3)])
    entry = Entry(1, 3, (describe(call, 0, [1, 2]),), "test_x.py:1 in test_x", {"0:0,1": 2})
    again = Entry.from_message(entry.to_message())
    assert find_difference("x:1,2", [entry, again]) == find_difference("x:1,2", [again, entry])
    assert again == entry


def test_ends_of_tests_belong_together():
    assert find_difference("0:0,1", [Entry(rank, 4, (end_of("the end of the test"),), "") for rank in range(2)]) is None


def test_a_message_differs_by_dtype_elements_or_tag():
    sent = Message(0, "float32[2, 2]", "float32", 4, 0, "a.py:1 in f")
    assert find_other_message("0:0,1", sent, Message(1, "float32[4]", "float32", 4, 0, "b.py:2 in g")) is None
    text = find_other_message("0:0,1", sent, Message(1, "int32[4]", "int32", 4, 0, "b.py:2 in g"))
    assert text == (
        "rank 0 sends float32[2, 2] (a.py:1 in f), and rank 1 receives it as int32[4] (b.py:2 in g),"
        " in the default group"
    )
    text = find_other_message("0:0,1", sent, Message(1, "float32[4]", "float32", 4, 7, "b.py:2 in g"))
    assert "with tag 0, which NCCL ignores, and with tag 7 as float32[4]" in text


# Ranks that do not come.


@pytest.mark.ranks(3)
def test_a_rank_that_does_not_come_is_named_after_the_timeout(group, rank):
    mine = group(timeout=2)
    assert summed(mine) == ""
    if rank == 2:
        # It neither ends nor destroys the group.
        dist.barrier()
        return
    error = _issue(mine, "MAX")
    assert error.startswith(f"rank {rank}: all_reduce of float32[4] by MAX (test_emulated_mover.py:")
    assert ", collective number 2 of the default group, lacks a rank: rank 2 has not come (its latest is" in error
    assert "collective number 1 of the default group); ranks 0, 1 have come; gloo: " in error
    assert summed(mine) == error
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_rank_that_comes_too_late_is_told_why(group, rank):
    mine = group(timeout=1)
    if rank == 0:
        assert "rank 1 has not come (it has issued none); rank 0 has come; gloo: Timed out" in summed(mine)
    else:
        time.sleep(2)
        assert "rank 0 has stopped: rank 0: all_reduce of float32[4]" in summed(mine)


@pytest.mark.ranks(1, 2)
def test_ranks_that_end_together_go_on(group):
    mine = group()
    for _ in range(2):
        assert summed(mine) == ""
        assert mine.mover.end().result(SOON) == ""


@pytest.mark.ranks(2)
def test_a_rank_that_has_destroyed_the_group_need_not_end(group, rank):
    mine = group()
    assert summed(mine) == ""
    if rank == 0:
        mine.mover.close()
        assert mine.mover.end().result(SOON) == ""
    else:
        assert mine.mover.end().result(SOON) == ""


@pytest.mark.ranks(2)
def test_a_rank_that_destroys_the_group_too_early_is_named(group, rank):
    mine = group()
    if rank == 0:
        mine.mover.close()
    else:
        assert "lacks a rank: rank 0 has destroyed the group (it has issued none); rank 1 has come" in summed(mine)


@pytest.mark.ranks(1, 2)
def test_closing_lets_what_is_queued_complete(group):
    mine = group()
    delay_up_to(0.05, seed=3)
    queued = [mine.start(("barrier",)) for _ in range(5)]
    assert mine.mover in live_movers()
    mine.mover.close()
    mine.mover.close()
    assert mine.mover not in live_movers()
    with pytest.raises(RuntimeError, match="the default group is destroyed"):
        mine.mover.issue(99, [_whole("barrier")], [])
    assert [one.result(SOON) for one in queued] == [""] * 5
    for thread in threading.enumerate():
        if thread.name == "ranks-harness-emulated-collectives":
            thread.join(SOON)
    assert mine.mover._transfer is None


# Messages.


def _messages(tensor, to, received, source):
    return ("send", [tensor], [], to, "", [0]), ("recv", [], [received], source, "", [0])


@pytest.mark.ranks(2, 3)
def test_batches_of_messages_go_both_ways(group, rank, world_size):
    mine, after, before = group(), (rank + 1) % world_size, (rank - 1) % world_size
    received = torch.zeros(3, 2).t()
    sends = _messages(torch.full((2, 3), float(rank)), after, received, before)
    # Ranks put them into different orders, as they may within a batch.
    assert mine.start(*(sends if rank % 2 else reversed(sends))).result(SOON) == ""
    assert received.tolist() == [[before] * 3] * 2


@pytest.mark.ranks(2)
def test_messages_without_a_batch_keep_their_order_and_block_nothing(group, rank):
    mine, received = group(), [torch.zeros(1000) for _ in range(5)]
    sent = [mine.start(("send", [torch.full((1000,), float(n))], [], 1 - rank, "", [n])) for n in range(5)]
    assert summed(mine) == ""
    got = [mine.start(("recv", [], [one], 1 - rank, "", [n])) for n, one in enumerate(received)]
    assert [one.result(SOON) for one in sent + got] == [""] * 10
    assert [one[0].item() for one in received] == list(range(5))


@pytest.mark.ranks(2)
def test_empty_messages_and_every_dtype_arrive(group, rank):
    mine = group()
    for tensor in (torch.ones(0), torch.tensor(True), torch.tensor([1j, 2]), torch.ones(3, dtype=torch.bfloat16)):
        received = torch.zeros_like(tensor)
        assert mine.start(*_messages(tensor, 1 - rank, received, 1 - rank)).result(SOON) == ""
        assert torch.equal(received, tensor)


@pytest.mark.parametrize(
    ("tensor", "tag", "as_what"),
    [(torch.ones(5), 0, "as float32[5]"), (torch.ones(4).int(), 0, "as int32[4]"), (torch.ones(4), 3, "tag 3 as")],
)
@pytest.mark.ranks(2)
def test_another_message_than_expected_is_an_error_with_both_call_sites(group, rank, tensor, tag, as_what):
    mine = group()
    if rank == 0:
        assert mine.run("send", [torch.ones(4)], [], 1, "", [0]) == ""
        error = summed(mine)
        assert "lacks a rank: rank 1 has stopped: rank 1: rank 0 sends float32[4]" in error
    else:
        error = mine.run("recv", [], [tensor], 0, "", [tag])
        assert error.startswith("rank 1: rank 0 sends float32[4] (test_emulated_mover.py:")
        assert error.endswith("in the default group")
    assert as_what in error
    assert error.count("(test_emulated_mover.py:") >= 2


@pytest.mark.ranks(2)
def test_a_rank_that_stops_does_not_leave_others_waiting_for_its_messages(group, rank):
    mine, received = group(), torch.zeros(1)
    awaited = mine.start(("recv", [], [received], 0, "", [0])) if rank else None
    assert "ranks differ in collective number 1" in summed(mine, 4 + rank)
    assert awaited is None or "ranks differ in collective number 1" in awaited.result(SOON)


@pytest.mark.ranks(1, 2)
def test_a_message_to_oneself_is_an_error(group, rank):
    error = group().run("send", [torch.ones(4)], [], rank, "", [0])
    assert error.startswith(f"rank {rank}: send of float32[4] to rank {rank} (test_emulated_mover.py:")
    assert error.endswith("in the default group is to this rank")


@pytest.mark.ranks(2)
def test_messages_and_collectives_in_one_batch_are_an_error(group, rank):
    tensor = torch.ones(1)
    calls = [("all_reduce", [tensor], [tensor], -1, "SUM"), ("send", [tensor], [], 1 - rank, "", [0])]
    assert "does not support the collective 'send'" in group().start(*calls).result(SOON)
