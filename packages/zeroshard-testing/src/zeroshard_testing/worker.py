"""What runs in a rank: a loop that takes tests from the controller and reports how each of them ended."""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import io
import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import pytest

from zeroshard_testing import outcome as kinds
from zeroshard_testing.faults import Faults, begin_faults, unreached_faults
from zeroshard_testing.importing import import_test_module, is_imported
from zeroshard_testing.inbox import Inbox
from zeroshard_testing.outcome import Outcome, is_echo
from zeroshard_testing.process_state import ProcessState
from zeroshard_testing.rank_fixtures import tear_down
from zeroshard_testing.rank_state import RankState
from zeroshard_testing.rank_values import set_rank_values
from zeroshard_testing.wire import Channel, Message

if TYPE_CHECKING:
    from zeroshard_testing.observer import Observer
    from zeroshard_testing.process_group import GroupKeeper

STACK_SIGNAL = getattr(signal, "SIGUSR1", None)
"""On this signal a worker writes the Python stacks of all its threads; None where there is no such signal."""


def serve(channel: Channel, request: Message, stacks: int, journal: int, session: pytest.Session) -> None:
    """Run tests until the controller closes the channel.

    Args:
        channel: The control channel of this rank.
        request: ``port`` is where the shared store listens.
        stacks: Descriptor of the file for Python stacks.
        journal: Descriptor of the file for the latest collectives.
        session: The idle pytest session of this process.
    """
    from zeroshard_testing.collectives import watch_collectives
    from zeroshard_testing.journal import JournalWriter
    from zeroshard_testing.leftovers import Leftovers
    from zeroshard_testing.observer import Observer
    from zeroshard_testing.process_group import GroupKeeper, worker_environment
    from zeroshard_testing.waits import watch_waits

    faulthandler.enable(stacks, all_threads=True)
    if STACK_SIGNAL is not None:
        faulthandler.register(STACK_SIGNAL, stacks, all_threads=True, chain=False)
    state = ProcessState(worker_environment())
    groups = GroupKeeper(request["port"])
    faults = Faults(channel)
    waits, writer = watch_waits(faults), JournalWriter(journal)
    observer = Observer(waits, watch_collectives(writer, waits, faults), writer)
    inbox = Inbox(channel, lambda question: _answer(observer, question))
    channel.send({"op": "ready"})
    pid = os.getpid()
    while True:
        message, payload = inbox.take()
        if message["op"] == "run":
            state.restore(message)
            threads = Leftovers(waits)
            outcome = _Run(channel, message, payload, groups, session, observer, faults).outcome()
            if os.getpid() != pid:
                # A copy of this process that the test has forked speaks for nobody.
                os._exit(1)
            observer.end()
            left = threads.describe() if outcome.is_clean else None
            if left is not None:
                outcome = replace(outcome, kind=kinds.FAILED, summary=left[0], detail=left[1], moment=time.monotonic())
            for stream in (sys.stdout, sys.stderr):
                # A test may have put anything in their place.
                with contextlib.suppress(Exception):
                    stream.flush()
            # A reference left here would close the group's connections on the next test's time.
            set_rank_values({})
            ended = observer.look(message["run"], details=False)
            channel.send({"op": "outcome", "run": message["run"], **outcome.to_message(), "state": ended.to_message()})
        else:
            groups.retire()


def _answer(observer: Observer, question: Message) -> Message:
    try:
        state = observer.look(question["run"], details=question["details"])
    except Exception as error:  # noqa: BLE001 - what cannot be observed is unknown, and the thread must live on
        state = RankState(stacks=f"(this rank could not be observed: {error!r})")
    return {"op": "state", "run": question["run"], "round": question["round"], **state.to_message()}


_TracebackStyle = Literal["long", "short", "line", "no", "native", "value", "auto"]


