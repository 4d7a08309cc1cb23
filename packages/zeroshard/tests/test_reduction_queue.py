"""The queue finishes reductions in order, in a thread that lives only while there are any."""

from __future__ import annotations

import threading
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from zeroshard.grads.stream import ReductionQueue


def made() -> ReductionQueue:
    return ReductionQueue(0, torch.device("cpu"), uses_thread=True)


def add(queue: ReductionQueue, finish: Callable[[], None]) -> mock.MagicMock:
    work = mock.MagicMock()
    queue.add(finish, work)
    return work


def test_reductions_are_finished_in_order_in_another_thread() -> None:
    queue = made()
    seen: list[tuple[int, bool]] = []
    for number in range(100):
        add(queue, lambda number=number: seen.append((number, threading.current_thread() is threading.main_thread())))
    queue.drain()
    assert seen == [(number, False) for number in range(100)]


def test_each_is_closed_once() -> None:
    queue = made()
    works = [add(queue, lambda: None) for _ in range(5)]
    queue.drain()
    assert [work.close.call_count for work in works] == [1] * 5


def test_no_thread_is_left_when_there_is_nothing_to_do() -> None:
    before = threading.active_count()
    queue = made()
    for _ in range(20):
        add(queue, lambda: None)
        queue.drain()
        assert threading.active_count() == before


def test_the_first_error_is_raised_once_and_the_others_are_finished() -> None:
    queue = made()
    seen: list[int] = []
    for number in range(4):
        add(queue, lambda number=number: seen.append(1 // (number % 2)))
    with pytest.raises(ZeroDivisionError):
        queue.drain()
    assert seen == [1, 1]
    queue.drain()


def test_reductions_may_be_added_while_others_are_finished() -> None:
    queue = made()
    done: list[int] = []
    has_begun, is_added = threading.Event(), threading.Event()

    def first() -> None:
        has_begun.set()
        assert is_added.wait(10)
        done.append(0)

    add(queue, first)
    assert has_begun.wait(10)
    add(queue, lambda: done.append(1))
    is_added.set()
    queue.drain()
    assert done == [0, 1]


def test_draining_an_idle_queue_is_a_no_op() -> None:
    made().drain()


def test_without_a_thread_all_but_the_last_few_are_finished_by_adding() -> None:
    queue = ReductionQueue(0, torch.device("cpu"), uses_thread=False)
    done: list[int] = []
    for number, leave in enumerate((None, 1, None, 0)):
        queue.add(lambda number=number: done.append(number), mock.MagicMock(), leave=leave)
        assert done == {0: [], 1: [0], 2: [0], 3: [0, 1, 2, 3]}[number]
    queue.drain()
    assert done == [0, 1, 2, 3]


def test_a_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = made()
    done: list[int] = []

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for number in range(2):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                add(queue, lambda number=number: done.append(number))
    # In a thread of its own, for it may wait forever.
    drained = threading.Thread(target=queue.drain, daemon=True)
    drained.start()
    drained.join(5)
    assert not drained.is_alive()
    add(queue, lambda: done.append(2))
    queue.drain()
    # Whoever was told that a reduction could not be taken in does not expect it to be finished later.
    assert done == [2]
