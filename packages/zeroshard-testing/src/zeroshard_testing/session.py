"""The controller's side of a run: sends tests to the ranks, and reports their verdicts."""

from __future__ import annotations

import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from zeroshard_testing.backends import NEED_NO_PROBE, why_unavailable
from zeroshard_testing.coverage_on_ranks import coverage_request
from zeroshard_testing.launcher import Launcher, LaunchError
from zeroshard_testing.marker import leave_out_rank_fixtures, place_of, spec_of
from zeroshard_testing.outcome import Outcome
from zeroshard_testing.pool import Pool
from zeroshard_testing.rank_pytest import description_of
from zeroshard_testing.spec import CHECKS, RanksSpec, SpecError, parse_checks, parse_marker
from zeroshard_testing.verdict import RanksFailure, Verdict, judge

_WORKER_OUTPUT = "zeroshard_testing"

running_sessions: list[RanksSession] = []
"""The runners of rank tests and calls in this process, the innermost last."""


class RanksSession:
    """Runs tests of a pytest session, or calls, on ranks. Starts processes on first use.

    Under pytest it is a plugin, whose hooks send marked tests to their ranks. ``config`` is None outside pytest;
    ``temporary`` returns a folder for temporary files.
    """

    def __init__(self, config: pytest.Config | None, temporary: Callable[[], Path]) -> None:
        self._config = config
        self._temporary = temporary
        self._pool: Pool | None = None
        self._item: pytest.Item | None = None
        self._next_item: pytest.Item | None = None
        # Errors of workers after their test had its verdict, as text.
        self._late_deaths: list[str] = []
        # The checks that are off, for the header.
        self._said: list[str] = []
        self._checks_off, self._checks_on = parse_checks("" if config is None else config.getini("ranks_checks"))
        self._timeout = 60.0
        if config is not None:
            given = config.getoption("--ranks-timeout")
            self._timeout = float(config.getini("ranks_timeout") if given is None else given)
            if not 0 < self._timeout < math.inf:
                raise ValueError(f"a timeout must be a positive number of seconds, not {self._timeout:g}")
        if "races" in self._checks_off:
            raise SpecError("no:races cannot be set here: set it in a test's marker, with the reason")

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Do not apply the parameters of rank fixtures to tests that are not marked."""
        if metafunc.definition.get_closest_marker("ranks") is None:
            leave_out_rank_fixtures(metafunc.definition)

    def pytest_report_collectionfinish(self, config: pytest.Config, items: list[pytest.Item]) -> list[str]:
        """Return header lines that name the checks that are on, and why others are off."""
        if config.option.collectonly or not any(spec_of(item) for item in items):
            return []
        off = dict.fromkeys(self._checks_off, "by the ini file")
        try:
            off |= self._boot().checks_off()
        except LaunchError:
            # The first test reports the error, with the output of the process.
            return []
        on = [name for name in (*CHECKS, *self._checks_on) if name not in off]
        self._said = [f"ranks: check off: {name} ({reason})" for name, reason in off.items()]
        return [f"ranks: checks on: {', '.join(on) or 'none'}", *self._said]

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """Refuse unsupported options, start the forkserver while other tests run, and end workers at the end."""
        # The controller of pytest-xdist has no items.
        if not session.config.option.collectonly and any(spec_of(item) for item in getattr(session, "items", ())):
            if session.config.getoption("usepdb") or session.config.getoption("trace", default=False):
                raise pytest.UsageError(
                    "--pdb and --trace do not work in tests marked with ranks, which run in worker processes without a "
                    "terminal. Run sleep in another terminal, such as /dev/pts/3, call pdb.Pdb(stdin=open('/dev/pts/3'"
                    "), stdout=open('/dev/pts/3', 'w')).set_trace() in the test, and pass --ranks-timeout=3600."
                )
            self._boot()
        try:
            return (yield)
        finally:
            # Before pytest-cov, which wraps this, combines the data of the workers.
            if self._pool is not None:
                self._pool.finish()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Record the test to which the next calls belong, and the test after it."""
        self._item, self._next_item = item, nextitem

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Set up no fixtures here. Skip a test whose backend is missing, or fail it if the backend is required."""
        spec = spec_of(item)
        marks = [mark for mark in getattr(getattr(item, "callspec", None), "marks", ()) if mark.name == "ranks"]
        if any(spec not in parse_marker(mark.args, mark.kwargs) for mark in marks):
            pytest.fail("the ranks marker goes on a function, a class or a module, not on a parameter", False)
        if spec is None and item.get_closest_marker("ranks") is not None:
            pytest.fail("only functions and methods of plain classes can run on ranks, if marked at collection", False)
        if spec is None:
            return
        item.fixturenames = []  # type: ignore[attr-defined]  # of a function; nothing is set up here
        if hasattr(getattr(item, "obj", None), "hypothesis"):
            # Its plugin would request the test's fixtures.
            item.obj = partial(item.obj)  # type: ignore[attr-defined]  # of a function, too
        reason = self._why_unavailable(spec)
        if reason is not None and spec.backend_name in item.config.getoption("--ranks-require"):
            pytest.fail(f"{reason} (--ranks-require={spec.backend_name})", pytrace=False)
        if reason is not None:
            pytest.skip(reason)

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Run a marked test on its ranks instead of here."""
        spec = spec_of(pyfuncitem)
        if spec is None:
            return None
        keep = [] if spec.isolation == "process" else _places(self._next_item)
        place, path = place_of(pyfuncitem), str(pyfuncitem.path)
        message = {"title": pyfuncitem.nodeid, "place": place, "path": path, "keep": keep}
        verdict, _ = self._carry_out(spec, message)
        if verdict.kind == "skipped":
            pytest.skip(verdict.summary)
        if verdict.kind == "xfailed":
            pytest.xfail(verdict.summary)
        return True

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self) -> None:
        """Tear down the fixtures on ranks that the next test does not need. An error there fails this test."""
        errors = [] if self._pool is None else self._pool.tear_down(_places(self._next_item))
        if errors:
            pytest.fail("\n\n".join(errors), pytrace=False)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:  # noqa: ANN401 - of pytest-xdist, which may not be installed
        """Keep the output of a worker of pytest-xdist that has ended."""
        deaths, said = getattr(node, "workeroutput", {}).get(_WORKER_OUTPUT, ([], []))
        self._late_deaths += deaths
        self._said += [line for line in said if line not in self._said]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the run if a worker died after its test."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[_WORKER_OUTPUT] = self._late_deaths, self._said
        if self._late_deaths and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Report workers that died after their test, and the header lines of workers of pytest-xdist."""
        if terminalreporter.config.pluginmanager.has_plugin("dsession"):
            for line in self._said:
                terminalreporter.write_line(line)
        for death in self._late_deaths:
            terminalreporter.write_line(f"ERROR: {death}", red=True)

    def pytest_unconfigure(self) -> None:
        """End all processes."""
        self.close()
        running_sessions.remove(self)

    def call(self, title: str, spec: RanksSpec, payload: bytes) -> Mapping[int, bytes]:
        """Run a pickled call on ranks, in a test or outside pytest. Return the results for `torch.load`, by rank."""
        if (reason := self._why_unavailable(spec)) is not None:
            raise RuntimeError(reason)
        # Workers import the module of the function as pytest has imported it here.
        path = str(self._item.path) if isinstance(self._item, pytest.Function) else ""
        message = {"title": title, "place": title, "path": path, "keep": []}
        return self._carry_out(spec, message, payload)[1]

    def close(self) -> None:
        """End all processes. Safe to call repeatedly."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _boot(self) -> Pool:
        """Return the pool. The first call starts its forkserver in the background."""
        if self._pool is None:
            folder = self._temporary() / "ranks"
            folder.mkdir(exist_ok=True)
            self._pool = Pool(_launcher(self._config), folder, coverage_request(self._config), self._late_deaths)
        return self._pool

    def _why_unavailable(self, spec: RanksSpec) -> str | None:
        if spec.backend in NEED_NO_PROBE:
            return None
        try:
            if spec.backend == "emulated":
                return self._why_not_emulated
            return why_unavailable(spec, self._machine)
        except LaunchError as error:
            self._cannot_launch("looking for the backends of this machine", error)

    @cached_property
    def _machine(self) -> Mapping[str, Any]:
        return self._boot().ask_store({"op": "machine"})

    @cached_property
    def _why_not_emulated(self) -> str | None:
        from zeroshard_testing.emulated.build import why_not_built

        reporter = self._config and self._config.pluginmanager.get_plugin("terminalreporter")
        return why_not_built(self._boot().ask_store, reporter.write_line if reporter else lambda _: None)

    def _cannot_launch(self, what: str, error: LaunchError) -> NoReturn:
        self.close()
        if self._config is None:
            raise error
        pytest.fail(f"{what}: {error}", pytrace=False)

    def _carry_out(
        self, spec: RanksSpec, message: Mapping[str, object], payload: bytes = b""
    ) -> tuple[Verdict, Mapping[int, bytes]]:
        title = str(message["title"])
        spec = replace(
            spec,
            timeout=spec.timeout or self._timeout,
            checks_off=tuple(sorted({*spec.checks_off, *self._checks_off})),
            checks_on=tuple(sorted({*spec.checks_on, *self._checks_on})),
        )
        try:
            outcomes, returned = self._boot().run(spec, message, payload)
        except LaunchError as error:
            self._cannot_launch(title, error)
        if self._item is not None:
            _repeat(self._item, outcomes)
        verdict = judge(outcomes)
        if verdict.kind == "failed" or (payload and verdict.kind != "passed"):
            chosen = None if self._config is None else self._config.getoption("--ranks-logs")
            folder = _write_log_files(Path(chosen or self._temporary() / "ranks-logs"), title, outcomes)
            off = sorted({*spec.checks_off, *self._boot().checks_off()})
            note = f"\n\nChecks that were off: {', '.join(off)}" if off else ""
            raise RanksFailure(replace(verdict, text=f"{verdict.text}{note}\n\nA log file for each rank: {folder}"))
        return verdict, returned


