"""The process group of a rank, from one test to the next. Runs in workers only."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch exports them unseen

from zeroshard_testing._torch_private import fake_store, process_groups
from zeroshard_testing.stacks import OWN_THREADS

# Gloo needs about 20 ms to close the connections of a group, most of it asleep.
_REAPERS = 8
_BACKLOG = 64
# The test's own timeout, which comes with every rank's stack, is to strike first.
_GROUP_TIMEOUT_MARGIN = 60.0


class GroupKeeper:
    """Makes the default process group for a test, and lets go of it off the critical path.

    Only the worker's main thread may call it.

    Args:
        port: Port on loopback of the store that all ranks share; connected to once, here.
    """

    def __init__(self, port: int) -> None:
        self._store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        self._current: str | None = None
        self._retired: queue.Queue[list[Any]] = queue.Queue(_BACKLOG)
        self._reapers: list[threading.Thread] = []

    def begin(self, key: str, backend: str, rank: int, world_size: int, timeout: float) -> None:
        """Initialise the default process group, unless it is there already under the same key.

        Args:
            key: Name of the group, the same on all of its ranks and on no other group's.
            backend: As the marker names it.
            rank: This process's rank.
            world_size: Number of ranks.
            timeout: Seconds that the test may take; the group's own timeout is longer.
        """
        if key == self._current and dist.is_initialized():
            return
        self.retire()
        if backend in ("nccl", "gloo-cuda"):
            torch.cuda.set_device(rank % torch.cuda.device_count())
        store = fake_store() if backend == "fake" else PrefixStore(key, self._store)
        with _torch_warnings_ignored():
            dist.init_process_group(
                "gloo" if backend == "gloo-cuda" else backend,
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout + _GROUP_TIMEOUT_MARGIN),
            )
        self._current = key

    def retire(self) -> None:
        """Uninitialise `torch.distributed` at once and close the groups' connections in the background."""
        self._current = None
        if not dist.is_initialized():
            return
        # Those that the test made as well.
        groups = process_groups()
        with _torch_warnings_ignored():
            dist.destroy_process_group()
        if not self._reapers or (len(self._reapers) < _REAPERS and not self._retired.empty()):
            reaper = threading.Thread(target=self._reap, name=f"{OWN_THREADS}group-reaper", daemon=True)
            self._reapers.append(reaper)
            reaper.start()
        self._retired.put(groups)

    def _reap(self) -> None:
        while True:
            groups = self._retired.get()
            groups.clear()


@contextlib.contextmanager
def _torch_warnings_ignored() -> Iterator[None]:
    # The user's filters may turn warnings into errors; these are none of the test's.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def worker_environment() -> dict[str, str]:
    """Return what torch is to find in a worker's environment, unless the user has set it otherwise.

    Gloo binds to the loopback interface: no name lookups, no firewalls. The flight recorder keeps the latest
    collectives. NCCL lets ranks share a GPU where it can.
    """
    environment = {"TORCH_FR_BUFFER_SIZE": "256", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    if os.name == "posix":
        environment["GLOO_SOCKET_IFNAME"] = "lo0" if os.uname().sysname == "Darwin" else "lo"
    return environment
