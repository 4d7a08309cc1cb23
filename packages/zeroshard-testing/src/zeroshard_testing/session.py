"""The controller's side of one test: what is sent to the ranks, and what becomes of their verdict."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zeroshard_testing.coverage_on_ranks import coverage_request
from zeroshard_testing.launcher import Launcher, LaunchError
from zeroshard_testing.log_files import write_log_files
from zeroshard_testing.pool import Job, Pool, Result
from zeroshard_testing.rank_pytest import description_of
from zeroshard_testing.report import RanksFailure
from zeroshard_testing.spec import RanksSpec, parse_checks
from zeroshard_testing.verdict import Verdict, judge


class RanksSession:
    """Runs what is to run on ranks in one process: the tests of a pytest session, or calls. Boots on first use.

    Args:
        config: pytest's configuration, None outside pytest.
        temporary: Returns a folder for temporary files.
    """

    def __init__(self, config: pytest.Config | None, temporary: Callable[[], Path]) -> None:
        self._config = config
        self._temporary = temporary
        self._pool: Pool | None = None
        self._machine: Mapping[str, Any] | None = None
        self._late_deaths: list[str] = []
        self._item: pytest.Item | None = None
        self._next_item: pytest.Item | None = None
        self.checks_off = parse_checks(config.getini("ranks_checks")) if config is not None else ()
        """Checks that are off in the whole run, as the ini file says."""

    def boot(self) -> Pool:
        """Return the pool, whose forkserver boots in the background from the first call on."""
        if self._pool is None:
            folder = self._temporary() / "ranks"
            folder.mkdir(exist_ok=True)
            self._pool = Pool(_launcher(self._config), folder, coverage_request(self._config))
        return self._pool

    def machine(self) -> Mapping[str, Any]:
        """Return which backends and devices there are; see `zeroshard_testing.pool.Pool.probe`."""
        if self._machine is None:
            self._machine = self.boot().probe()
        return self._machine

    def begin(self, item: pytest.Item, next_item: pytest.Item | None) -> None:
        """Say which test the calls that follow belong to, and which one comes next."""
        self._item, self._next_item = item, next_item

    def run(self, item: pytest.Function, spec: RanksSpec) -> None:
        """Run a test on its ranks, and raise what pytest is to make of it.

        Args:
            item: The test.
            spec: The ranks that it asks for.

        Raises:
            RanksFailure: If it has not passed on every rank, nor been skipped on all.
        """
        keep = [] if spec.isolation == "process" else _ids(self._next_item)
        message = {"nodeid": own_nodeid(item), "path": str(item.path), "keep": keep}
        result = self._carry_out(item.nodeid, spec, message)
        self._repeat(item, result)
        verdict = judge(result.outcomes)
        if verdict.kind == "skipped":
            pytest.skip(verdict.summary)
        if verdict.kind == "xfailed":
            pytest.xfail(verdict.summary)
        if verdict.kind not in ("passed", "xpassed"):
            raise self._failure(item.nodeid, spec, verdict, result)

    def call(self, title: str, spec: RanksSpec, payload: bytes) -> Mapping[int, bytes]:
        """Run a function on ranks, within a test or outside pytest, and return what it returned there.

        Args:
            title: What to call it in reports.
            spec: The ranks.
            payload: Function and arguments; see `zeroshard_testing.call_item`.

        Returns:
            What `torch.load` reads, by rank.

        Raises:
            RanksFailure: If it has not come to its end on every rank.
        """
        item = self._item
        # So that the function is found in its module, imported as pytest has done it here.
        path = str(item.path) if isinstance(item, pytest.Function) else ""
        result = self._carry_out(title, spec, {"nodeid": title, "path": path, "keep": []}, payload)
        if item is not None:
            self._repeat(item, result)
        verdict = judge(result.outcomes)
        if verdict.kind != "passed":
            raise self._failure(title, spec, verdict, result)
        return result.returned

    def tear_down(self) -> None:
        """Tear down the fixtures on ranks that the next test does not need.

        Raises:
            Failed: If that fails.
        """
        errors = [] if self._pool is None else self._pool.tear_down(_ids(self._next_item))
        if errors:
            pytest.fail("\n\n".join(errors), pytrace=False)

    def finish(self) -> None:
        """Tear down everything on ranks and let them end; what went wrong is a late death."""
        if self._pool is not None:
            self._late_deaths += self._pool.tear_down(())
            self._pool.finish()

    def late_deaths(self) -> list[str]:
        """Return what went wrong on workers after their test had its verdict, in words."""
        if self._pool is not None:
            self._late_deaths += self._pool.take_late_deaths()
        return self._late_deaths

    def close(self) -> None:
        """End every process. Safe to call repeatedly."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _carry_out(self, title: str, spec: RanksSpec, message: Mapping[str, object], payload: bytes = b"") -> Result:
        spec = replace(spec, checks_off=tuple(sorted({*spec.checks_off, *self.checks_off})))
        surroundings = {"sys_path": sys.path, "cwd": os.getcwd()}  # noqa: PTH109 - a string, and per test
        try:
            return self.boot().run(Job(spec, {**surroundings, **message}, payload))
        except LaunchError as error:
            self.close()
            if self._config is None:
                raise
            pytest.fail(f"{title}: {error}", pytrace=False)

    def _failure(self, title: str, spec: RanksSpec, verdict: Verdict, result: Result) -> RanksFailure:
        chosen = None if self._config is None else self._config.getoption("--ranks-logs")
        folder = self._temporary() / "ranks-logs" if chosen is None else Path(chosen)
        folder = write_log_files(folder, title, result.outcomes, result.stdout, result.stderr)
        off = sorted({*spec.checks_off, *self.checks_off})
        note = f"\n\nChecks that were off: {', '.join(off)}" if off else ""
        return RanksFailure(replace(verdict, text=f"{verdict.text}{note}\n\nA log file for each rank: {folder}"))

    def _repeat(self, item: pytest.Item, result: Result) -> None:
        """Let pytest show here what the ranks wrote, logged, recorded and warned of."""
        for stream, texts in (("stdout", result.stdout), ("stderr", result.stderr)):
            for rank, text in texts.items():
                item.add_report_section("call", f"{stream} rank {rank}", text)
        for rank, outcome in result.outcomes.items():
            for title, text in outcome.sections:
                item.add_report_section("call", f"{title.removeprefix('Captured ')}, rank {rank}", text)
        item.user_properties += dict.fromkeys(
            (name, value) for outcome in result.outcomes.values() for name, value in outcome.properties
        )
        _repeat_warnings(result)


