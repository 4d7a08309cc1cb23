"""The warm pool: persistent workers, each bound to its rank, that tests are handed to."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from zeroshard_testing.launcher import Child, ForkServer, text_of
from zeroshard_testing.outcome import Outcome
from zeroshard_testing.spec import RanksSpec
from zeroshard_testing.watch import Watch
from zeroshard_testing.wire import Closed, Message


@dataclass(frozen=True)
class Job:
    """One test, ready to be sent to its ranks.

    Attributes:
        spec: The ranks that it needs.
        message: The part of the request that is the same for all ranks; see `zeroshard_testing.worker`.
        payload: Pickled arguments of the test function and attributes of its instance.
    """

    spec: RanksSpec
    message: Mapping[str, object]
    payload: bytes


@dataclass(frozen=True)
class Result:
    """What came of a job.

    Attributes:
        outcomes: How it ended on each rank.
        stdout: What each rank wrote to standard output, ranks that wrote nothing left out.
        stderr: Likewise for standard error.
    """

    outcomes: Mapping[int, Outcome]
    stdout: Mapping[int, str]
    stderr: Mapping[int, str]


class Pool:
    """Workers that outlive tests; grows to the largest number of ranks asked for.

    Only the controller's main thread may call it.

    Args:
        server: The forkserver, which the pool closes at its end.
    """

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._store: Child | None = None
        self._workers: list[Child] = []
        self._known_environments: dict[int, Mapping[str, str]] = {}
        self._used: set[int] = set()
        self._runs = 0

    def probe(self) -> Message:
        """Ask a throw-away process which backends and devices there are; no other process touches CUDA for it.

        Returns:
            ``devices`` (number of CUDA devices), ``gloo`` and ``nccl`` (whether torch has them), versions.

        Raises:
            LaunchError: If the process cannot be started.
        """
        child = self._server.fork({"kind": "probe"})
        self._server.await_ready([child])
        assert child.ready is not None
        self._server.kill(child)
        return child.ready

    def run(self, job: Job) -> Result:
        """Run one test on its ranks and wait for its end on all of them.

        Args:
            job: The test.

        Returns:
            An outcome for every rank. After anything but passes and skips the workers are being replaced.

        Raises:
            LaunchError: If the workers cannot be started.
        """
        spec = job.spec
        workers = self._ensure(spec)
        self._runs += 1
        watch = Watch(self._server, workers, self._runs, spec.timeout)
        clean = False
        try:
            self._send(job, workers)
            outcomes = watch.outcomes()
            result = Result(
                {spec.actual_rank(slot): outcome for slot, outcome in outcomes.items()},
                {spec.actual_rank(slot): text for slot, child in enumerate(workers) if (text := text_of(child.stdout))},
                {spec.actual_rank(slot): text for slot, child in enumerate(workers) if (text := text_of(child.stderr))},
            )
            clean = all(outcome.is_clean for outcome in outcomes.values())
        finally:
            # Also after Ctrl-C: a worker in the midst of a test is of no use to the next one.
            if not clean or spec.isolation == "process":
                self._discard(workers)
        if not clean or spec.isolation == "process":
            self._start(spec.processes)
        elif spec.isolation == "group":
            for worker in workers:
                with suppress(Closed):
                    worker.channel.send({"op": "retire"})
        return result

    def close(self) -> None:
        """End all processes. Safe to call repeatedly."""
        self._workers.clear()
        self._server.close()

    def _ensure(self, spec: RanksSpec) -> list[Child]:
        """Return workers that are alive and ready, one for each process that the spec needs."""
        stale = [child for child in self._workers if child.status is not None]
        if spec.isolation == "process":
            stale += [child for child in self._workers[: spec.processes] if child.identity in self._used]
        if self._store is not None and self._store.status is not None:
            # Whoever is connected to a store that is gone cannot make another group.
            self._server.kill(self._store)
            self._store = None
            stale = list(self._workers)
        self._discard(stale)
        self._start(spec.processes)
        workers = self._workers[: spec.processes]
        self._server.await_ready(workers)
        self._used.update(child.identity for child in workers)
        return workers

    def _start(self, count: int) -> None:
        if self._store is None:
            self._store = self._server.fork({"kind": "store"})
            self._server.await_ready([self._store])
        assert self._store.ready is not None
        while len(self._workers) < count:
            self._workers.append(self._server.fork({"kind": "rank", "port": self._store.ready["port"]}))

    def _discard(self, children: Sequence[Child]) -> None:
        for child in children:
            self._workers.remove(child)
            self._known_environments.pop(child.identity, None)
            self._used.discard(child.identity)
            self._server.kill(child)

    def _send(self, job: Job, workers: Sequence[Child]) -> None:
        spec = job.spec
        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        if spec.isolation == "none":
            group = "-".join([str(job.message["module"]), spec.test_id, *(str(child.identity) for child in workers)])
        else:
            group = f"run-{self._runs}"
        for slot, child in enumerate(workers):
            child.forget_output()
            news = None if self._known_environments.get(child.identity) == environment else environment
            self._known_environments[child.identity] = environment
            message = {
                **job.message,
                "op": "run",
                "run": self._runs,
                "rank": spec.actual_rank(slot),
                "world_size": spec.world_size,
                "backend": spec.backend,
                "timeout": spec.timeout,
                "group": group,
                "environment": news,
            }
            # A worker that has died in the meantime is noticed by whoever watches it.
            with suppress(Closed):
                child.channel.send(message, job.payload)
