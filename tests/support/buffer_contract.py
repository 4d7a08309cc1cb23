"""Watches what `zeroshard_comm.interfaces` asks of whoever uses a reducer: memory in use is left alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from zeroshard.grads import sharded
from zeroshard.grads.transient import TransientBuffers
from zeroshard_comm import BucketReduceWork, Coordinator, GradientReducer, Transport
from zeroshard_core import Run

_END = "the end of backward()"


class Use:
    """One reduction of a bucket, from `begin` until its memory may be written or freed. It keeps no memory alive."""

    def __init__(self, number: int, bucket: torch.Tensor, read: Sequence[Run]) -> None:
        self.number, self.read = number, read
        self.is_finished = self.is_closed = False
        self._storage = StorageWeakRef(bucket.untyped_storage())
        self._place = (bucket.storage_offset(), bucket.shape, bucket.stride())
        self._dtype, self._begin, self._end = bucket.dtype, bucket.data_ptr(), bucket.data_ptr() + bucket.nbytes
        self._sent = [bucket[run.start : run.stop].clone() for run in read]

    def overlaps(self, memory: torch.Tensor) -> bool:
        return self._begin < memory.data_ptr() + memory.nbytes and memory.data_ptr() < self._end

    def violation(self) -> str:
        """What has happened to the memory that is still in use; empty if nothing."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            return "freed"
        now = torch.empty(0, dtype=self._dtype).set_(storage, *self._place)
        pairs = zip(self.read, self._sent, strict=True)
        return "" if all(torch.equal(now[run.start : run.stop], sent) for run, sent in pairs) else "written"


class Contract:
    """Records what is done to the memory of buckets before the contract of their reducers allows it.

    Attributes:
        broken: what was done, as ``"freed"``.
        most: the highest number of buckets whose memory was in use at one time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken: set[str] = set()
        self.most = self._count = 0
        self._uses: list[Use] = []
        self._lock = threading.RLock()
        self._is_read_by_peers = False
        choose, agree = sharded.choose_transport, Coordinator.agree
        lend, leave = TransientBuffers.lend, TransientBuffers.leave

        def chosen(*arguments: Any) -> Transport:
            found = choose(*arguments)
            self._is_read_by_peers = found.is_read_by_peers
            # The owner's own range is overwritten by the mean, and collectives may reduce in place.
            writes_all = not (found.tags or found.is_read_by_peers)
            make, rank = found.reducer, dist.get_rank()

            def reducer(runs: Sequence[Run], like: torch.Tensor) -> GradientReducer:
                read = [] if writes_all else [run for run in runs if run.rank != rank]
                return Watched(self, make(runs, like), read)

            return replace(found, reducer=reducer)

        def agreed(coordinator: Coordinator, operation: str, *arguments: Any, **options: Any) -> bool:
            with self._lock:
                self.look()
                if operation == _END and not all(use.is_closed for use in self._uses):
                    self.broken.add("not waited for")
                over = [use for use in self._uses if use.is_closed]
            answer = agree(coordinator, operation, *arguments, **options)
            with self._lock:
                self.look()
                self._uses = [use for use in self._uses if use not in over]
            return answer

        def lent(buffers: TransientBuffers, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
            made = lend(buffers, numel, dtype)
            self._must_be_free(made[0], "lent")
            return made

        def left(buffers: TransientBuffers, memory: torch.Tensor | None) -> None:
            if memory is not None:
                self._must_be_free(memory, "given back")
            leave(buffers, memory)

        monkeypatch.setattr(sharded, "choose_transport", chosen)
        monkeypatch.setattr(Coordinator, "agree", agreed)
        monkeypatch.setattr(TransientBuffers, "lend", lent)
        monkeypatch.setattr(TransientBuffers, "leave", left)

    def _must_be_free(self, memory: torch.Tensor, act: str) -> None:
        with self._lock:
            if any(use.overlaps(memory) for use in self._uses):
                self.broken.add(act)

    def look(self) -> None:
        """Look at all memory that is in use. The caller holds the lock."""
        self.broken |= {use.violation() for use in self._uses} - {""}

    def begin(self, bucket: torch.Tensor, read: Sequence[Run]) -> Use:
        with self._lock:
            self.look()
            self._count += 1
            use = Use(self._count, bucket, read)
            self._uses.append(use)
            self.most = max(self.most, len(self._uses))
            return use

    def finished(self, use: Use) -> None:
        with self._lock:
            self.look()
            use.is_finished = True
            self._uses = [other for other in self._uses if other.number >= use.number or not other.is_closed]

    def closed(self, use: Use) -> None:
        with self._lock:
            self.look()
            use.is_closed = True
            if not use.is_finished:
                self.broken.add("closed too early")
            if not self._is_read_by_peers:
                self._uses.remove(use)


class Watched(GradientReducer):
    def __init__(self, contract: Contract, reducer: GradientReducer, read: Sequence[Run]) -> None:
        self._contract, self._reducer, self._read = contract, reducer, read

    def owned(self, buffer: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return self._reducer.owned(buffer, start, stop)

    def release(self) -> None:
        self._reducer.release()

    def expect(self) -> None:
        self._reducer.expect()

    def begin(self, buffer: torch.Tensor) -> BucketReduceWork:
        use = self._contract.begin(buffer, self._read)
        return WatchedWork(self._contract, self._reducer.begin(buffer), use)


class WatchedWork(BucketReduceWork):
    def __init__(self, contract: Contract, work: BucketReduceWork, use: Use) -> None:
        self._contract, self._work, self._use = contract, work, use

    def finish(self) -> None:
        self._work.finish()
        self._contract.finished(self._use)

    def close(self) -> None:
        self._work.close()
        self._contract.closed(self._use)
