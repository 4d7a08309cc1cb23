"""Runs one test on one rank: collects it, runs it under pytest, and returns its outcome. Runs in workers only."""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zeroshard_testing import outcome as kinds
from zeroshard_testing._torch_private import LOADED_LATE
from zeroshard_testing.faults import Faults
from zeroshard_testing.ipc import Channel, Message
from zeroshard_testing.marker import place_of
from zeroshard_testing.outcome import Outcome, printable
from zeroshard_testing.process_group import GroupKeeper
from zeroshard_testing.process_state import ProcessState
from zeroshard_testing.rank_inspector import RankInspector
from zeroshard_testing.rank_plugin import RankPlugin, Reports
from zeroshard_testing.rank_pytest import CollectionFailure, Collector
from zeroshard_testing.rank_values import set_rank_values
from zeroshard_testing.wait_recorder import record_waits


class Rank:
    """State that a worker keeps from test to test. Its main thread makes one, before any process group."""

    def __init__(self, channel: Channel, request: Message, session: pytest.Session) -> None:
        self._channel = channel
        self._session = session
        plugin = session.config.pluginmanager.get_plugin(RankPlugin.name)
        assert isinstance(plugin, RankPlugin)
        self._plugin = plugin
        self._collector = Collector(session, Path(request["temporary"]))
        self._faults = Faults(channel)
        self.inspector = RankInspector(record_waits(self._faults))
        self.inspector.keep_destroyed_groups()
        self.groups = GroupKeeper(request["port"])
        plugin.state = self._state = ProcessState()
        self._known = {*sys.modules}

    def run(self, message: Message, payload: bytes) -> tuple[Outcome, bytes]:
        """Run a test, or the call in the payload, and return its outcome, and the result of the call. Never raises."""
        result = b""
        try:
            item = self._prepare(message, payload)
            # Tear down fixtures of another file if the controller did not know that its last test had run.
            self._session._setupstate.teardown_exact(item)
            outcome = _outcome(self._plugin.run(item, _next_item(item.listchain()[:-1], message["keep"])))
            if message["backend"] == "emulated" and outcome.kind in (kinds.SKIPPED, kinds.XFAILED):
                from zeroshard_testing.emulated import runtime

                # Otherwise the other ranks would wait for this rank at their end.
                runtime.end_groups(self._faults)
            result = getattr(item, "result", b"")
            unreached = [] if "faults" in message["checks_off"] else self._faults._unreached()
            if outcome.kind == kinds.PASSED and unreached:
                outcome = Outcome(kinds.FAILED, f"left faults unreached: {', '.join(unreached)}")
        except CollectionFailure as error:
            causes = [line[1:].strip() for line in str(error).splitlines() if line.startswith("E   ")]
            text = printable(causes[-1] if causes else "the test's module cannot be collected on the rank")
            outcome = Outcome(kinds.FAILED, text, printable(str(error)), time.monotonic())
        except pytest.skip.Exception as skip:  # of the whole module
            outcome = Outcome(kinds.SKIPPED, printable(str(skip)))
        except BaseException as error:  # noqa: BLE001 - any error of a test is its outcome
            outcome = _of_exception(error)
        return outcome, result

    def tear_down(self, keep: Collection[str]) -> str:
        """Tear down the fixtures of all nodes except at these places, and return the errors as text; empty if none."""
        try:
            # Private to pytest: the protocol's hooks pass `nextitem` to it.
            self._session._setupstate.teardown_exact(_next_item(self._session._setupstate.stack, keep))
        except BaseException as error:  # noqa: BLE001 - any error of a fixture is reported
            return _of_exception(error).detail
        return ""

    def held(self) -> list[str]:
        """Return the places of the nodes that are set up."""
        return [place_of(node) for node in self._session._setupstate.stack]

    def loaded(self) -> list[str]:
        """Return the modules of torch and its dependencies that tests have loaded in this process, in that order."""
        return [name for name in sys.modules if name not in self._known and LOADED_LATE.match(name)]

    def _prepare(self, message: Message, payload: bytes) -> pytest.Item:
        self._state.restore_surroundings(message)
        if message["backend"] == "emulated":
            # A worker keeps its backend, so this is never undone.
            from zeroshard_testing.emulated import runtime

            runtime.load()
        path = message["path"]
        if path and not self._collector.has(path):
            note = {"op": "import", "run": message["run"]}
            self._channel.send({**note, "importing": True})
            self._collector.collect(path)
            self._channel.send({**note, "importing": False})
        self._state.restore_defaults()
        if message["backend"] == "emulated":
            runtime.begin_test()
            self._plugin.around_call = partial(
                runtime.CheckedTest, self._faults, checks_races="races" not in message["checks_off"]
            )
        if message["init"]:
            self.groups.begin(message)
        # After the group is made, because the inspector must not count it as made by the test.
        self.inspector.begin(message["run"], message["timeout"], message["rank"], message["world_size"])
        self._faults._begin(message["run"], message["rank"], message["world_size"])
        set_rank_values(**self._values(message))
        if payload:
            return _call_item(self._session, message["place"], payload)
        return self._collector.item(path, message["place"])

    def _values(self, message: Message) -> dict[str, object]:
        device = torch.device("cpu")
        if message["backend"] in ("nccl", "gloo-cuda"):
            device = torch.device("cuda", message["rank"] % torch.cuda.device_count())
        elif message["backend"] == "emulated":
            device = torch.device("emu", 0)
        group = dist.group.WORLD if message["init"] else None
        own = {"device": device, "process_group": group, "faults": self._faults, "tmp_path": Path(message["tmp_path"])}
        return {"rank": message["rank"], "world_size": message["world_size"], **own}


