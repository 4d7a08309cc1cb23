"""The pytest plugin: options, the ``ranks`` marker, and rank fixtures that fail tests without the marker."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

# Private to pytest. pytest-xdist can send it, with the cause, from a worker to its controller.
from _pytest._code.code import ReprEntryNative, ReprExceptionInfo, ReprFileLocation, ReprTraceback

from zeroshard_testing.marker import RANK_FIXTURES, leave_out_rank_fixtures, parametrize, spec_of
from zeroshard_testing.session import RanksSession, running_sessions
from zeroshard_testing.spec import BACKENDS, CHECKS, SpecError
from zeroshard_testing.verdict import RanksFailure

_MARKER_HELP = (
    'ranks(*world_sizes, backend="gloo", isolation="group", timeout=60, fake_rank=0, init=True, checks="", reason=""): '
    "run the test on every rank of a process group, once for each world size."
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    names = ", ".join(BACKENDS.values())
    group = parser.getgroup("ranks", "multi-rank tests")
    group.addoption("--ranks-backend", metavar="NAME", help=f"run the tests of one backend only ({names}, ...)")
    group.addoption(
        "--ranks-require",
        metavar="NAMES",
        default="",
        type=lambda names: [name.strip() for name in names.split(",") if name.strip()],
        help=f"comma-separated backends whose tests fail, not skip, if the backend is missing: {names}, ...",
    )
    group.addoption("--ranks-logs", metavar="DIR", help="folder for logs of failing tests; default: pytest's")
    group.addoption("--ranks-launch", choices=["forkserver", "spawn"], default="forkserver", help="how workers start")
    group.addoption("--ranks-timeout", metavar="SECONDS", type=float, help="timeout of tests whose marker sets none")
    parser.addini("ranks_timeout", "timeout in seconds of tests on ranks whose marker sets none", default="60")
    parser.addini("ranks_checks", f"checks to turn off, such as no:messages: {', '.join(CHECKS)}", "args", [])


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker and check the options."""
    config.addinivalue_line("markers", _MARKER_HELP)
    try:
        # As the fixture tmp_path_factory does.
        session = RanksSession(config, lambda: config._tmp_path_factory.getbasetemp())  # type: ignore[attr-defined]
    except ValueError as error:
        option = "ranks_checks" if isinstance(error, SpecError) else "--ranks-timeout, or ranks_timeout"
        raise pytest.UsageError(f"{option} in the ini file: {error}") from error
    config.pluginmanager.register(session)
    running_sessions.append(session)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test for each world size and backend that the nearest marker names."""
    parametrize(metafunc)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select by backend, and keep rank fixtures from tests that are not marked."""
    chosen = config.getoption("--ranks-backend")
    backends = {item: spec.backend_name for item in items if (spec := spec_of(item)) is not None}
    known = {*BACKENDS.values(), *backends.values()}
    for name in config.getoption("--ranks-require"):
        if name not in known and not config.option.collectonly:
            raise pytest.UsageError(f"--ranks-require: no test uses backend {name!r}; choose from {sorted(known)}")
    if chosen is not None:
        config.hook.pytest_deselected(items=[item for item in items if backends.get(item) != chosen])
        items[:] = [item for item in items if backends.get(item) == chosen]
    for item in items:
        if item not in backends and hasattr(item, "_fixtureinfo"):
            # Repeated for doctests, and because pytest restores the fixtures of tests with parameters.
            leave_out_rank_fixtures(item)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the failures of the ranks instead of the controller's traceback."""
    report = yield
    failure = None if call.excinfo is None else call.excinfo.value
    if isinstance(failure, RanksFailure):
        if spec_of(item) and hasattr(report, "wasxfail"):
            # The pytest of each rank has handled expected failures; a death or a timeout is never expected.
            report.outcome = "failed"
            del report.wasxfail
        if report.outcome == "failed":
            # The verdict's text, and the root cause for the short summary.
            lines = [f"{line}\n" for line in failure.verdict.text.splitlines()]
            crash = ReprFileLocation(failure.verdict.path, failure.verdict.line, failure.verdict.summary)
            report.longrepr = ReprExceptionInfo(ReprTraceback([ReprEntryNative(lines)], None, "native"), crash)
    return report


def _refused(name: str) -> Any:  # noqa: ANN401 - pytest's fixture object, whose type is private
    def fixture() -> None:
        pytest.fail(f"the test requests the rank fixture {name!r}: mark it with @pytest.mark.ranks(2)", False)

    fixture.__doc__ = f"The rank fixture {name}, for tests marked with ranks."
    # Fixtures of all scopes may request it.
    return pytest.fixture(fixture, name=name, scope="session")


(rank, world_size, process_group, device, faults, ranks_tmp_path, device_costs, host_never_waits) = map(
    _refused, RANK_FIXTURES
)