def _places(item: pytest.Item | None) -> Sequence[str]:
    """Return the places of the nodes that a test needs."""
    return [] if item is None else [place_of(node) for node in item.listchain()[:-1]]


def _launcher(config: pytest.Config | None) -> Launcher:
    inherit_output = config is None or config.getoption("capture", default="fd") == "no"
    # One thread per rank, because the ranks share the machine. Read once, when torch is loaded.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    forks = config is None or config.getoption("--ranks-launch") != "spawn"
    return Launcher(description_of(config), environment, forks=forks, inherit_output=inherit_output)


def _repeat(item: pytest.Item, outcomes: Mapping[int, Outcome]) -> None:
    """Make pytest show the output, logs, records and warnings of the ranks; each record and warning once."""
    for rank, outcome in outcomes.items():
        for title, text in outcome.sections:
            item.add_report_section("call", f"{title.removeprefix('Captured ')} rank {rank}", text)
    item.user_properties += dict.fromkeys(one for outcome in outcomes.values() for one in outcome.properties)
    for warning in dict.fromkeys(one for outcome in outcomes.values() for one in outcome.warnings):
        _repeat_warning(*warning)


def _repeat_warning(category: str, text: str, filename: str, line: int) -> None:
    module, _, name = category.rpartition(".")
    known = getattr(sys.modules.get(module), name, None)
    if not isinstance(known, type) or not issubclass(known, Warning):
        text, known = f"{category}: {text}", UserWarning
    with warnings.catch_warnings():
        # The rank has already applied the filters.
        warnings.simplefilter("always")
        warnings.warn_explicit(text, known, filename, line)


def _write_log_files(folder: Path, test: str, outcomes: Mapping[int, Outcome]) -> Path:
    """Write the outcome of each rank into ``rank0.log`` and so on, in the test's folder, and return the folder."""
    own = folder / (re.sub(r"[^\w.\[\]-]+", "_", test)[-150:] or "test")
    own.mkdir(parents=True, exist_ok=True)
    for old in own.glob("rank*.log"):
        old.unlink()
    for rank, outcome in outcomes.items():
        parts = [
            f"{test}, rank {rank}: {outcome.predicate or outcome.kind}",
            outcome.detail,
            *(f"{title}:\n{text}" for title, text in outcome.sections),
        ]
        (own / f"rank{rank}.log").write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
    return own
