"""Tells what this rank is doing, from a thread of its own: what its other threads wait for, and what was issued.

Runs in workers only. A thread counts as waiting for other ranks only if that is certain: it is inside a wait that
`zeroshard_testing.wait_recorder` has on record and that will not give up before the test's time is up, or inside native
code of torch that is known to wait there. A thread that merely seems idle may continue.

Frames of other threads are read only while a test runs and a wait, a collective or a new group of this process is on
record, after every other thread was seen to sleep in the kernel; see `zeroshard_testing.stacks.frames_of_threads`.
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
from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports it unseen

from zeroshard_testing import _torch_private as private
from zeroshard_testing.rank_state import Awaited, GroupState, Messages, RankState, group_key, group_label
from zeroshard_testing.stacks import OWN_CODE, OWN_THREADS, frames_of_threads, python_stacks
from zeroshard_testing.wait_recorder import ANY_SOURCE, Wait, WaitRecorder

# Seconds until a rank that has finished tells its latest collectives unasked, since others may be stuck in them.
_SETTLING_TIME = 0.5

_TASKS = Path("/proc/self/task")

NOTHING: tuple[tuple[Awaited, ...], str] = ((), "")
"""Nothing is awaited: some thread may continue."""


class RankInspector:
    """Tells what the rank is doing. One per worker; the main thread begins and ends tests, any thread may look.

    Times are on the flight recorder's clock, seconds since the epoch, except for the deadline, which is on the
    monotonic clock.
    """

    def __init__(self, waits: WaitRecorder) -> None:
        self._waits = waits
        self.run = -1
        """The number of the latest test."""
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
        """Say that a test begins, which may take that many seconds, on one of so many ranks."""
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
        """Say that the test has ended."""
        self._ended = time()

    def look(self, run: int, *, details: bool) -> RankState:
        """Return what the rank is doing now in a test; nothing is known of any but the latest.

        Details are stacks, if the rank is known to wait, and the latest collectives also of a rank that is not waiting,
        or has just finished.
        """
        if run != self.run:
            return RankState(importing=None)
        begun = dict(self._waits.begun)
        if self._ended is not None:
            # What has not reached another rank by then, because the machine is busy, never will.
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
            # It will end by its own timeout within the test's time.
            awaited, fingerprint = NOTHING
        stacks = python_stacks() if details and is_known_to_wait else ""
        return RankState(False, awaited, fingerprint, self.groups(recorded), stacks, begun=begun)

    def groups(self, recorded: list[private.Recorded] | None) -> dict[str, GroupState]:
        """Return what was issued in each process group, without operations unless the recorder's entries are given.

        Of groups that were destroyed alone, if the default group does not number the ranks as the test does.
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
                # A group that is just being made or destroyed, or whose backend does not count.
                continue
        return {**self._destroyed, **states}

    def keep_destroyed_groups(self) -> None:
        """Wrap the function that destroys groups, so that what was issued in them still counts; call once."""
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
        """Return what a group is called on all its ranks; one with the name of another that is gone has a number."""
        key = group_key(group.group_name, _ranks_of(group))
        number = self._made_anew[key]
        return f"{number} {key}" if number else key

    def _of_group(self, key: str, group: dist.ProcessGroup, recorded: list[private.Recorded] | None) -> GroupState:
        record = self._waits.of_group(group)
        issued = self._waits.collectives_in(group)
        here = [one for one in recorded or () if one.group == group.group_name and not record.unlisted]
        # For collectives of C++ whose timeout has passed, it is unknown how they ended.
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
            # Unknown if C++ has issued something.
            checksum=record.checksum if record.numbers == issued else None,
            failed=min(record.failed_collectives | expired, default=0),
            messages_failed=record.failed_messages,
        )

    def _recorded(self) -> list[private.Recorded]:
        """Return the flight recorder's entries of this test."""
        try:
            return private.recorded(self._began)
        except (RuntimeError, ValueError, AttributeError, KeyError, TypeError):
            # The probe has said so in the header of the run.
            return []

    def _threads_left(self) -> bool:
        """Whether a thread may still issue something: one that is new since the test began, or has run since.

        Those from before the first test, such as a conftest's, are left out.
        """
        threads, others = _other_threads()
        before, others_before = self._threads_before
        has_run = (self._switches.get(thread) != _switches(thread) for thread in threads - before)
        return others > others_before or any(has_run)

    def _is_on_record(self, recorded: list[private.Recorded]) -> bool:
        """Whether a wait of this rank, a new group, or a collective that is issued or pending is on record."""
        on_record = [*self._waits.current.values(), *self._waits.issuing.values(), *self._waits.making.values()]
        return any(each is not None for each in on_record) or any(one.operation.pending for one in recorded)

    def _waiting(self) -> tuple[tuple[Awaited, ...], str]:
        """Return what all threads wait for, with a fingerprint; nothing if one of them may continue."""
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
                # Under torch's debug level DETAIL ranks wait within the call, before the flight recorder knows of it.
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
            # The thread will go on as soon as it gets a processor; another collective may be pending for ever.
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
    """Return the members of a group, as the default group numbers them; KeyError if they are not known."""
    try:
        return dist.get_process_group_ranks(group)
    except KeyError:
        # Not listed by torch.
        if group.size() != dist.get_world_size():
            raise
        return list(range(group.size()))


