"""Tells what this rank is doing, from a thread of its own: what its other threads wait for, and what was issued.

Runs in workers only. A thread counts as waiting for other ranks only if that is certain: it is inside a wait that
`zeroshard_testing.wait_recorder` has on record and that will not give up before the test's time is up, or inside native
code of torch that is known to wait there, with every thread of the process asleep in the kernel. A thread that merely
seems idle may go on by itself.
"""

from __future__ import annotations

import signal
import sys
import threading
from concurrent.futures import thread as _pool_threads
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from time import monotonic, time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

# torch exports these unseen by type checkers.
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from zeroshard_testing import _torch_private as private
from zeroshard_testing.collectives import Collectives
from zeroshard_testing.journal import JournalWriter
from zeroshard_testing.rank_state import Awaited, GroupState, Messages, RankState, group_key, group_label
from zeroshard_testing.stacks import OWN_THREADS, python_stacks
from zeroshard_testing.wait_recorder import ANY_SOURCE, Wait, WaitRecorder

# Bound now, as the clock is above: a test may put something else in their place.
_ranks_of = dist.get_process_group_ranks
_OWN_CODE = str(Path(__file__).parent)


class RankInspector:
    """Tells what the rank is doing. One per worker; the main thread begins and ends tests, any thread may look.

    Args:
        waits: The record of waits.
        collectives: The record of collectives.
        journal: Told which test it is written for.
    """

    def __init__(self, waits: WaitRecorder, collectives: Collectives, journal: JournalWriter) -> None:
        self._waits = waits
        self._collectives = collectives
        self._journal = journal
        self._began = 0.0
        self._began_by_the_clock = 0.0
        self._destroyed: dict[str, GroupState] = {}
        self._deadline = 0.0
        self._testing = False
        self._ended_by_the_clock = 0.0
        self._run = -1

    def begin(self, run: int, timeout: float) -> None:
        """Say that a test begins.

        Args:
            run: Its number.
            timeout: Seconds that it may take.
        """
        self._run = self._journal.run = run
        # The recorder's clock.
        self._began_by_the_clock = time()
        self._began = monotonic()
        self._deadline = self._began + timeout
        self._destroyed = {}
        self._testing = True

    def end(self) -> None:
        """Say that the test has ended."""
        self._testing = False
        self._ended_by_the_clock = time()

    def look(self, run: int, *, details: bool) -> RankState:
        """Return what the rank is doing now.

        Args:
            run: The test that is asked about; nothing is known of any other.
            details: Whether to tell the latest collectives also of a rank that is not waiting, and stacks.
        """
        if run != self._run:
            return RankState()
        found = self._waiting()
        if not self._testing:
            # A thread that the test has left behind may still issue something.
            finished = found is not None and not found[0]
            return RankState(finished, groups=self.groups(self._recorded() if details else None))
        if (found is None or not found[0]) and not details:
            return RankState()
        recorded = self._recorded()
        stacks = python_stacks(sys._current_frames()) if details else ""
        awaited: tuple[Awaited, ...] = ()
        fingerprint = ""
        if found is not None and not self._gives_up(recorded):
            awaited, fingerprint = found
        return RankState(False, awaited, fingerprint, self.groups(recorded), stacks)

    def groups(self, recorded: list[private.Recorded] | None = None) -> dict[str, GroupState]:
        """Return what was issued in each process group, without operations unless the recorder's entries are given."""
        states = {}
        for group in private.process_groups():
            try:
                state = self._of_group(group, recorded)
            except (RuntimeError, KeyError, ValueError, AttributeError):
                # A group that is just being made or destroyed, or whose backend does not count.
                continue
            states[group_key(group.group_name, state.members)] = state
        return {**self._destroyed, **states}

    def keep_destroyed_groups(self) -> None:
        """Wrap the function that destroys groups, so that what was issued in them still counts; call once."""
        destroy = dist.destroy_process_group

        def destroy_process_group(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as the wrapped function
            self._destroyed = self.groups(self._recorded()) if self._testing else {}
            destroy(*args, **kwargs)

        destroy_process_group.__doc__ = destroy.__doc__
        dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = destroy_process_group

    def _of_group(self, group: dist.ProcessGroup, recorded: list[private.Recorded] | None) -> GroupState:
        members = tuple(_ranks_of(group))
        record = self._waits.of_group(group)
        messages = {
            f"{kind} {peer if peer == ANY_SOURCE else members[peer]} {tag}": Messages(one.count, tuple(one.latest))
            for (kind, peer, tag), one in record.messages.items()
        }
        label = group_label(group_key(group.group_name, members), dist.get_world_size())
        state = GroupState(
            label,
            members,
            self._collectives.issued(group),
            messages=messages,
            checksum=self._collectives.checksum(group),
            failed=min(record.failed_collectives, default=0),
            messages_failed=record.failed_messages,
        )
        if recorded is None:
            return state
        operations = self._collectives.operations(group, recorded)
        return replace(state, operations=operations, failed=_first(state.failed, self._given_up(group, recorded)))

    def _given_up(self, group: dist.ProcessGroup, recorded: list[private.Recorded]) -> int:
        """Return the first collective that C++ issued and whose timeout has passed: nobody can tell how it ended."""
        operations = self._collectives.operations(group, recorded)
        late = time() if self._testing else self._ended_by_the_clock
        return min(
            (
                one.number
                for one in recorded
                if one.group == group.group_name
                and not operations[one.number].from_python
                and one.created + one.timeout < late
            ),
            default=0,
        )

    def _recorded(self) -> list[private.Recorded]:
        """Return the flight recorder's entries of this test."""
        try:
            return private.recorded(self._began_by_the_clock)
        except (RuntimeError, ValueError, AttributeError, KeyError, TypeError):
            # The probe has said so in the header of the run.
            return []

    def _gives_up(self, recorded: list[private.Recorded]) -> bool:
        """Whether a pending collective will end by its own timeout within the test's time."""
        return any(
            one.created - self._began_by_the_clock + one.timeout < self._deadline - self._began
            for one in recorded
            if one.pending
        )

    def _waiting(self) -> tuple[tuple[Awaited, ...], str] | None:
        """Return what all threads wait for, with a fingerprint, or None if one of them may go on by itself.

        The main thread does not count when it is between tests.
        """
        waits = self._waits.of_threads()
        awaited: list[Awaited] = []
        marks: list[str] = []
        native: list[threading.Thread] = []
        threads = {thread.ident: thread for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            thread = threads.get(ident)
            if ident == threading.get_ident() or (thread is not None and thread.name.startswith(OWN_THREADS)):
                continue
            if not self._testing and thread is threading.main_thread():
                continue
            wait = waits.get(ident)
            if wait is not None:
                found = self._awaited(wait)
                if found is None:
                    return None
                awaited.append(found)
                marks.append(f"wait {wait.serial}")
            elif _waits_natively(frame) and thread is not None:
                if self._gives_up_natively(frame) or (_makes_a_group(frame) and not _meets_over_tcp(frame)):
                    return None
                native.append(thread)
                awaited.append(Awaited("group" if _makes_a_group(frame) else "collective"))
            elif not _is_idle(frame) or (thread is threading.main_thread() and _has_signal_handlers()):
                return None
        if native:
            still = _stillness(native)
            if still is None:
                return None
            marks.append(still)
        return tuple(awaited), "; ".join(marks)

    def _gives_up_natively(self, frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code.co_filename.startswith(str(Path(torch.__file__).parent)):
            timeout = frame.f_locals.get("timeout")
            if isinstance(timeout, timedelta) and self._began + timeout.total_seconds() < self._deadline:
                return True
            frame = frame.f_back
        return False

    def _awaited(self, wait: Wait) -> Awaited | None:
        if wait.until is not None and wait.until < self._deadline:
            return None
        if wait.kind == "other":
            return None
        if wait.kind == "store":
            # A process that this rank has started may set the key.
            return None if _has_children() or _is_there(wait) else Awaited("store")
        issued = wait.issued
        if wait.kind == "collective" or issued is None:
            return Awaited("collective")
        group = issued.group()
        if group is None:
            return None
        members = tuple(_ranks_of(group))
        peer = issued.peer if issued.peer == ANY_SOURCE else members[issued.peer]
        return Awaited(issued.kind, group_key(group.group_name, members), peer, issued.tag, issued.number)


def _first(one: int, other: int) -> int:
    return min((number for number in (one, other) if number), default=0)


def _waits_natively(frame: FrameType) -> bool:
    if frame.f_code.co_filename.startswith(_OWN_CODE):
        # The wrapper of what torch was called for.
        return frame.f_back is not None and _waits_natively(frame.f_back)
    path = frame.f_code.co_filename
    return path.startswith(private.WAITING_CODE) and not path.startswith(private.NEVER_WAITING_CODE)


def _is_there(wait: Wait) -> bool:
    """Whether keys have been set that a thread is about to find, or may have been."""
    try:
        # The waiting thread holds the lock of its own connection.
        found: bool = wait.store.clone().check(list(wait.keys))
    except (RuntimeError, AttributeError, TypeError):
        return True
    return found


def _has_children() -> bool:
    """Whether this process has started another one that still runs, or may have: only Linux tells."""
    try:
        tasks = list(Path("/proc/self/task").iterdir())
        return any((task / "children").read_text().strip() for task in tasks)
    except OSError:
        return True


def _meets_over_tcp(frame: FrameType) -> bool:
    """Whether a group is being made over a store that wakes those who wait; others look now and then."""
    store = frame.f_locals.get("store")
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore)


def _has_signal_handlers() -> bool:
    """Whether a signal may make the main thread do something."""
    known = (signal.default_int_handler, None)
    return any(callable(found) and found not in known for found in map(signal.getsignal, signal.valid_signals()))


def _makes_a_group(frame: FrameType) -> bool:
    return frame.f_code.co_name == private.GROUP_CONSTRUCTOR


def _is_idle(frame: FrameType) -> bool:
    """Whether a thread waits, without a time limit, for another thread of this process."""
    path, name = frame.f_code.co_filename, frame.f_code.co_name
    if path == threading.__file__:
        if name == "wait":
            return frame.f_locals.get("timeout", 0) is None
        return name in ("join", "_wait_for_tstate_lock") and frame.f_locals.get("timeout") in (None, -1)
    return path == _pool_threads.__file__ and name == "_worker"


def _stillness(threads: list[threading.Thread]) -> str | None:
    """Return a mark that stays the same as long as these threads sleep, or None unless the whole process sleeps.

    The kernel counts how often it has put a thread aside: a thread that is asleep at two moments with the same count
    has not run in between. A device may wake a thread without this process, so with CUDA nothing is certain.
    """
    if not sys.platform.startswith("linux") or torch.cuda.is_initialized():
        return None
    me = threading.get_native_id()
    watched = {thread.native_id for thread in threads}
    marks = []
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) == me:
            continue
        try:
            status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
        except (OSError, ValueError):
            return None
        if not status["State"].startswith("S"):
            return None
        if int(task.name) in watched:
            switches = (status["voluntary_ctxt_switches"], status["nonvoluntary_ctxt_switches"])
            marks.append(f"thread {task.name}: {' '.join(switches)}")
    return ", ".join(sorted(marks))