class _Run:
    """One test on this rank."""

    def __init__(
        self,
        channel: Channel,
        message: Message,
        payload: bytes,
        groups: GroupKeeper,
        session: pytest.Session,
        observer: Observer,
        faults: Faults,
    ) -> None:
        self._channel = channel
        self._message = message
        self._payload = payload
        self._groups = groups
        self._session = session
        self._observer = observer
        self._faults = faults

    def outcome(self) -> Outcome:
        """Run the test, whatever it does."""
        try:
            call = self._prepared()
            self._under_pytest(call)
            outcome = Outcome(kinds.PASSED, moment=time.monotonic())
            if unreached := unreached_faults(self._faults):
                text = f"left faults unreached: {', '.join(unreached)}"
                outcome = Outcome(kinds.FAILED, text, moment=time.monotonic())
        except BaseException as error:  # noqa: BLE001 - whatever a test raises is its outcome
            outcome = self._of_exception(error)
        try:
            tear_down()
        except BaseException as error:  # noqa: BLE001 - as above
            if outcome.is_clean:
                outcome = self._of_exception(error)
        return replace(outcome, warnings=self._take_warnings())

    def _take_warnings(self) -> tuple[tuple[str, str, str, int], ...]:
        recorder = self._session.config.pluginmanager.get_plugin(ProtocolPlugin.name)
        return recorder.take_warnings() if isinstance(recorder, ProtocolPlugin) else ()

    def _prepared(self) -> Callable[[], object]:
        message = self._message
        modules = [*message["conftests"], message["module"]]
        if not all(is_imported(*module) for module in modules):
            # The time that imports take is not the test's.
            self._channel.send({"op": "importing", "run": message["run"]})
            for module in modules:
                import_test_module(*module)
            self._channel.send({"op": "imported", "run": message["run"]})
        owner: Any = import_test_module(*message["module"])
        self._observer.begin(message["run"], message["timeout"])
        self._groups.begin(
            message["group"], message["backend"], message["rank"], message["world_size"], message["timeout"]
        )
        begin_faults(self._faults, message["run"], message["rank"])
        set_rank_values({**_rank_values(message), "faults": self._faults})
        # Sent by the controller that started this process, over a socket that nobody else has.
        arguments, attributes = pickle.loads(self._payload)  # noqa: S301 - see above
        for name in message["classes"]:
            owner = getattr(owner, name)
        if message["classes"]:
            owner = owner()
            vars(owner).update(attributes)
        function = getattr(owner, message["function"])
        return lambda: _finished(function(**arguments))

    def _under_pytest(self, call: Callable[[], object]) -> None:
        """Call within pytest's own wrappers, which explain failing assertions and apply warning filters."""
        nodeid = self._message["nodeid"].removesuffix(" (call)")
        item = _RankItem.from_parent(self._session, name=self._message["name"], nodeid=nodeid, call=call)
        for arguments in self._message["filterwarnings"]:
            item.add_marker(pytest.mark.filterwarnings(*arguments))
        hook = self._session.config.hook
        hook.pytest_runtest_protocol(item=item, nextitem=None)
        if item.error is not None:
            raise item.error

    def _of_exception(self, error: BaseException) -> Outcome:
        moment = time.monotonic()
        if isinstance(error, pytest.skip.Exception):
            return Outcome(kinds.SKIPPED, error.msg or "", moment=moment)
        if isinstance(error, pytest.xfail.Exception):
            return Outcome(kinds.XFAILED, error.msg or "", moment=moment)
        info = pytest.ExceptionInfo.from_exception(error.with_traceback(_user_part(error.__traceback__)))
        summary = (info.exconly(tryshort=True).splitlines() or [type(error).__name__])[0]
        if isinstance(error, pytest.fail.Exception) and not error.pytrace:
            return Outcome(kinds.FAILED, summary, error.msg or "", moment)
        # The source around a consequence explains nothing, and pytest would parse all of torch.distributed to show it.
        style: _TracebackStyle = "native" if is_echo(summary) else self._message["tb_style"]
        detail, path, line = _rendered(info, style, self._message["showlocals"], self._session.config)
        if isinstance(error, SystemExit):
            summary = f"called sys.exit({error.code!r})"
        return Outcome(kinds.FAILED, summary, detail, moment, path, line)


class _RankItem(pytest.Item):
    """The test as pytest's hooks in this process see it."""

    def __init__(self, *, call: Callable[[], object], **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(**kwargs)
        self.call = call
        self.error: BaseException | None = None

    def runtest(self) -> None:
        self.call()


class ProtocolPlugin:
    """Replaces pytest's setup, call and teardown by the one call, inside all wrappers of the protocol.

    Attributes:
        name: The name to register it by.
    """

    name = "zeroshard-rank-protocol"

    def __init__(self) -> None:
        self._warnings: list[tuple[str, str, str, int]] = []

    def take_warnings(self) -> tuple[tuple[str, str, str, int], ...]:
        """Return the warnings since the last call, as `Outcome` holds them."""
        taken, self._warnings = tuple(self._warnings), []
        return taken

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        """Keep a warning for the controller."""
        if when == "runtest":
            category = f"{warning_message.category.__module__}.{warning_message.category.__qualname__}"
            text = str(warning_message.message)
            self._warnings.append((category, text, warning_message.filename, warning_message.lineno))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Run a rank's test."""
        if not isinstance(item, _RankItem):
            return None
        try:
            # By way of the hook: its wrappers notice exceptions in threads, for one.
            item.ihook.pytest_runtest_call(item=item)
        except BaseException as error:  # noqa: BLE001 - whatever a test raises is its outcome
            item.error = error
        return True


def _finished(result: object) -> None:
    """Refuse a test whose body has not run by the time that it returns."""
    if inspect.isawaitable(result) or inspect.isasyncgen(result) or inspect.isgenerator(result):
        if inspect.iscoroutine(result):
            result.close()
        pytest.fail(f"the test returned a {type(result).__name__}, so its body never ran: use a plain function", False)


def _user_part(traceback: TracebackType | None) -> TracebackType | None:
    """Cut off the frames of this package, and of pytest, that called the test."""
    inner, entry = traceback, traceback
    while entry is not None:
        if entry.tb_frame.f_code.co_filename == __file__:
            inner = entry.tb_next
        entry = entry.tb_next
    return inner or traceback


def _rendered(
    info: pytest.ExceptionInfo[BaseException], style: _TracebackStyle, showlocals: bool, config: pytest.Config
) -> tuple[str, str, int]:
    """Return the traceback as text, with file and line of where it was raised."""
    try:
        representation = info.getrepr(style=style, showlocals=showlocals, chain=True)
    except Exception as failure:  # noqa: BLE001 - a value whose repr raises must not hide the error
        return f"{info.exconly()}\n(the traceback could not be rendered: {failure!r})", "", 0
    crash = representation.reprcrash
    page = io.StringIO()
    # str() would strip the indentation of the first line of source.
    representation.toterminal(type(config.get_terminal_writer())(page))
    return page.getvalue().rstrip(), crash.path if crash else "", crash.lineno if crash else 0


def _rank_values(message: Message) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    if message["backend"] in ("nccl", "gloo-cuda"):
        device = torch.device("cuda", message["rank"] % torch.cuda.device_count())
    else:
        device = torch.device("cpu")
    return {"rank": message["rank"], "process_group": dist.group.WORLD, "device": device}