def _rank_of(peer: int, group: dist.ProcessGroup) -> int:
    """Return a rank of a group as the default group numbers it."""
    return peer if peer == ANY_SOURCE else _ranks_of(group)[peer]


def _imports() -> bool:
    """Whether the main thread is importing a module.

    Python locks each module while it is imported. It has no public list of these locks, and a Python without it stops
    no clock.
    """
    locks = getattr(importlib._bootstrap, "_module_locks", {})
    main = threading.main_thread().ident
    return any(getattr(lock(), "owner", None) == main for lock in list(locks.values()))


def _is_own(thread: threading.Thread | None) -> bool:
    """Whether a thread is the harness's own."""
    return thread is not None and thread.name.startswith(OWN_THREADS)


def _other_threads() -> tuple[set[threading.Thread], int]:
    """Return the threads beside the main one and the harness's own, and how many there are that `threading` lacks."""
    # A dummy stands for a thread of C++, whether it still runs or not.
    known = {thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    known.discard(threading.main_thread())
    return {thread for thread in known if not _is_own(thread)}, _thread._count() - len(known)


class _Doing(NamedTuple):
    """What a thread is doing: whether it is in native code of torch that waits for other ranks; or is idle."""

    waits_natively: bool
    is_idle: bool


def _what_threads_do() -> dict[int, _Doing]:
    """Look at all other threads, and keep none of their frames: these keep alive what a test has dropped."""
    with frames_of_threads() as frames:
        return {ident: _Doing(_waits_natively(frame), _is_idle(frame)) for ident, frame in frames.items()}


def _waits_natively(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    if path.startswith(OWN_CODE):
        # The wrapper of what torch was called for.
        return frame.f_back is not None and _waits_natively(frame.f_back)
    return path.startswith(private.WAITING_CODE) and not path.startswith(private.NEVER_WAITING_CODE)


def _is_done(owner: object) -> bool:
    """Whether what a thread waits for is a work or future that has completed."""
    ask = getattr(owner, "is_completed", None) or getattr(owner, "done", None)
    return ask is not None and bool(ask())


def _is_there(wait: Wait) -> bool:
    """Whether keys have been set that a thread is about to find, or may have been."""
    keys = wait.arguments[0] if wait.arguments else []
    try:
        # The waiting thread holds the lock of its own connection.
        return bool(wait.owner.clone().check([keys] if isinstance(keys, str) else list(keys)))
    except (RuntimeError, AttributeError, TypeError):
        return True


def has_children() -> bool:
    """Whether this process has started another one that still runs, or may have: only Linux tells."""
    try:
        return any((task / "children").read_text().strip() for task in Path("/proc/self/task").iterdir())
    except OSError:
        return True


def _has_signal_handlers() -> bool:
    """Whether a signal may make the main thread do something."""
    handlers = map(signal.getsignal, signal.valid_signals())
    return any(callable(found) and found is not signal.default_int_handler for found in handlers)


def _is_idle(frame: FrameType) -> bool:
    """Whether a thread waits, without a time limit, for another thread of this process."""
    path, name = frame.f_code.co_filename, frame.f_code.co_name
    if path == threading.__file__:
        if name == "wait":
            return frame.f_locals.get("timeout", 0) is None
        return name in ("join", "_wait_for_tstate_lock") and frame.f_locals.get("timeout") in (None, -1)
    return path == _pool_threads.__file__ and name == "_worker"


def _sleeps() -> bool:
    """Whether every thread of this process but the one that asks sleeps in the kernel; only Linux tells."""
    if not sys.platform.startswith("linux"):
        return False
    others = {task.name for task in _TASKS.iterdir()} - {str(threading.get_native_id())}
    try:
        return all(_kernel_status(task)["State"].startswith("S") for task in others)
    except (OSError, ValueError, KeyError):
        # A thread that is just beginning or ending.
        return False


def _kernel_status(thread: int | str | None) -> dict[str, str]:
    """Return the kernel's status of a thread of this process, by its native id."""
    lines = (_TASKS / str(thread) / "status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def _switches(thread: threading.Thread) -> str:
    """Return how often the kernel has put a thread aside, which changes whenever it runs; empty if that is unknown."""
    # In a process that was forked, the main thread's own attribute is still that of its parent.
    native_id = os.getpid() if thread is threading.main_thread() else thread.native_id
    try:
        status = _kernel_status(native_id)
    except OSError:
        return ""
    return f"{status['voluntary_ctxt_switches']} {status['nonvoluntary_ctxt_switches']}"


def _stillness(threads: list[threading.Thread]) -> str | None:
    """Return a mark that stays the same as long as these threads sleep, or None unless all threads of the process do.

    A device may wake a thread without this process, so with CUDA nothing is certain.
    """
    if torch.cuda.is_initialized() or not _sleeps():
        return None
    counts = {thread.ident: _switches(thread) for thread in threads}
    return (
        ", ".join(f"thread {ident}: {count}" for ident, count in sorted(counts.items()))
        if all(counts.values())
        else None
    )
