"""The warm pool: persistent workers, each bound to its rank, that tests are handed to."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from zeroshard_testing.launcher import Child, Launcher, text_of
from zeroshard_testing.outcome import FAULTED, Outcome
from zeroshard_testing.spec import RanksSpec
from zeroshard_testing.stacks import readable_stacks
from zeroshard_testing.watch import Watch, describe_exit
from zeroshard_testing.wire import ClosedError, Message


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
        launcher: Starts the workers; the pool closes it at its end.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._store: Child | None = None
        self._workers: list[Child] = []
        self._known_environments: dict[int, Mapping[str, str]] = {}
        self._last_tests: dict[int, str] = {}
        self._late_deaths: list[str] = []
        self._runs = 0

    def probe(self) -> Message:
        """Ask a throw-away process which backends and devices there are; no other process touches CUDA for it.

        Returns:
            ``devices`` (number of CUDA devices), ``gloo`` and ``nccl`` (whether torch has them), ``nccl_version`` (its
            numbers), ``torch`` (its version).

        Raises:
            LaunchError: If the process cannot be started.
        """
        child = self._launcher.start({"kind": "probe"})
        self._launcher.await_ready([child])
        assert child.ready is not None
        self._launcher.kill(child)
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
        watch = Watch(self._launcher, workers, self._runs, spec.timeout)
        clean = False
        try:
            self._send(job, workers)
            outcomes = watch.outcomes()
            result = Result(
                {spec.actual_rank(slot): outcome for slot, outcome in outcomes.items()},
                {spec.actual_rank(slot): text for slot, child in enumerate(workers) if (text := text_of(child.stdout))},
                {spec.actual_rank(slot): text for slot, child in enumerate(workers) if (text := text_of(child.stderr))},
            )
            clean = all(outcome.is_clean and outcome.kind != FAULTED for outcome in outcomes.values())
            self._last_tests.update((child.identity, str(job.message["nodeid"])) for child in workers)
        finally:
            # Also after Ctrl-C: a worker in the midst of a test is of no use to the next one.
            if not clean or spec.isolation == "process":
                self._discard(workers)
        if not clean or spec.isolation == "process":
            self._start(spec.processes)
        elif spec.isolation == "group":
            for worker in workers:
                with suppress(ClosedError):
                    worker.channel.send({"op": "retire"})
        return result

    def take_late_deaths(self) -> list[str]:
        """Return, in words, which workers have died after their last test had its verdict; each is told once."""
        self._launcher.take_news()
        dead = [child for child in self._workers if child.status is not None]
        self._note_late_deaths(dead)
        self._discard(dead)
        taken, self._late_deaths = self._late_deaths, []
        return taken

    def close(self) -> None:
        """End all processes. Safe to call repeatedly."""
        self._workers.clear()
        self._launcher.close()

    def _ensure(self, spec: RanksSpec) -> list[Child]:
        """Return workers that are alive and ready, one for each process that the spec needs."""
        self._launcher.take_news()
        stale = [child for child in self._workers if child.status is not None]
        self._note_late_deaths(stale)
        if spec.isolation == "process":
            stale += [child for child in self._workers[: spec.processes] if child.identity in self._last_tests]
        if self._store is not None and self._store.status is not None:
            # Whoever is connected to a store that is gone cannot make another group.
            self._launcher.kill(self._store)
            self._store = None
            stale = list(self._workers)
        self._discard(stale)
        self._start(spec.processes)
        workers = self._workers[: spec.processes]
        self._launcher.await_ready(workers)
        return workers

    def _note_late_deaths(self, dead: Sequence[Child]) -> None:
        for child in dead:
            test = self._last_tests.get(child.identity)
            if test is not None and child.status is not None:
                slot = self._workers.index(child)
                self._late_deaths.append(
                    f"the worker of rank {slot} {describe_exit(child.status)} after {test} had passed on it, between "
                    f"tests\n{readable_stacks(text_of(child.stacks))}".rstrip()
                )

    def _start(self, count: int) -> None:
        if self._store is None:
            self._store = self._launcher.start({"kind": "store"})
            self._launcher.await_ready([self._store])
        assert self._store.ready is not None
        while len(self._workers) < count:
            self._workers.append(self._launcher.start({"kind": "rank", "port": self._store.ready["port"]}))

    def _discard(self, children: Sequence[Child]) -> None:
        for child in children:
            self._workers.remove(child)
            self._known_environments.pop(child.identity, None)
            self._last_tests.pop(child.identity, None)
            self._launcher.kill(child)

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
            with suppress(ClosedError):
                child.channel.send(message, job.payload)
