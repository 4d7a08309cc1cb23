"""Reports, from a thread of its own, what the other threads of this rank wait for, and which operations were issued.

Runs in workers only. A thread counts as waiting for other ranks only if that is certain: it is inside a wait that
`zeroshard_testing.wait_recorder` has recorded and that does not time out before the test does, or inside native code of
torch that is known to wait there. A thread that only seems idle may continue.

Frames of other threads are read only while a test runs and a wait, a collective or a new group of this process is
recorded, after every other thread was seen to sleep in the kernel; see `zeroshard_testing.stacks.frames_of_threads`.
"""

from __future__ import annotations

import _thread
import functools
import importlib
import math
import os
import signal
import sys
import threading
from collections import Counter
from concurrent.futures import thread as _pool_threads
from pathlib import Path
from time import monotonic, time
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # not an explicit export

from zeroshard_testing import _torch_private as private
from zeroshard_testing.rank_state import Awaited, GroupState, Messages, RankState, group_key, group_label
from zeroshard_testing.stacks import OWN_CODE, OWN_THREADS, frames_of_threads, python_stacks
from zeroshard_testing.wait_recorder import ANY_SOURCE, Wait, WaitRecorder

# Seconds until a finished rank reports its latest collectives without a request, because others may hang in them.
_SETTLING_TIME = 0.5

_TASKS = Path("/proc/self/task")

NOTHING: tuple[tuple[Awaited, ...], str] = ((), "")
"""The state of a rank with a thread that may continue: it waits for nothing."""


