"""The pytest plugin: options, the ``ranks`` marker, and where a marked test leaves for its ranks."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

from zeroshard_testing.backends import NEEDS_PROBE, why_unavailable
from zeroshard_testing.fixtures import (
    SPEC_FIXTURE,
    _ranks_spec,
    device,
    faults,
    process_group,
    rank,
    ranks_tmp_path,
    world_size,
)
from zeroshard_testing.launcher import LaunchError
from zeroshard_testing.outcome import names_of
from zeroshard_testing.report import RanksFailure, failure_report
from zeroshard_testing.session import RanksSession, set_running_session
from zeroshard_testing.spec import BACKENDS, RanksSpec, SpecError, parse_marker

__all__ = ["_ranks_spec", "device", "faults", "process_group", "rank", "ranks_tmp_path", "world_size"]

_MARKER_HELP = (
    'ranks(*world_sizes, backend="gloo", isolation="group", timeout=60, fake_rank=0): run the test on every rank of a '
    "process group, once for each world size."
)
_session_key = pytest.StashKey[RanksSession]()
_unavailable_key = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    names = ", ".join(BACKENDS.values())
    group = parser.getgroup("ranks", "multi-rank tests")
    group.addoption(
        "--ranks-backend",
        metavar="NAME",
        choices=list(BACKENDS.values()),
        help=f"run the tests of one backend only ({names})",
    )
    group.addoption(
        "--ranks-require",
        metavar="NAMES",
        default="",
        help=f"fail, instead of skipping, tests whose backend is missing here: a comma-separated list of {names}",
    )
    group.addoption(
        "--ranks-logs",
        metavar="DIR",
        help="where a failing test leaves a log file for each rank, by default pytest's folder for temporary files",
    )
    group.addoption(
        "--ranks-launch",
        choices=["forkserver", "spawn"],
        default="forkserver" if hasattr(os, "fork") else "spawn",
        help="how worker processes are started: forked from one that has torch loaded, or each by itself",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker and check the options."""
    config.addinivalue_line("markers", _MARKER_HELP)
    for name in _required(config):
        if name not in BACKENDS.values():
            raise pytest.UsageError(
                f"--ranks-require: unknown backend {name!r}; choose from {', '.join(BACKENDS.values())}"
            )
    config.stash[_session_key] = RanksSession(config)
    set_running_session(config.stash[_session_key])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each world size and backend that the nearest marker names."""
    specs = _marked_specs(metafunc.definition)
    if specs:
        metafunc.fixturenames.append(SPEC_FIXTURE)
        metafunc.parametrize(SPEC_FIXTURE, specs, indirect=True, ids=[spec.test_id for spec in specs])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select by backend, and find out which backends are missing."""
    chosen = config.getoption("--ranks-backend")
    if chosen is not None:
        kept = [item for item in items if (spec := spec_of(item)) is not None and spec.backend_name == chosen]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
    for item in items:
        if spec_of(item) is not None and isinstance(item, pytest.Function) and item.cls is not None:
            config.stash[_session_key].remember(item.cls)
    _mark_unavailable(config, items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Refuse what cannot work, and boot the forkserver while other tests run."""
    # The controller of pytest-xdist has no items.
    if session.config.option.collectonly or not any(spec_of(item) for item in getattr(session, "items", ())):
        return
    if session.config.getoption("usepdb") or session.config.getoption("trace", default=False):
        raise pytest.UsageError(
            "--pdb and --trace cannot reach tests marked with ranks: those run in worker processes without a terminal. "
            "Deselect them, or run without the option: a failure shows the traceback of every rank."
        )
    session.config.stash[_session_key].boot()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose backend is missing, or fail it if the backend is required."""
    item.config.stash[_session_key].begin(item)
    spec = spec_of(item)
    if spec is None:
        if item.get_closest_marker("ranks") is not None:
            pytest.fail("only functions and methods of plain classes can run on ranks, not this kind of test", False)
        return
    reason = item.stash.get(_unavailable_key, None)
    if reason is None:
        return
    if spec.backend_name in _required(item.config):
        pytest.fail(f"{reason} (--ranks-require={spec.backend_name})", pytrace=False)
    pytest.skip(reason)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test on its ranks instead of here."""
    spec = spec_of(pyfuncitem)
    if spec is None:
        return None
    pyfuncitem.config.stash[_session_key].run(pyfuncitem, spec)
    return True


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    """Show the ranks' failures in place of the controller's own traceback."""
    failure = None if call.excinfo is None else call.excinfo.value
    if isinstance(failure, RanksFailure):
        _stand_in_for_expected(item, call, failure)
    outcome = yield
    if isinstance(failure, RanksFailure) and outcome.get_result().outcome == "failed":
        outcome.get_result().longrepr = failure_report(failure)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let no run succeed in which a worker died behind a test's back."""
    if session.config.stash[_session_key].late_deaths() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Tell of workers that died behind a test's back."""
    for death in config.stash[_session_key].late_deaths():
        terminalreporter.write_line(f"ERROR: {death}", red=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End every process."""
    session = config.stash.get(_session_key, None)
    if session is not None:
        session.close()
        set_running_session(None)


def spec_of(item: pytest.Item) -> RanksSpec | None:
    """Return how a collected test is to run on ranks, None if it is not marked."""
    call_spec = getattr(item, "callspec", None)
    return None if call_spec is None else call_spec.params.get(SPEC_FIXTURE)


def _stand_in_for_expected(item: pytest.Item, call: pytest.CallInfo[None], failure: RanksFailure) -> None:
    """Where ``xfail(raises=...)`` names what the ranks raised, let pytest see an exception of that class."""
    for mark in item.iter_markers("xfail"):
        raises = mark.kwargs.get("raises") or ()
        for kind in raises if isinstance(raises, tuple) else (raises,):
            if names_of(kind)[0] in failure.verdict.error:
                error = kind.__new__(kind).with_traceback(failure.__traceback__)
                call.excinfo = pytest.ExceptionInfo.from_exception(error)


def _marked_specs(definition: pytest.Item) -> list[RanksSpec]:
    marks = list(definition.iter_markers_with_node("ranks"))
    # Markers of one node add up; a nearer node's replace those of the farther ones.
    nearest = [mark for node, mark in marks if node is marks[0][0]]
    try:
        specs = [spec for mark in reversed(nearest) for spec in parse_marker(mark.args, mark.kwargs)]
    except (SpecError, TypeError) as error:
        raise pytest.Collector.CollectError(f"{definition.nodeid}: @pytest.mark.ranks: {error}") from error
    return list(dict.fromkeys(specs))


def _mark_unavailable(config: pytest.Config, items: list[pytest.Item]) -> None:
    doubtful = [(item, spec) for item in items if (spec := spec_of(item)) is not None and spec.backend in NEEDS_PROBE]
    if not doubtful or config.option.collectonly:
        return
    try:
        machine = config.stash[_session_key].machine()
    except LaunchError as error:
        raise pytest.UsageError(f"cannot find out which backends there are: {error}") from error
    for item, spec in doubtful:
        reason = why_unavailable(spec, machine)
        if reason is not None:
            item.stash[_unavailable_key] = reason


def _required(config: pytest.Config) -> list[str]:
    return [name.strip() for name in config.getoption("--ranks-require").split(",") if name.strip()]
