"""One test on one rank: found, set up, called under pytest's own wrappers, torn down, and turned into an outcome."""

from __future__ import annotations

import inspect
import io
import pickle
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import pytest

from zeroshard_testing import outcome as kinds
from zeroshard_testing.faults import Faults, begin_faults, unreached_faults
from zeroshard_testing.importing import import_test_module, is_imported
from zeroshard_testing.outcome import Outcome, is_echo, names_of
from zeroshard_testing.rank_fixtures import tear_down
from zeroshard_testing.rank_values import set_rank_values
from zeroshard_testing.wire import Channel, Message

if TYPE_CHECKING:
    from zeroshard_testing.observer import Observer
    from zeroshard_testing.process_group import GroupKeeper


@dataclass(frozen=True)
class Rank:
    """What a worker keeps from test to test.

    Attributes:
        channel: The control channel.
        groups: Makes the process groups.
        session: The idle pytest session of this process.
        observer: Told when a test begins.
        faults: Those of the current test.
    """

    channel: Channel
    groups: GroupKeeper
    session: pytest.Session
    observer: Observer
    faults: Faults


_TracebackStyle = Literal["long", "short", "line", "no", "native", "value", "auto"]


class RankTest:
    """One test on this rank.

    Args:
        rank: Where it runs.
        message: The controller's request.
        payload: Pickled arguments and attributes.
    """

    def __init__(self, rank: Rank, message: Message, payload: bytes) -> None:
        self._rank = rank
        self._message = message
        self._payload = payload

    def outcome(self) -> Outcome:
        """Run the test, whatever it does."""
        try:
            call = self._prepared()
            self._under_pytest(call)
            outcome = Outcome(kinds.PASSED, moment=time.monotonic())
            if unreached := unreached_faults(self._rank.faults):
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
        recorder = self._rank.session.config.pluginmanager.get_plugin(ProtocolPlugin.name)
        return recorder.take_warnings() if isinstance(recorder, ProtocolPlugin) else ()

    def _prepared(self) -> Callable[[], object]:
        message = self._message
        modules = [*message["conftests"], message["module"]]
        if not all(is_imported(*module) for module in modules):
            # The time that imports take is not the test's.
            self._rank.channel.send({"op": "importing", "run": message["run"]})
            for module in modules:
                import_test_module(*module)
            self._rank.channel.send({"op": "imported", "run": message["run"]})
        owner: Any = import_test_module(*message["module"])
        self._rank.observer.begin(message["run"], message["timeout"])
        self._rank.groups.begin(
            message["group"], message["backend"], message["rank"], message["world_size"], message["timeout"]
        )
        begin_faults(self._rank.faults, message["run"], message["rank"])
        set_rank_values({**_rank_values(message), "faults": self._rank.faults})
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
        item = _RankItem.from_parent(self._rank.session, name=self._message["name"], nodeid=nodeid, call=call)
        for arguments in self._message["filterwarnings"]:
            item.add_marker(pytest.mark.filterwarnings(*arguments))
        hook = self._rank.session.config.hook
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
            return Outcome(kinds.FAILED, summary, error.msg or "", moment, error=names_of(type(error)))
        # The source around a consequence explains nothing, and pytest would parse all of torch.distributed to show it.
        style: _TracebackStyle = "native" if is_echo(summary) else self._message["tb_style"]
        detail, path, line = _rendered(info, style, self._message["showlocals"], self._rank.session.config)
        if isinstance(error, SystemExit):
            summary = f"called sys.exit({error.code!r})"
        return Outcome(kinds.FAILED, summary, detail, moment, path, line, names_of(type(error)))


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