def own_nodeid(item: pytest.Item) -> str:
    """Return a test's id as pytest makes it; pytest-xdist appends to it the group of a test."""
    assert item.parent is not None
    return f"{item.parent.nodeid}::{item.name}"


def _ids(item: pytest.Item | None) -> Sequence[str]:
    """Return the ids of the nodes that a test needs."""
    return [] if item is None else [node.nodeid for node in item.listchain()[:-1]]


def _launcher(config: pytest.Config | None) -> Launcher:
    inherit_output = config is None or config.getoption("capture", default="fd") == "no"
    description, environment = description_of(config), _worker_environment()
    if (config is not None and config.getoption("--ranks-launch") == "spawn") or not hasattr(os, "fork"):
        from zeroshard_testing.spawn_launcher import SpawnLauncher

        return SpawnLauncher(description, environment, inherit_output=inherit_output)
    from zeroshard_testing.fork_launcher import ForkLauncher

    return ForkLauncher(description, environment, inherit_output=inherit_output)


def _worker_environment() -> dict[str, str]:
    environment = dict(os.environ)
    # One thread a rank: the ranks share the machine. Read once, when torch is loaded.
    environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def _repeat_warnings(result: Result) -> None:
    """Warn here of what the ranks warned of, once each, so that pytest counts and shows it."""
    seen = dict.fromkeys(warning for outcome in result.outcomes.values() for warning in outcome.warnings)
    for category, text, filename, line in seen:
        module, _, name = category.rpartition(".")
        known: object = getattr(sys.modules.get(module), name, None)
        with warnings.catch_warnings():
            # The filters have been applied where the warning arose.
            warnings.simplefilter("always")
            if isinstance(known, type) and issubclass(known, Warning):
                warnings.warn_explicit(text, known, filename, line)
            else:
                warnings.warn_explicit(f"{category}: {text}", UserWarning, filename, line)


_running: list[RanksSession] = []


def running_session() -> RanksSession | None:
    """Return what runs rank tests in this process, None outside pytest and on ranks."""
    return _running[-1] if _running else None


def set_running_session(session: RanksSession | None) -> None:
    """Say what runs rank tests in this process; None when the innermost pytest of this process ends."""
    if session is None:
        _running.pop()
    else:
        _running.append(session)
