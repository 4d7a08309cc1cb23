"""Looks at the threads of a rank, which must not disturb them: its own process is all that they run in."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from zeroshard_testing import rank_inspector
from zeroshard_testing.faults import Faults
from zeroshard_testing.rank_inspector import RankInspector
from zeroshard_testing.stacks import dumped_stack, frames_of_threads
from zeroshard_testing.wait_recorder import WaitRecorder

LOOKS = 10_000
# A collection may begin wherever something is allocated, also in a look, and destructors let other threads go on.
BUSY_RANK = """
import _thread, gc, json, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from zeroshard_testing.faults import Faults
from zeroshard_testing.rank_inspector import RankInspector
from zeroshard_testing.wait_recorder import record_waits
from zeroshard_testing.worker import _look


class Garbage:
    def __init__(self, group=None):
        self.itself, self.group = self, group

    def __del__(self):
        if threading.current_thread() is looking:
            time.sleep(0.0001)


def look():
    global looks, read_between, unobserved
    for looks in range(1, int(sys.argv[1]) + 1):
        # So that the tests get on, too.
        time.sleep(0.0002)
        before, run = reads, inspector.run
        ended = inspector._ended
        state = _look(inspector, run, details=looks % 100 == 0)
        unobserved += "could not be observed" in state.stacks
        if ended is not None and (run, ended) == (inspector.run, inspector._ended):
            read_between += reads - before


def current_frames():
    global reads
    reads += 1
    Garbage()
    return read_frames()


def compute(depth=0):
    values = [[depth], {depth: depth}]
    return compute(depth + 1) if depth < run % 12 else values


def compute_until_told():
    while not told.is_set():
        compute()


looks = reads = read_between = unobserved = run = 0
read_frames, sys._current_frames = sys._current_frames, current_frames
inspector = RankInspector(record_waits(Faults(None)))
inspector.keep_destroyed_groups()
# What is loaded is no garbage.
gc.freeze()
gc.set_threshold(3)
sys.setswitchinterval(0.0001)
looking = threading.Thread(target=look, name="ranks-harness-reader", daemon=True)
# As a conftest may do.
threading.Thread(target=threading.Event().wait, daemon=True).start()
inspector.begin(run, 60.0, 0, 1)
looking.start()
while looking.is_alive():
    run += 1
    inspector.begin(run, 60.0, 0, 1)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=30))
    group = dist.new_group([0], timeout=timedelta(seconds=20))

    def wait():
        try:
            store.wait(["missing"], timedelta(milliseconds=3))
        except dist.DistStoreError:
            dist.all_reduce(torch.ones(1))

    # At first threads that compute, and then only such as wait.
    told = threading.Event()
    threads = [threading.Thread(target=compute_until_told) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.002)
    told.set()
    for thread in [*threads, threading.Thread(target=wait)]:
        if not thread.ident:
            thread.start()
        thread.join()
    dist.destroy_process_group()
    Garbage(group)
    del group
    inspector.end()
left = [inspector._threads_left()]
pool = ThreadPoolExecutor(1)
pool.submit(int).result()
left.append(inspector._threads_left())
time.sleep(0.2)
inspector.begin(run + 1, 60.0, 0, 1)
left.append(inspector._threads_left())
pool.submit(int).result()
left.append(inspector._threads_left())
inspector.begin(run + 2, 60.0, 0, 1)
runs, lock = threading.Event(), threading.Lock()
lock.acquire()
_thread.start_new_thread(lambda: (runs.set(), lock.acquire()), ())
runs.wait()
left.append(inspector._threads_left())
found = {"looks": looks, "tests": run, "reads": reads, "between": read_between, "unobserved": unobserved, "left": left}
print(json.dumps(found))
"""


def test_a_rank_outlives_looks_while_threads_and_groups_begin_and_end() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", BUSY_RANK, str(LOOKS)],
        # Each look reads the whole flight recorder.
        env={**os.environ, "TORCH_FR_BUFFER_SIZE": "16"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["looks"] == LOOKS
    assert found["tests"] > 10
    # Frames are read while the process waits, and never between tests.
    assert found["reads"] > 0
    assert found["between"] == 0
    assert found["unobserved"] == 0
    # None; an executor that the test has started; one that was idle in the test; one that it has used; and a thread
    # that `threading` does not know.
    assert found["left"] == [False, True, False, True, True]


def test_no_frame_is_read_while_a_thread_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    inspector = RankInspector(WaitRecorder(Faults(None)))  # type: ignore[arg-type]  # nothing strikes
    inspector.begin(1, 60.0, 0, 1)
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            pass

    def refuse() -> None:
        raise AssertionError("the frames of all threads were asked for")

    # While one runs, the other may sleep until it gets the lock of the interpreter.
    threads = [threading.Thread(target=compute) for _ in range(2)]
    for thread in threads:
        thread.start()
    monkeypatch.setattr(sys, "_current_frames", refuse)
    inspector._waits.current[0] = object()
    try:
        assert inspector.look(1, details=True).stacks == ""
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_collection_is_held_off_while_frames_are_read_and_what_a_test_has_set_stays() -> None:
    thresholds = gc.get_threshold()
    gc.disable()
    try:
        with frames_of_threads() as frames:
            assert threading.get_ident() not in frames
            assert sys.version_info >= (3, 12) or gc.get_threshold()[0] == 0
            gc.enable()
        assert gc.isenabled()
    finally:
        gc.enable()
    assert gc.get_threshold() == thresholds


def test_an_import_of_the_main_thread_is_told_and_of_another_is_not(tmp_path: Path) -> None:
    path = tmp_path / "imported_slowly.py"
    path.write_text("from zeroshard_testing.rank_inspector import _imports\nfound = _imports()\n")
    sys.path.insert(0, str(tmp_path))
    try:
        import imported_slowly

        assert imported_slowly.found
        del sys.modules["imported_slowly"]
        thread = threading.Thread(target=__import__, args=["imported_slowly"])
        thread.start()
        thread.join()
        assert not sys.modules["imported_slowly"].found
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("imported_slowly", None)
    assert not rank_inspector._imports()


def test_a_stack_that_a_signal_handler_has_written_reads_as_any_other(tmp_path: Path) -> None:
    test = tmp_path / "test_it.py"
    test.write_text("def test_it():\n    wait()\n")
    text = (
        'Stack (most recent call first):\n  File "/x/old.py", line 9 in old\n\n'
        'Stack (most recent call first):\n  File "/x/torch/it.py", line 7 in wait\n'
        f'  File "{test}", line 2 in test_it\n'
        '  File "/x/zeroshard_testing/worker.py", line 5 in _serve\n'
    )
    expected = f'  File "{test}", line 2, in test_it\n    wait()\n  File "/x/torch/it.py", line 7, in wait'
    assert dumped_stack(text) == expected
    assert dumped_stack("Stack (most recent call first):\n  <no Python frame>\n") == ""
