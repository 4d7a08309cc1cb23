"""The warm pool: persistent workers, each bound to its rank, that tests are handed to."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from zeroshard_testing.ipc import ClosedError, Message
from zeroshard_testing.launcher import Child, Launcher, readable_channels, text_of
from zeroshard_testing.monitor import Monitor, describe_exit
from zeroshard_testing.outcome import FAULTED, Outcome
from zeroshard_testing.spec import RanksSpec
from zeroshard_testing.stacks import readable_stacks

_PATIENCE = 30.0
"""Seconds that workers between tests may take to tear down fixtures, and to end."""


@dataclass(frozen=True)
class Job:
    """One test, ready to be sent to its ranks.

    Attributes:
        spec: The ranks that it needs.
        message: The part of the request that is the same for all ranks; see `zeroshard_testing.execution`.
        payload: What a call of ``run_on_ranks`` is to call, empty for a test.
    """

    spec: RanksSpec
    message: Mapping[str, object]
    payload: bytes = b""


@dataclass(frozen=True)
class Result:
    """What came of a job.

    Attributes:
        outcomes: How it ended on each rank.
        stdout: What each rank wrote to standard output, ranks that wrote nothing left out.
        stderr: Likewise for standard error.
        returned: What a call returned on each rank, as the rank sent it.
    """

    outcomes: Mapping[int, Outcome]
    stdout: Mapping[int, str]
    stderr: Mapping[int, str]
    returned: Mapping[int, bytes]


_Key = tuple[int, str, int]


@dataclass
class Crew:
    """The workers for one number of ranks and backend: each of them has run the same tests before, as the same rank.

    Attributes:
        workers: By slot.
        environment: What the workers know of the controller's environment, None before their first test.
        last_test: The test that they have run last, empty before the first.
        held: Ids of the nodes whose fixtures are set up.
    """

    workers: list[Child]
    environment: Mapping[str, str] | None = None
    last_test: str = ""
    held: frozenset[str] = field(default_factory=frozenset)


class Pool:
    """Workers that outlive tests: a crew for each number of ranks and backend asked for.

    Only the controller's main thread may call it.

    Args:
        launcher: Starts the workers; the pool closes it at its end.
        temporary: Folder in which each worker has one for ``tmp_path_factory``.
        coverage: What workers need to measure coverage, None without.
    """

    def __init__(self, launcher: Launcher, temporary: Path, coverage: Message | None = None) -> None:
        self._launcher = launcher
        self._temporary = temporary
        self._coverage = coverage
        self._store: Child | None = None
        self._crews: dict[_Key, Crew] = {}
        self._late_deaths: list[str] = []
        self._runs = 0
        self._started = 0

    def probe(self) -> Message:
        """Ask a throw-away process which backends and devices there are; no other process touches CUDA for it.

        Returns:
            ``devices`` (number of CUDA devices), ``gloo`` and ``nccl`` (whether torch has them), ``nccl_version`` (its
            numbers), ``torch`` (its version), ``backends`` (names that torch knows), ``available`` (those it has).

        Raises:
            LaunchError: If the process cannot be started.
        """
        child = self._launcher.start({"kind": "probe"})
        self._launcher.await_ready([child])
        assert child.ready is not None
        self._launcher.kill(child)
        return child.ready

    def checks_off(self) -> Mapping[str, str]:
        """Return the checks that cannot work with this torch, with the reason of each.

        Raises:
            LaunchError: If no process can be started.
        """
        off: Mapping[str, str] = self._store_ready()["checks_off"]
        return off

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
        crew = self._ready_crew(spec)
        workers = crew.workers
        self._runs += 1
        off = {*spec.checks_off, *self.checks_off()}
        monitor = Monitor(self._launcher, workers, self._runs, spec.timeout, frozenset(off))
        clean = False
        try:
            self._send(job, crew)
            outcomes = monitor.outcomes()
            result = Result(
                {spec.actual_rank(slot): outcome for slot, outcome in outcomes.items()},
                {spec.actual_rank(slot): text for slot, child in enumerate(workers) if (text := text_of(child.stdout))},
                {spec.actual_rank(slot): text for slot, child in enumerate(workers) if (text := text_of(child.stderr))},
                {spec.actual_rank(slot): data for slot, data in monitor.returned.items()},
            )
            clean = all(outcome.is_clean and outcome.kind != FAULTED for outcome in outcomes.values())
            crew.last_test = str(job.message["nodeid"])
            crew.held = frozenset(monitor.held)
        finally:
            # Also after Ctrl-C: a worker in the midst of a test is of no use to the next one.
            if not clean or spec.isolation == "process":
                self._discard(_key(spec))
        if not clean or spec.isolation == "process":
            self._crew(spec)
        elif spec.isolation == "group":
            for worker in workers:
                with suppress(ClosedError):
                    worker.channel.send({"op": "retire"})
        return result

    def tear_down(self, keep: Sequence[str]) -> list[str]:
        """Tear down the fixtures that no test needs any more on workers that are between tests.

        Args:
            keep: Ids of the nodes that the next test needs.

        Returns:
            What went wrong, in words.
        """
        errors = []
        for crew in self._crews.values():
            if crew.held <= set(keep):
                continue
            crew.held &= set(keep)
            for slot, answer in self._ask(crew.workers, {"op": "tear down", "keep": list(keep)}).items():
                if answer.get("error"):
                    errors.append(f"rank {slot}, tearing down after {crew.last_test}:\n{answer['error']}")
        return errors

    def finish(self) -> None:
        """Let every worker come to its end, and note those that had died before."""
        self._launcher.take_news()
        for crew in self._crews.values():
            self._note_late_deaths(crew)
            answered = self._ask(crew.workers, {"op": "finish"})
            deadline = time.monotonic() + 1.0
            while len(answered) < len(crew.workers) and time.monotonic() < deadline:
                self._launcher.take_news()
                if all(child.status is not None for slot, child in enumerate(crew.workers) if slot not in answered):
                    break
                time.sleep(0.005)
            self._note_late_deaths(crew, besides=answered)
        for key in list(self._crews):
            self._discard(key)

    def take_late_deaths(self) -> list[str]:
        """Return, in words, which workers have died after their last test had its verdict; each is told once."""
        taken, self._late_deaths = self._late_deaths, []
        return taken

    def close(self) -> None:
        """End all processes. Safe to call repeatedly."""
        self._crews.clear()
        self._launcher.close()

    def _ready_crew(self, spec: RanksSpec) -> Crew:
        """Return workers that are alive and ready, one for each process that the spec needs."""
        self._launcher.take_news()
        if self._store is not None and self._store.status is not None:
            # Whoever is connected to a store that is gone cannot make another group.
            self._launcher.kill(self._store)
            self._store = None
            for key in list(self._crews):
                self._discard(key)
        crew = self._crews.get(_key(spec))
        if crew is not None:
            is_stale = any(child.status is not None for child in crew.workers)
            self._note_late_deaths(crew)
            if is_stale or (spec.isolation == "process" and crew.last_test):
                self._discard(_key(spec))
        crew = self._crew(spec)
        self._launcher.await_ready(crew.workers)
        return crew

    def _note_late_deaths(self, crew: Crew, besides: Mapping[int, object] | None = None) -> None:
        for slot, child in enumerate(crew.workers):
            if child.status is not None and crew.last_test and slot not in (besides or {}):
                text = (
                    f"the worker of rank {slot} {describe_exit(child.status)} after {crew.last_test} had passed on it, "
                    f"between tests\n{readable_stacks(text_of(child.stacks))}"
                ).rstrip()
                if text not in self._late_deaths:
                    self._late_deaths.append(text)

    def _ask(self, children: Sequence[Child], question: Message) -> dict[int, Message]:
        """Return what workers between tests answer, by slot; those that are gone or do not answer are left out."""
        waiting = {}
        for slot, child in enumerate(children):
            if child.status is None and child.ready is not None:
                with suppress(ClosedError):
                    child.channel.send(question)
                    waiting[child.channel] = slot
        answers: dict[int, Message] = {}
        deadline = time.monotonic() + _PATIENCE
        while waiting and time.monotonic() < deadline:
            for channel in readable_channels(waiting, deadline - time.monotonic()):
                try:
                    for message, _ in channel.receive_ready():
                        if message["op"] in ("torn down", "bye"):
                            answers[waiting[channel]] = message
                except ClosedError:
                    pass
                else:
                    if waiting[channel] not in answers:
                        continue
                del waiting[channel]
        return answers

    def _store_ready(self) -> Message:
        if self._store is None:
            self._store = self._launcher.start({"kind": "store"})
        # Again, if whoever waited for it before was interrupted.
        self._launcher.await_ready([self._store])
        assert self._store.ready is not None
        return self._store.ready

    def _crew(self, spec: RanksSpec) -> Crew:
        port = self._store_ready()["port"]
        crew = self._crews.setdefault(_key(spec), Crew([]))
        while len(crew.workers) < spec.processes:
            self._started += 1
            folder = str(self._temporary / f"worker-{self._started}")
            request = {"kind": "rank", "port": port, "temporary": folder, "coverage": self._coverage}
            crew.workers.append(self._launcher.start(request))
        return crew

    def _discard(self, key: _Key) -> None:
        for child in self._crews.pop(key).workers:
            self._launcher.kill(child)

    def _send(self, job: Job, crew: Crew) -> None:
        spec = job.spec
        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        news = None if crew.environment == environment else environment
        crew.environment = environment
        group = f"run-{self._runs}"
        if spec.isolation == "none":
            identities = (str(child.identity) for child in crew.workers)
            group = "-".join([str(job.message["path"]), spec.test_id, *identities])
        port = _free_port()
        for slot, child in enumerate(crew.workers):
            child.forget_output()
            message = {
                **job.message,
                "op": "run",
                "run": self._runs,
                "rank": spec.actual_rank(slot),
                "world_size": spec.world_size,
                "backend": spec.backend,
                "init": spec.init,
                "timeout": spec.timeout,
                "checks_off": spec.checks_off,
                "group": group,
                "environment": news,
                "master_port": port,
                "tmp_path": str(self._temporary / f"run-{self._runs}"),
            }
            # A worker that has died in the meantime is noticed by whoever watches it.
            with suppress(ClosedError):
                child.channel.send(message, job.payload)


def _key(spec: RanksSpec) -> _Key:
    return spec.world_size, spec.backend, spec.fake_rank


def _free_port() -> int:
    """Return a port for ``MASTER_PORT`` that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
