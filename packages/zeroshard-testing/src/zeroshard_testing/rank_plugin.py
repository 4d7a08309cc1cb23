"""The plugin of a worker's pytest. It runs the tests that the controller names, and keeps their reports to return."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import wraps
from inspect import iscoroutinefunction
from itertools import dropwhile
from typing import Any

import pytest

from zeroshard_testing import outcome as kinds
from zeroshard_testing.marker import parametrize, spec_of
from zeroshard_testing.outcome import is_echo
from zeroshard_testing.process_state import ProcessState
from zeroshard_testing.stacks import is_harness


@dataclass
class Reports:
    """The result of one test: the reports of its phases and subtests, and the first failure in one line.

    A warning is its category, text, file and line. The test may have called `pytest.xfail`.
    """

    all: list[pytest.TestReport] = field(default_factory=list)
    summary: str = ""
    warnings: list[tuple[str, str, str, int]] = field(default_factory=list)
    called_xfail: bool = False


class RankPlugin:
    """The plugin of every worker, registered as `name`. It calls ``body`` instead of collecting tests."""

    name = "zeroshard-rank"
    state: ProcessState
    """The state to restore before each test. The worker sets it before the first test."""

    def __init__(self, body: Callable[[pytest.Session], None]) -> None:
        self._body = body
        self._reports = Reports()
        self.around_call: Callable[[], AbstractContextManager[None]] = nullcontext
        """The context of the code of a test, which may raise at its end. The worker sets it for each test."""

    def run(self, item: pytest.Item, nextitem: Any) -> Reports:  # noqa: ANN401 - an item, or an object with its listchain()
        """Run setup, call and teardown of a test inside all wrappers of pytest's protocol, and return the reports."""
        self._reports = Reports()
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        return self._reports

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        """Serve the controller instead of collecting tests."""
        self._body(session)
        return True

    # Runs the tests that the controller has made.
    pytest_generate_tests = staticmethod(parametrize)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: Any) -> bool:  # noqa: ANN401 - see run
        """Run a test, and keep its reports."""
        # Private to pytest; pytest-rerunfailures and others call it too.
        from _pytest.runner import runtestprotocol

        self._reports.all += runtestprotocol(item, log=False, nextitem=nextitem)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Fail a test with the error that its backend found, and a property with its first counterexample."""
        __tracebackhide__ = True
        failures: list[BaseException] = []
        with suppress(_FoundError), _until_first_failure(item, failures), self.around_call():
            return (yield)
        raise failures[0]

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:  # noqa: ANN401 - see pytest
        """Keep the settings of a fixture of a wider scope than one test until its teardown."""
        if fixturedef.scope == "function":
            return (yield)
        before = self.state.seen()
        try:
            return (yield)
        finally:
            fixturedef.addfinalizer(self.state.hold(before))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the reports of subtests, which pytest reports separately."""
        self._reports.all.append(report)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Describe the failure in one line. Leave out the source for errors that are only a consequence."""
        if call.excinfo is None:
            return (yield)
        self._reports.called_xfail |= isinstance(call.excinfo.value, pytest.xfail.Exception)
        summary = _summary(call.excinfo)
        style = item.config.option.tbstyle
        if is_echo(summary):
            # The source explains nothing, and pytest would parse all of torch.distributed to show it.
            item.config.option.tbstyle = "native"
            entries = dropwhile(lambda entry: is_harness(str(entry.path)), call.excinfo.traceback)
            call.excinfo.traceback = type(call.excinfo.traceback)([*entries] or call.excinfo.traceback)
        try:
            report = yield
        finally:
            item.config.option.tbstyle = style
        is_found = getattr(call.excinfo.value, "is_found_by_harness", False)
        if report.failed and is_found and all(is_harness(str(entry.path)) for entry in call.excinfo.traceback):
            # An error that was found after the test has no line in it; its text says where.
            report.longrepr = str(call.excinfo.value)
        if report.failed and not self._reports.summary:
            self._reports.summary = summary
        return report

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        """Keep a warning for the controller, which already has the warnings of collection."""
        if when == "runtest":
            category = f"{warning_message.category.__module__}.{warning_message.category.__qualname__}"
            text = kinds.printable(str(warning_message.message))
            self._reports.warnings.append((category, text, warning_message.filename, warning_message.lineno))


class _FoundError(BaseException):
    """Ends a run of hypothesis, which would shrink an Exception."""


@contextmanager
def _until_first_failure(item: pytest.Item, failures: list[BaseException]) -> Iterator[None]:
    """End a property on several ranks at its first failure, because other ranks would wait for a rank that shrinks."""
    spec, handle = spec_of(item), getattr(getattr(item, "obj", None), "hypothesis", None)
    if handle is None or spec is None or len(spec.ranks) == 1 or iscoroutinefunction(handle.inner_test):
        yield
        return
    test = handle.inner_test

    @wraps(test)
    def test_once(*args: object, **kwargs: object) -> None:
        __tracebackhide__ = True
        try:
            test(*args, **kwargs)
        except (Exception, pytest.fail.Exception) as error:
            if type(error).__module__ == "hypothesis.errors":
                raise
            failures.append(error)
            raise _FoundError from None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handle, "inner_test", test_once)
        yield


def _summary(info: pytest.ExceptionInfo[BaseException]) -> str:
    error = info.value
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r})"
    if type(error).__name__ == "FixtureLookupError":
        return f"fixture {getattr(error, 'argname', '')!r} not found"
    lines = kinds.printable(info.exconly(tryshort=True)).splitlines()
    return lines[0] if lines else type(error).__name__