class RankInspector:
    """Reports the state of the rank. A worker has one; its main thread begins and ends tests, any thread may ask.

    Times are on the flight recorder's clock, seconds since the epoch, except for the deadline, which is on the
    monotonic clock.
    """

    def __init__(self, waits: WaitRecorder) -> None:
        self._waits = waits
        self.run = -1
        """The run number of the latest test."""
        self._threads_before: tuple[set[threading.Thread], int] = set(), 0
        self._switches: dict[threading.Thread, str] = {}
        self._destroyed: dict[str, GroupState] = {}
        self._made_anew: Counter[str] = Counter()
        self._place = (0, 0)
        self._timeout = 0.0
        self._deadline = 0.0
        self._began = 0.0
        self._ended: float | None = 0.0

    def begin(self, run: int, timeout: float, rank: int, world_size: int) -> None:
        """Record that a test begins, with its timeout in seconds and its number of ranks."""
        if self.run < 0:
            self._threads_before = _other_threads()
        self._switches = {thread: _switches(thread) for thread in _other_threads()[0] - self._threads_before[0]}
        self._place = (rank, world_size)
        self._waits.begin_test()
        self.run = run
        self._timeout = timeout
        self._deadline = monotonic() + timeout
        self._destroyed = {}
        self._made_anew = Counter()
        self._began = time()
        self._ended = None

    def end(self) -> None:
        """Record that the test has ended."""
        self._ended = time()

    def look(self, run: int, *, details: bool) -> RankState:
        """Return the state of the rank in a test, which is unknown for any test but the latest.

        Details are the stacks of a rank that is known to wait, and the latest collectives also of a rank that does not
        wait or has just finished.
        """
        if run != self.run:
            return RankState(importing=None)
        begun = dict(self._waits.begun)
        if self._ended is not None:
            # A collective that has not reached another rank by then never will, even if the machine is busy.
            is_settled = time() - self._ended > _SETTLING_TIME
            groups = self.groups(self._recorded() if details or is_settled else None)
            finished = not self._waits.callbacks and not self._threads_left()
            return RankState(finished, groups=groups, begun=begun)
        sleeps = _sleeps()
        recorded = self._recorded() if sleeps or details else []
        is_known_to_wait = sleeps and self._is_on_record(recorded)
        awaited, fingerprint = self._waiting() if is_known_to_wait else NOTHING
        if not awaited and not details:
            return RankState(importing=_imports())
        if any(one.operation.pending and one.created + one.timeout < self._began + self._timeout for one in recorded):
            # It ends at its own timeout, before the test's.
            awaited, fingerprint = NOTHING
        stacks = python_stacks() if details and is_known_to_wait else ""
        return RankState(False, awaited, fingerprint, self.groups(recorded), stacks, begun=begun)

    def groups(self, recorded: list[private.Recorded] | None) -> dict[str, GroupState]:
        """Return the record of each process group, with operations only if the recorder's entries are passed.

        If the default group does not number the ranks as the test does, only destroyed groups are returned.
        """
        world = dist.group.WORLD
        if world is not None and (world.rank(), world.size()) != self._place:
            return self._destroyed
        states = {}
        for group in (*private.process_groups(), *self._waits.unlisted()):
            try:
                key = self._key_of(group)
                states[key] = self._of_group(key, group, recorded)
            except (RuntimeError, KeyError, ValueError, AttributeError):
                # The group is being made or destroyed, or its backend does not count operations.
                continue
        return {**self._destroyed, **states}

    def keep_destroyed_groups(self) -> None:
        """Wrap the function that destroys groups, so that their operations still count. Call it once."""
        destroy = dist.destroy_process_group

        @functools.wraps(destroy)
        def destroy_process_group(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as the wrapped function
            before = self.groups(self._recorded()) if self._ended is None else {}
            destroy(*args, **kwargs)
            for key in before.keys() - self.groups(None).keys() - self._destroyed.keys():
                self._destroyed[key] = before[key]
                self._made_anew[key.rpartition(" ")[2]] += 1

        dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = destroy_process_group

    def _key_of(self, group: dist.ProcessGroup) -> str:
        """Return the key of a group, equal on all its ranks. It has a number if a destroyed group had the same name."""
        key = group_key(group.group_name, _ranks_of(group))
        number = self._made_anew[key]
        return f"{number} {key}" if number else key

    def _of_group(self, key: str, group: dist.ProcessGroup, recorded: list[private.Recorded] | None) -> GroupState:
        record = self._waits.of_group(group)
        issued = self._waits.collectives_in(group)
        here = [one for one in recorded or () if one.group == group.group_name and not record.unlisted]
        # It is unknown how collectives of C++ ended whose timeout has passed.
        late = time() if self._ended is None else self._ended
        expired = {one.number for one in here if one.created + one.timeout < late} - record.collectives.keys()
        return GroupState(
            group_label(key, dist.get_world_size()),
            _ranks_of(group),
            issued,
            operations={} if recorded is None else record.latest_collectives(here),
            messages={
                f"{kind} {_rank_of(peer, group)} {tag}": Messages(one.count, tuple(one.latest))
                for (kind, peer, tag), one in record.messages.items()
            },
            # Unknown if C++ has issued an operation.
            checksum=record.checksum if record.numbers == issued else None,
            failed=min(record.failed_collectives | expired, default=0),
            messages_failed=record.failed_messages,
        )

    def _recorded(self) -> list[private.Recorded]:
        """Return the flight recorder's entries of this test."""
        try:
            return private.recorded(self._began)
        except (RuntimeError, ValueError, AttributeError, KeyError, TypeError):
            # The header of the run reports that.
            return []

    def _threads_left(self) -> bool:
        """Return True if a thread may still issue an operation: it is new since the test began, or has run since.

        Threads from before the first test, such as a conftest's, do not count.
        """
        threads, others = _other_threads()
        before, others_before = self._threads_before
        has_run = (self._switches.get(thread) != _switches(thread) for thread in threads - before)
        return others > others_before or any(has_run)

    def _is_on_record(self, recorded: list[private.Recorded]) -> bool:
        """Return True if a wait, a new group, or an issued or pending collective of this rank is recorded."""
        on_record = [*self._waits.current.values(), *self._waits.issuing.values(), *self._waits.making.values()]
        return any(each is not None for each in on_record) or any(one.operation.pending for one in recorded)

    def _waiting(self) -> tuple[tuple[Awaited, ...], str]:
        """Return what all threads wait for, with a fingerprint; an empty result if one of them may continue."""
        waits = dict(self._waits.current)
        awaited: list[Awaited] = []
        marks: list[str] = []
        native: list[threading.Thread] = []
        threads = {thread.ident: thread for thread in threading.enumerate()}
        for ident, doing in _what_threads_do().items():
            thread = threads.get(ident)
            if _is_own(thread):
                continue
            wait = waits.get(ident)
            if wait is not None:
                found = self._awaited(wait)
                if found is None:
                    return NOTHING
                awaited.append(found)
                marks.append(f"wait {wait.serial}")
            elif doing.waits_natively and thread is not None:
                what, until = self._waits.making.get(ident, (Awaited("collective"), None))
                # With torch's debug level DETAIL, ranks wait inside of the call, before the flight recorder records it.
                within = self._waits.issuing.get(ident)
                if (until or math.inf) < self._deadline or (within and private.timeout_of(within) < self._timeout):
                    return NOTHING
                native.append(thread)
                awaited.append(what)
            elif not doing.is_idle or (thread is threading.main_thread() and _has_signal_handlers()):
                return NOTHING
        if native:
            still = _stillness(native)
            if still is None:
                return NOTHING
            marks.append(still)
        return tuple(awaited), "; ".join(marks)

    def _awaited(self, wait: Wait) -> Awaited | None:
        if wait.until is not None and wait.until < self._deadline:
            return None
        if _is_done(wait.owner):
            # The thread continues when it gets a processor; another collective may be pending forever.
            return None
        if isinstance(wait.owner, Store):
            return None if _is_there(wait) else Awaited("store")
        issued = wait.issued
        if issued is None or issued.kind == "collective":
            return Awaited("collective")
        group = issued.group()
        if group is None:
            return None
        try:
            return Awaited(issued.kind, self._key_of(group), _rank_of(issued.peer, group), issued.tag, issued.number)
        except (KeyError, ValueError):
            return None


def _ranks_of(group: dist.ProcessGroup) -> list[int]:
    """Return the members of a group, as ranks of the default group; KeyError if they are unknown."""
    try:
        return dist.get_process_group_ranks(group)
    except KeyError:
        # torch does not list the group.
        if group.size() != dist.get_world_size():
            raise
        return list(range(group.size()))


def _rank_of(peer: int, group: dist.ProcessGroup) -> int:
    """Return a rank of a group as a rank of the default group."""
    return peer if peer == ANY_SOURCE else _ranks_of(group)[peer]


def _imports() -> bool:
    """Return True if the main thread is importing a module.

    Python locks each module during its import. The list of these locks is private; without it no clock is stopped.
    """
    locks = getattr(importlib._bootstrap, "_module_locks", {})
    main = threading.main_thread().ident
    return any(getattr(lock(), "owner", None) == main for lock in list(locks.values()))


def _is_own(thread: threading.Thread | None) -> bool:
    """Return True for a thread of the harness."""
    return thread is not None and thread.name.startswith(OWN_THREADS)


def _other_threads() -> tuple[set[threading.Thread], int]:
    """Return the threads except the main one and the harness's own, and the number that `threading` does not list."""
    # A dummy represents a thread of C++, which may have ended.
    known = {thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    known.discard(threading.main_thread())
    return {thread for thread in known if not _is_own(thread)}, _thread._count() - len(known)


class _Doing(NamedTuple):
    """The state of a thread: whether it is in native code of torch that waits for other ranks, or idle."""

    waits_natively: bool
    is_idle: bool


def _what_threads_do() -> dict[int, _Doing]:
    """Return the states of all other threads. Keeps no frames, which would keep objects of a test alive."""
    with frames_of_threads() as frames:
        return {ident: _Doing(_waits_natively(frame), _is_idle(frame)) for ident, frame in frames.items()}


def _waits_natively(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    if path.startswith(OWN_CODE):
        # The frame is a wrapper of the called function.
        return frame.f_back is not None and _waits_natively(frame.f_back)
    return path.startswith(private.WAITING_CODE) and not path.startswith(private.NEVER_WAITING_CODE)


def _is_done(owner: object) -> bool:
    """Return True if a thread waits for a work or future that has completed."""
    ask = getattr(owner, "is_completed", None) or getattr(owner, "done", None)
    return ask is not None and bool(ask())


def _is_there(wait: Wait) -> bool:
    """Return True if the keys for which a thread waits have been set, or may have been."""
    keys = wait.arguments[0] if wait.arguments else []
    try:
        # The waiting thread holds the lock of its connection.
        return bool(wait.owner.clone().check([keys] if isinstance(keys, str) else list(keys)))
    except (RuntimeError, AttributeError, TypeError):
        return True


def has_children() -> bool:
    """Return True if a child of this process still runs, or may run: only Linux says."""
    try:
        return any((task / "children").read_text().strip() for task in Path("/proc/self/task").iterdir())
    except OSError:
        return True


def _has_signal_handlers() -> bool:
    """Return True if a signal may run code in the main thread."""
    handlers = map(signal.getsignal, signal.valid_signals())
    return any(callable(found) and found is not signal.default_int_handler for found in handlers)


def _is_idle(frame: FrameType) -> bool:
    """Return True if a thread waits without a timeout for another thread of this process."""
    path, name = frame.f_code.co_filename, frame.f_code.co_name
    if path == threading.__file__:
        if name == "wait":
            return frame.f_locals.get("timeout", 0) is None
        return name in ("join", "_wait_for_tstate_lock") and frame.f_locals.get("timeout") in (None, -1)
    return path == _pool_threads.__file__ and name == "_worker"


def _sleeps() -> bool:
    """Return True if every other thread of this process sleeps in the kernel; only Linux says."""
    if not sys.platform.startswith("linux"):
        return False
    others = {task.name for task in _TASKS.iterdir()} - {str(threading.get_native_id())}
    try:
        return all(_kernel_status(task)["State"].startswith("S") for task in others)
    except (OSError, ValueError, KeyError):
        # The thread is starting or ending.
        return False


def _kernel_status(thread: int | str | None) -> dict[str, str]:
    """Return the kernel's status of a thread of this process, by its native id."""
    lines = (_TASKS / str(thread) / "status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def _switches(thread: threading.Thread) -> str:
    """Return the number of context switches of a thread, which changes whenever it runs; empty if unknown."""
    # In a forked process, the attribute of the main thread still has the value of the parent.
    native_id = os.getpid() if thread is threading.main_thread() else thread.native_id
    try:
        status = _kernel_status(native_id)
    except OSError:
        return ""
    return f"{status['voluntary_ctxt_switches']} {status['nonvoluntary_ctxt_switches']}"


def _stillness(threads: list[threading.Thread]) -> str | None:
    """Return a value that is constant while these threads sleep; None unless all threads of the process sleep.

    A device may wake a thread without this process, so with CUDA the result is None.
    """
    if torch.cuda.is_initialized() or not _sleeps():
        return None
    counts = {thread.ident: _switches(thread) for thread in threads}
    return (
        ", ".join(f"thread {ident}: {count}" for ident, count in sorted(counts.items()))
        if all(counts.values())
        else None
    )
