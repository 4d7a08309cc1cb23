"""The warm pool: persistent workers, each bound to its rank, which run the tests."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from zeroshard_testing.ipc import ClosedError, Message
from zeroshard_testing.launcher import Child, Launcher, LaunchError, ask, text_of
from zeroshard_testing.monitor import Monitor, describe_exit
from zeroshard_testing.outcome import FAULTED, Outcome
from zeroshard_testing.spec import OPTIONAL_CHECKS, RanksSpec
from zeroshard_testing.stacks import readable_stacks

_PATIENCE = 30.0
"""Seconds within which workers between tests must tear down fixtures, and end."""


@dataclass
class Crew:
    """The workers for one number of ranks and backend. All of them have run the same tests, each as the same rank."""

    workers: list[Child]
    last_test: str = ""
    # Places of the nodes whose fixtures are set up.
    held: frozenset[str] = frozenset()


class Pool:
    """Keeps workers alive between tests: a crew for each number of ranks and backend that a test needs.

    Only the controller's main thread may call it. It closes its launcher. If a worker dies after its last test had a
    verdict, it adds a text to ``late_deaths``. Each worker has a folder in ``temporary``.
    """

    def __init__(self, launcher: Launcher, temporary: Path, coverage: Message | None, late_deaths: list[str]) -> None:
        self._launcher = launcher
        self._temporary = temporary
        self._coverage = coverage
        self._late_deaths = late_deaths
        self._store: Child | None = None
        self._crews: dict[str, Crew] = {}
        self._loaded: dict[str, None] = {}
        self._runs = 0
        self._started = 0

    def checks_off(self) -> Mapping[str, str]:
        """Return the checks that cannot work with this torch, with the reason of each."""
        return dict(self._ready_store().ready["checks_off"])

    def run(
        self, spec: RanksSpec, message: Mapping[str, object], payload: bytes
    ) -> tuple[dict[int, Outcome], dict[int, bytes]]:
        """Run a test, or the call in ``payload``, on its ranks. Return outcomes and the results of a call, by rank.

        ``message`` is the part of the request that is the same for all ranks; see `zeroshard_testing.execution`. Unless
        all ranks pass or skip, the workers are replaced. Raises LaunchError if workers cannot be started.
        """
        crew = self._ready_crew(spec)
        self._runs += 1
        assert spec.timeout is not None, "the session has chosen one"
        off = frozenset({*spec.checks_off, *self.checks_off(), *OPTIONAL_CHECKS} - {*spec.checks_on})
        monitor = Monitor(self._launcher, crew.workers, self._runs, spec.timeout, off)
        is_reusable = False
        try:
            self._send(spec, message, payload, crew)
            outcomes = {
                rank: replace(outcome, sections=(*child.output(), *outcome.sections))
                for rank, outcome, child in zip(spec.ranks, monitor.outcomes(), crew.workers, strict=True)
            }
            self._loaded |= monitor.loaded
            crew.last_test = str(message["title"])
            crew.held = frozenset(monitor.held)
            is_clean = all(outcome.is_clean and outcome.kind != FAULTED for outcome in outcomes.values())
            is_reusable = is_clean and spec.isolation != "process"
            if is_clean and not is_reusable and self._coverage is not None:
                self._ask(crew.workers, {"op": "finish"})
        finally:
            # Even after Ctrl-C, because a worker in the middle of a test cannot run the next one.
            if not is_reusable:
                self._discard(spec.test_id)
        if not is_reusable:
            self._crew(spec)
        elif spec.isolation == "group":
            for worker in crew.workers:
                with suppress(ClosedError):
                    worker.channel.send({"op": "retire"})
        return outcomes, {spec.ranks[slot]: data for slot, data in monitor.returned.items()}

    def tear_down(self, keep: Sequence[str]) -> list[str]:
        """Tear down fixtures of nodes not in ``keep`` on workers between tests, and return the errors as text."""
        crews = [crew for crew in self._crews.values() if not crew.held <= set(keep)]
        return [error for crew in crews for error in self._tear_down(crew, keep)]

    def _tear_down(self, crew: Crew, keep: Sequence[str]) -> list[str]:
        crew.held &= set(keep)
        answers = self._ask(crew.workers, {"op": "tear down", "keep": list(keep)})
        errors = {slot: answer["error"] for slot, answer in answers.items()}
        for slot, child in enumerate(crew.workers):
            if slot not in errors and child.status is None:
                errors[slot] = f"no answer within {_PATIENCE:g} s"
        title = f"tearing down after {crew.last_test}"
        return [f"rank {slot}, {title}:\n{error}" for slot, error in sorted(errors.items()) if error]

    def finish(self) -> None:
        """Tear down all fixtures, wait until every worker ends, and record workers that died earlier."""
        self._late_deaths += self.tear_down(())
        self._launcher.take_news()
        for key, crew in list(self._crews.items()):
            answers = self._ask(crew.workers, {"op": "finish"})
            silent = [slot for slot in range(len(crew.workers)) if slot not in answers]
            deadline = time.monotonic() + 1.0
            while any(crew.workers[slot].status is None for slot in silent) and time.monotonic() < deadline:
                time.sleep(0.005)
                self._launcher.take_news()
            self._note_late_deaths(crew, silent)
            self._discard(key)

    def close(self) -> None:
        """End all processes. Safe to call repeatedly."""
        self._crews.clear()
        self._launcher.close()

    def _ready_crew(self, spec: RanksSpec) -> Crew:
        """Return live and ready workers, one for each process that the spec needs."""
        self._launcher.take_news()
        if self._store is not None and self._store.status is not None:
            # A worker cannot make another group without the store.
            self._launcher.kill(self._store)
            self._store = None
            for key in list(self._crews):
                self._discard(key)
        crew = self._crews.get(spec.test_id)
        if crew is not None:
            self._note_late_deaths(crew, range(len(crew.workers)))
            is_used = spec.isolation == "process" and crew.last_test
            if is_used:
                self._late_deaths += self._tear_down(crew, ())
            if is_used or any(child.status is not None for child in crew.workers):
                self._discard(spec.test_id)
        crew = self._crew(spec)
        self._launcher.await_ready(crew.workers)
        return crew

    def _note_late_deaths(self, crew: Crew, slots: Iterable[int]) -> None:
        for slot in slots:
            child = crew.workers[slot]
            if child.status is not None and crew.last_test:
                death = f"the worker of rank {slot} {describe_exit(child.status)} after {crew.last_test}"
                stacks = readable_stacks(text_of(child.stacks))
                self._late_deaths.append(f"{death} had passed on it, between tests\n{stacks}".rstrip())

    def _ask(self, children: Sequence[Child], question: Message, patience: float = _PATIENCE) -> dict[int, Message]:
        """Return the answers of processes between tests, by slot. Messages of an earlier test name its run."""
        there = {slot: child for slot, child in enumerate(children) if child.status is None and child.ready}
        return ask(there, question, lambda message: "run" not in message, patience)

    def ask_store(self, question: Message, patience: float = _PATIENCE) -> Message:
        """Return the answer of the store's process, the only one that uses CUDA; LaunchError if there is none."""
        answers = self._ask([self._ready_store()], question, patience)
        if not answers:
            raise LaunchError(f"the process that hosts the store does not answer within {patience:g} s")
        return answers[0]

    def _ready_store(self) -> Child:
        if self._store is None:
            self._store = self._launcher.start({"kind": "store"})
        # Sent again if the previous wait was interrupted.
        self._launcher.await_ready([self._store])
        return self._store

    def _crew(self, spec: RanksSpec) -> Crew:
        port = self._ready_store().ready["port"]
        crew = self._crews.setdefault(spec.test_id, Crew([]))
        while len(crew.workers) < len(spec.ranks):
            self._started += 1
            folder = str(self._temporary / f"worker-{self._started}")
            request = {"kind": "rank", "port": port, "temporary": folder, "coverage": self._coverage}
            request["preload"] = [*self._loaded]
            crew.workers.append(self._launcher.start(request))
        return crew

    def _discard(self, key: str) -> None:
        for child in self._crews.pop(key).workers:
            self._launcher.kill(child)

    def _send(self, spec: RanksSpec, message: Mapping[str, object], payload: bytes, crew: Crew) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            # The port is free at this moment.
            port = listener.getsockname()[1]
        shared_group = f"{message['path']} on worker {crew.workers[0].identity}"
        request = {
            **message,
            **asdict(spec),
            "op": "run",
            "run": self._runs,
            "group": shared_group if spec.isolation == "none" else f"run-{self._runs}",
            "environment": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
            "cwd": os.getcwd(),  # noqa: PTH109 - a string, and per test
            "sys_path": sys.path,
            "master_port": port,
            "tmp_path": str(self._temporary / f"run-{self._runs}"),
        }
        for rank, child in zip(spec.ranks, crew.workers, strict=True):
            child.forget_output()
            # The monitor notices a worker that has died meanwhile.
            with suppress(ClosedError):
                child.channel.send({**request, "rank": rank}, payload)
