"""Makes and destroys the process group of a rank for each test. Runs in workers only."""

from __future__ import annotations

import contextlib
import queue
import threading
import warnings
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not explicit exports

from zeroshard_testing._torch_private import count_groups_anew, fake_store, process_groups
from zeroshard_testing.ipc import Message
from zeroshard_testing.stacks import OWN_THREADS

# Gloo takes about 20 ms to close the connections of a group, and sleeps most of that time.
_REAPERS = 8
# Longer than the test's own timeout, whose report has the stacks of all ranks.
_GROUP_TIMEOUT_MARGIN = 60.0
# A multiple of the test's timeout.
_EMULATED_TIMEOUT = 0.8


class GroupKeeper:
    """Makes the default process group for a test, and destroys it in the background.

    Only the worker's main thread may call it. All ranks share the store that listens at a port on loopback. The
    constructor connects to it, once.
    """

    def __init__(self, port: int) -> None:
        self._store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        self._current: str | None = None
        self._is_emulated = False
        self._shared: dist.ProcessGroup | None = None
        self._retired: queue.SimpleQueue[list[dist.ProcessGroup]] = queue.SimpleQueue()
        # Never restored, because tests may count threads.
        for _ in range(_REAPERS):
            threading.Thread(target=self._reap, name=f"{OWN_THREADS}group-reaper", daemon=True).start()

    def begin(self, message: Message) -> None:
        """Initialize the default process group that a test needs, unless it exists with the same key.

        The key is the message's ``group`` and how often tests lost that group. It is equal on all its ranks.
        """
        key, backend, rank = message["group"], message["backend"], message["rank"]
        if message["isolation"] == "none":
            key += f" {self._store.add(f'{key} lost', 0)}"
        if key == self._current and dist.is_initialized():
            return
        self.retire()
        name, timeout = backend, message["timeout"] + _GROUP_TIMEOUT_MARGIN
        if backend in ("nccl", "gloo-cuda"):
            torch.cuda.set_device(rank % torch.cuda.device_count())
            name = backend.removesuffix("-cuda")
        self._is_emulated = backend == "emulated"
        if self._is_emulated:
            from zeroshard_testing.emulated.runtime import BACKEND

            # Shorter than the test's, because its error names a collective that a rank left out, which no stack shows.
            name, timeout = BACKEND, message["timeout"] * _EMULATED_TIMEOUT
        store = fake_store() if backend == "fake" else PrefixStore(key, self._store)
        limit = timedelta(seconds=timeout)
        count_groups_anew()
        with _torch_warnings_ignored():
            dist.init_process_group(name, store=store, rank=rank, world_size=message["world_size"], timeout=limit)
        if backend != "fake":
            _meet(store, message["world_size"], limit)
        self._current, self._shared = key, dist.group.WORLD if message["isolation"] == "none" else None

    def end(self, message: Message) -> None:
        """Tell all ranks if a test has destroyed or replaced the default group that the tests of its module share."""
        if self._shared is not None and self._shared is not dist.group.WORLD:
            self._current = self._shared = None
            self._store.add(f"{message['group']} lost", 1)

    def retire(self) -> None:
        """Uninitialize `torch.distributed` now, and close the groups' connections in the background."""
        self._current = self._shared = None
        if self._is_emulated:
            from zeroshard_testing.emulated.runtime import close_groups

            # Their threads end here; a model that has not been freed yet may hold a group.
            close_groups()
        if not dist.is_initialized():
            return
        # Including the groups that the test made.
        groups = process_groups()
        with _torch_warnings_ignored():
            dist.destroy_process_group()
        self._retired.put(groups)

    def _reap(self) -> None:
        while True:
            self._retired.get().clear()


def _meet(store: PrefixStore, world_size: int, timeout: timedelta) -> None:
    """Wait until all ranks have made the group, because a rank that left earlier would close connections too early."""
    if world_size > 1:
        if store.add("zeroshard: ranks that have made the group", 1) == world_size:
            store.set("zeroshard: all have made the group", "")
        store.wait(["zeroshard: all have made the group"], timeout)


@contextlib.contextmanager
def _torch_warnings_ignored() -> Iterator[None]:
    # The user's filters may turn warnings into errors, but these warnings are not from the test.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