def _next_item(nodes: Iterable[Any], keep: Collection[str]) -> Any:  # noqa: ANN401 - in place of an item
    """Return an object in place of the next test, which may run elsewhere: pytest reads only its chain of nodes."""
    kept = [node for node in nodes if place_of(node) in keep]
    return SimpleNamespace(listchain=lambda: kept) if keep else None


def _outcome(reports: Reports) -> Outcome:
    decisive = next((report for report in reports.all if report.failed), None)
    decisive = decisive or next((report for report in reports.all if report.skipped), None)
    sections = dict.fromkeys(
        (title, printable(text))
        for report in reports.all
        for title, text in report.sections
        if not title.startswith(("Captured stdout", "Captured stderr"))
    )
    properties = dict.fromkeys(
        (str(name), printable(str(value))) for report in reports.all for name, value in report.user_properties
    )
    extras: dict[str, Any] = {"moment": time.monotonic(), "warnings": tuple(reports.warnings)}
    extras |= {"sections": tuple(sections), "properties": tuple(properties)}
    if decisive is None:
        expected = next((report.wasxfail for report in reports.all if hasattr(report, "wasxfail")), None)
        return Outcome(kinds.PASSED if expected is None else kinds.XPASSED, expected or "", **extras)
    if hasattr(decisive, "wasxfail"):
        reason = printable(decisive.wasxfail.removeprefix("reason: "))
        return Outcome(kinds.XFAILED, reason, by_mark=not reports.called_xfail, **extras)
    if decisive.skipped:
        reason = decisive.longrepr[2] if isinstance(decisive.longrepr, tuple) else str(decisive.longrepr)
        return Outcome(kinds.SKIPPED, printable(reason.removeprefix("Skipped: ")), **extras)
    crash = getattr(decisive.longrepr, "reprcrash", None)
    summary = reports.summary
    if isinstance(decisive.longrepr, str) and decisive.longrepr.startswith("[XPASS(strict)]"):
        reason = decisive.longrepr.removeprefix("[XPASS(strict)]").strip()
        summary = "passed although a failure was expected" + (f": {reason}" if reason else "")
    return Outcome(
        kinds.FAILED,
        printable(summary or decisive.longreprtext.partition("\n")[0]),
        printable(decisive.longreprtext.rstrip()),
        path=crash.path if crash else "",
        line=crash.lineno if crash else 0,
        **extras,
    )


def _of_exception(error: BaseException) -> Outcome:
    """Return the outcome of a test from pytest's reports, or from the error that kept it from starting."""
    info: pytest.ExceptionInfo[BaseException] = pytest.ExceptionInfo.from_exception(error)
    moment = time.monotonic()
    summary = type(error).__name__
    detail = f"{summary}\n(the traceback cannot be rendered)"
    with contextlib.suppress(Exception):
        # The repr of a value may raise, and must not hide the error.
        summary = info.exconly(tryshort=True).splitlines()[0]
        detail = str(info.getrepr(style="native"))
    return Outcome(kinds.FAILED, printable(summary), printable(detail), moment)


class CallItem(pytest.Item):
    """Calls a function instead of a test. `torch.load` with ``weights_only=True`` must be able to read the result."""

    call: Callable[[], object]
    result = b""

    def runtest(self) -> None:
        """Make the call."""
        __tracebackhide__ = True
        self.result = _dumped(self.call())

    def _traceback_filter(self, info: pytest.ExceptionInfo[BaseException]) -> Any:  # noqa: ANN401 - private to pytest
        """Leave frames of the harness out of the traceback, as pytest does for a test."""
        return info.traceback.cut(path=__file__).filter(info)


def _call_item(session: pytest.Session, title: str, payload: bytes) -> CallItem:
    """Return the item that calls the function in the payload, which is pickled with its arguments."""
    # The controller that started this process sent it, over a socket that no other process has.
    function, args, kwargs = pickle.loads(payload)  # noqa: S301 - see above
    item: CallItem = CallItem.from_parent(session, name=title, nodeid=title)
    item.call = partial(function, *args, **kwargs)
    return item


def _dumped(value: object) -> bytes:
    written = io.BytesIO()
    torch.save(value, written)
    data = written.getvalue()
    try:
        torch.load(io.BytesIO(data), weights_only=True)
    except pickle.UnpicklingError:
        raise TypeError(
            f"run_on_ranks: a {type(value).__name__} cannot be returned: return tensors, numbers, strings, None, and "
            f"lists, tuples or dicts of them"
        ) from None
    return data
