"""The worker runs jobs in order, in a thread that lives only while there are any."""

from __future__ import annotations

import threading
import time

import pytest
from zeroshard.grads.stream import Worker


def test_jobs_run_in_order_in_another_thread() -> None:
    worker = Worker("test")
    seen: list[tuple[int, bool]] = []
    for number in range(100):
        worker.submit(
            lambda number=number: seen.append((number, threading.current_thread() is threading.main_thread()))
        )
    worker.drain()
    assert seen == [(number, False) for number in range(100)]


def test_no_thread_is_left_when_there_is_nothing_to_do() -> None:
    before = threading.active_count()
    worker = Worker("test")
    for _ in range(20):
        worker.submit(lambda: None)
        worker.drain()
        assert threading.active_count() == before


def test_the_first_error_is_raised_once_and_the_other_jobs_are_run() -> None:
    worker = Worker("test")
    seen: list[int] = []
    for number in range(4):
        worker.submit(lambda number=number: seen.append(1 // (number % 2)))
    with pytest.raises(ZeroDivisionError):
        worker.drain()
    assert seen == [1, 1]
    worker.drain()


def test_jobs_may_come_while_others_run() -> None:
    worker = Worker("test")
    done: list[int] = []

    def slow() -> None:
        time.sleep(0.01)
        done.append(0)

    worker.submit(slow)
    time.sleep(0.005)
    worker.submit(lambda: done.append(1))
    worker.drain()
    assert done == [0, 1]


def test_draining_an_idle_worker_is_a_no_op() -> None:
    Worker("test").drain()


def test_a_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker("test")
    done: list[int] = []

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for number in range(2):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                worker.submit(lambda number=number: done.append(number))
    # In a thread of its own, for it may wait forever.
    drained = threading.Thread(target=worker.drain, daemon=True)
    drained.start()
    drained.join(5)
    assert not drained.is_alive()
    worker.submit(lambda: done.append(2))
    worker.drain()
    # Whoever was told that a job could not be begun does not expect it to be run later.
    assert done == [2]
