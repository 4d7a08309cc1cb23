"""Observes this process from a thread of its own: what its other threads wait for, and what was issued. Workers only.

A thread counts as waiting for other ranks only if that is certain: it is inside a wait that `zeroshard_testing.waits`
has on record and that will not give up before the test's time is up, or inside native code of torch that is known to
wait there, with every thread of the process asleep in the kernel. A thread that merely seems idle may go on by itself.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import thread as _pool_threads
from datetime import timedelta
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

# torch exports these unseen by type checkers.
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from zeroshard_testing.collectives import Collectives
from zeroshard_testing.journal import JournalWriter
from zeroshard_testing.rank_state import Awaited, GroupState, Operation, RankState, group_key, group_label
from zeroshard_testing.stacks import OWN_THREADS, python_stacks
from zeroshard_testing.waits import ANY_SOURCE, Wait, Waits, group_timeout

_TORCH = str(Path(torch.__file__).parent)
_NATIVE_WAITS = tuple(
    str(Path(_TORCH, *parts))
    for parts in (("distributed", ""), ("nn", "parallel", "distributed.py"), ("autograd", "graph.py"), ("_ops.py",))
)
_NEVER_WAITS = tuple(str(Path(_TORCH, "distributed", name)) for name in ("elastic", "rpc", "launcher"))
# Bound now: a test may put something else in its place.
_ranks_of = dist.get_process_group_ranks
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}


class Observer:
    """Tells what the rank is doing. One per worker; the main thread begins and ends tests, any thread may look.

    Args:
        waits: The record of waits.
        collectives: The record of collectives.
        journal: Told which test it is written for.
    """

    def __init__(self, waits: Waits, collectives: Collectives, journal: JournalWriter) -> None:
        self._waits = waits
        self._collectives = collectives
        self._journal = journal
        self._began = 0.0
        self._began_by_the_clock = 0.0
        self._destroyed: dict[str, GroupState] = {}
        self._deadline = 0.0
        self._testing = False
        self._run = -1

    def begin(self, run: int, timeout: float) -> None:
        """Say that a test begins.

        Args:
            run: Its number.
            timeout: Seconds that it may take.
        """
        self._run = self._journal.run = run
        # The recorder's clock; a test may put another in its place.
        self._began_by_the_clock = time.time()
        self._began = monotonic()
        self._deadline = self._began + timeout
        self._destroyed = {}
        self._testing = True
        self._waits.failures = 0

    def end(self) -> None:
        """Say that the test has ended."""
        self._testing = False

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
            recorded = self._recorded() if details else None
            finished = found is not None and not found[0]
            return RankState(finished, groups=self.groups(recorded), disturbed=self._waits.failures > 0)
        if (found is None or not found[0]) and not details:
            return RankState()
        recorded = self._recorded()
        stacks = python_stacks(sys._current_frames()) if details else ""
        awaited: tuple[Awaited, ...] = ()
        fingerprint = ""
        if found is not None and not self._gives_up(recorded):
            awaited, fingerprint = found
        return RankState(False, awaited, fingerprint, self.groups(recorded), stacks)

    def groups(self, recorded: list[dict[str, Any]] | None = None) -> dict[str, GroupState]:
        """Return what was issued in each process group, without operations unless they are given."""
        states = {}
        for group in list(getattr(getattr(dist.distributed_c10d, "_world", None), "pg_map", ())):
            try:
                members = tuple(_ranks_of(group))
                issued = self._collectives.issued(group)
            except (RuntimeError, KeyError, ValueError):
                # A group that is just being made or destroyed, or whose backend does not count.
                continue
            operations = {}
            for entry in recorded or ():
                if entry["process_group"][0] == group.group_name and not entry["is_p2p"]:
                    number = int(entry["collective_seq_id"])
                    operations[number] = _operation(entry, self._collectives.root(group, number))
            counts = {
                f"{kind} {peer if peer == ANY_SOURCE else members[peer]} {tag}": count
                for (kind, peer, tag), count in self._waits.messages(group).items()
            }
            key = group_key(group.group_name, members)
            label = group_label(key, dist.get_world_size())
            digest = self._collectives.digest(group)
            lasting = self._began + group_timeout(group) > monotonic()
            states[key] = GroupState(label, members, issued, operations, counts, digest, lasting)
        return {**self._destroyed, **states}

    def keep_destroyed_groups(self) -> None:
        """Wrap the function that destroys groups, so that what was issued in them still counts; call once."""
        destroy = dist.destroy_process_group

        def destroy_process_group(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as the wrapped function
            self._destroyed = self.groups()
            destroy(*args, **kwargs)

        destroy_process_group.__doc__ = destroy.__doc__
        dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = destroy_process_group

    def _recorded(self) -> list[dict[str, Any]]:
        """Return the flight recorder's entries of this test."""
        if not dist.is_available():
            return []
        try:
            dump: Callable[[bool, bool], bytes] = torch._C._distributed_c10d._dump_fr_trace_json  # type: ignore[attr-defined]  # missing in torch's stubs
            entries = json.loads(dump(True, False)).get("entries", [])
        except (RuntimeError, ValueError, AttributeError):
            return []
        return [entry for entry in entries if entry["time_created_ns"] >= self._began_by_the_clock * 1e9]

    def _gives_up(self, recorded: list[dict[str, Any]]) -> bool:
        """Whether a pending collective will end by its own timeout within the test's time."""
        return any(
            entry["time_created_ns"] / 1e9 - self._began_by_the_clock + entry["timeout_ms"] / 1e3
            < self._deadline - self._began
            for entry in recorded
            if _is_pending(entry)
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
        while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
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
            return None if _is_there(wait) else Awaited("store")
        message = wait.message
        if message is None:
            return Awaited("collective")
        group = message.group()
        if group is None:
            return None
        members = tuple(_ranks_of(group))
        peer = message.peer if message.peer == ANY_SOURCE else members[message.peer]
        return Awaited(message.kind, group_key(group.group_name, members), peer, message.tag, message.number)


def _operation(entry: Mapping[str, Any], root: int) -> Operation:
    side = "input" if entry["input_sizes"] else "output"
    dtypes, sizes = entry[f"{side}_dtypes"], entry[f"{side}_sizes"]
    tensors = ", ".join(f"{_DTYPES.get(dtype, dtype)}{size}" for dtype, size in zip(dtypes, sizes, strict=False))
    return Operation(entry["profiling_name"].rpartition(":")[2], tensors, _is_pending(entry), root)


def _is_pending(entry: Mapping[str, Any]) -> bool:
    return not entry["retired"] and entry["state"] != "completed"


def _waits_natively(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return path.startswith(_NATIVE_WAITS) and not path.startswith(_NEVER_WAITS)


def _is_there(wait: Wait) -> bool:
    """Whether keys have been set that a thread is about to find, or may have been."""
    try:
        # The waiting thread holds the lock of its own connection.
        found: bool = wait.store.clone().check(list(wait.keys))
    except (RuntimeError, AttributeError, TypeError):
        return True
    return found


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
    return frame.f_code.co_name == "_new_process_group_helper"


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
