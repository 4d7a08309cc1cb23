"""The pytest plugin: options, the ``ranks`` marker, and where a marked test leaves for its ranks."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from zeroshard_testing.backends import NEED_NO_PROBE, why_unavailable
from zeroshard_testing.launcher import LaunchError
from zeroshard_testing.marker import RANK_FIXTURES, parametrize, spec_of
from zeroshard_testing.rank_fixtures import is_rank_fixture
from zeroshard_testing.report import RanksFailure, failure_report
from zeroshard_testing.session import RanksSession, set_running_session
from zeroshard_testing.spec import BACKENDS, CHECKS, SpecError

_MARKER_HELP = (
    'ranks(*world_sizes, backend="gloo", isolation="group", timeout=60, fake_rank=0, init=True, checks=""): run the '
    "test on every rank of a process group, once for each world size."
)
_WORKER_OUTPUT = "zeroshard_testing"
_session_key = pytest.StashKey[RanksSession]()
_unavailable_key = pytest.StashKey[str]()
_late_deaths_key = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    names = ", ".join(BACKENDS.values())
    group = parser.getgroup("ranks", "multi-rank tests")
    group.addoption("--ranks-backend", metavar="NAME", help=f"run the tests of one backend only ({names}, ...)")
    group.addoption(
        "--ranks-require",
        metavar="NAMES",
        default="",
        help=f"fail, instead of skipping, tests whose backend is missing here: a comma-separated list of {names}, ...",
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
    parser.addini(
        "ranks_checks", f"checks to turn off, of {', '.join(CHECKS)}: such as 'no:messages no:deadlock'", "args", []
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker and check the options."""
    config.addinivalue_line("markers", _MARKER_HELP)
    try:
        session = RanksSession(config, lambda: _temporary(config))
    except SpecError as error:
        raise pytest.UsageError(f"ranks_checks in the ini file: {error}") from error
    config.stash[_session_key] = session
    config.stash[_late_deaths_key] = []
    set_running_session(session)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each world size and backend that the nearest marker names."""
    parametrize(metafunc)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select by backend, find out which backends are missing, and keep rank fixtures from tests that are not marked."""
    chosen = config.getoption("--ranks-backend")
    known = {*BACKENDS.values(), *(spec.backend_name for item in items if (spec := spec_of(item)) is not None)}
    for name in _required(config):
        if name not in known and not config.option.collectonly:
            raise pytest.UsageError(f"--ranks-require: no test asks for a backend {name!r}; there are {sorted(known)}")
    if chosen is not None:
        kept = [item for item in items if (spec := spec_of(item)) is not None and spec.backend_name == chosen]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
    for item in items:
        if spec_of(item) is None and isinstance(item, pytest.Function):
            _leave_out_rank_fixtures(item)
    _mark_unavailable(config, items)


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Say which checks are on, and why others are not."""
    if config.option.collectonly or not any(spec_of(item) for item in items):
        return []
    session = config.stash[_session_key]
    off = dict.fromkeys(session.checks_off, "by the ini file")
    try:
        off |= session.boot().checks_off()
    except LaunchError:
        # The first test says so, with what the process wrote.
        return []
    on = [name for name in CHECKS if name not in off]
    lines = [f"ranks: checks on: {', '.join(on) or 'none'}"]
    return [*lines, *(f"ranks: check off: {name} ({reason})" for name, reason in off.items())]


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Refuse what cannot work, boot the forkserver while other tests run, and let the workers end behind the last."""
    # The controller of pytest-xdist has no items.
    ranks = session.config.stash[_session_key]
    if not session.config.option.collectonly and any(spec_of(item) for item in getattr(session, "items", ())):
        if session.config.getoption("usepdb") or session.config.getoption("trace", default=False):
            raise pytest.UsageError(
                "--pdb and --trace cannot reach tests marked with ranks: those run in worker processes without a "
                "terminal. Deselect them, or run without the option: a failure shows the traceback of every rank."
            )
        ranks.boot()
    try:
        return (yield)
    finally:
        # Before pytest-cov, which is around this, combines what the workers have measured.
        ranks.finish()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Remember which test comes next."""
    item.config.stash[_session_key].begin(item, nextitem)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave fixtures to the ranks; skip a test whose backend is missing, or fail it if the backend is required."""
    spec = spec_of(item)
    if spec is None:
        if item.get_closest_marker("ranks") is not None:
            pytest.fail("only functions and methods of plain classes can run on ranks, not this kind of test", False)
        asked = [name for name in RANK_FIXTURES if name in getattr(item, "fixturenames", ())]
        if asked:
            pytest.fail(
                f"{item.nodeid} asks for a rank's fixture, {asked[0]!r}: mark it with @pytest.mark.ranks(2)", False
            )
        return
    item.fixturenames = []  # type: ignore[attr-defined]  # a function's; nothing is set up here
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


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Tear down on ranks what the next test does not need."""
    item.config.stash[_session_key].tear_down()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the ranks' failures in place of the controller's own traceback."""
    report = yield
    failure = None if call.excinfo is None else call.excinfo.value
    if isinstance(failure, RanksFailure):
        if failure.verdict.decided_by_ranks and hasattr(report, "wasxfail"):
            # The ranks' pytest has judged already whether this failure was expected.
            report.outcome = "failed"
            del report.wasxfail
        if report.outcome == "failed":
            report.longrepr = failure_report(failure)
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:  # noqa: ANN401 - of pytest-xdist, which may not be there
    """Take what a worker of pytest-xdist has to tell at its end."""
    output = getattr(node, "workeroutput", {}).get(_WORKER_OUTPUT, [])
    node.config.stash[_late_deaths_key].extend(output)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let no run succeed in which a worker died behind a test's back."""
    deaths = _late_deaths(session.config)
    worker_output = getattr(session.config, "workeroutput", None)
    if worker_output is not None:
        worker_output[_WORKER_OUTPUT] = deaths
    if deaths and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Tell of workers that died behind a test's back."""
    for death in _late_deaths(config):
        terminalreporter.write_line(f"ERROR: {death}", red=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End every process."""
    session = config.stash.get(_session_key, None)
    if session is not None:
        session.close()
        set_running_session(None)


def _refused(name: str) -> Any:  # noqa: ANN401 - pytest's fixture object, whose type is private
    def fixture(request: pytest.FixtureRequest) -> None:
        pytest.fail(
            f"{request.node.nodeid} asks for a rank's fixture, {name!r}: mark it with @pytest.mark.ranks(2)", False
        )

    fixture.__doc__ = f"{name} of the rank, in tests marked with ranks."
    return pytest.fixture(fixture, name=name)


rank, world_size, process_group, device, faults, ranks_tmp_path = map(_refused, RANK_FIXTURES)


def _late_deaths(config: pytest.Config) -> list[str]:
    return [*config.stash[_late_deaths_key], *config.stash[_session_key].late_deaths()]


def _temporary(config: pytest.Config) -> Path:
    # As the fixture tmp_path_factory does.
    factory: pytest.TempPathFactory = config._tmp_path_factory  # type: ignore[attr-defined]
    return factory.getbasetemp()


def _leave_out_rank_fixtures(item: pytest.Function) -> None:
    """Take rank fixtures that are ``autouse`` away from a test that does not run on ranks."""
    info = item._fixtureinfo
    automatic = [
        name
        for name in info.names_closure
        if name not in info.initialnames or name not in info.argnames
        if (known := info.name2fixturedefs.get(name)) and is_rank_fixture(known[-1].func)
    ]
    if automatic:
        # What they would have asked for is set up only if something else asks for it.
        item.fixturenames = [name for name in item.fixturenames if name not in {*automatic, *RANK_FIXTURES}]


def _mark_unavailable(config: pytest.Config, items: list[pytest.Item]) -> None:
    doubtful = [
        (item, spec) for item in items if (spec := spec_of(item)) is not None and spec.backend not in NEED_NO_PROBE
    ]
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
