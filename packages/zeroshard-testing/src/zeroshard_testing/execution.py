"""One test on one rank: collected, run under pytest, and turned into an outcome. Runs in workers only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from zeroshard_testing import outcome as kinds
from zeroshard_testing.call_item import call_item
from zeroshard_testing.faults import Faults, begin_faults, unreached_faults
from zeroshard_testing.ipc import Channel, Message
from zeroshard_testing.outcome import Outcome, printable
from zeroshard_testing.rank_plugin import RankPlugin, Reports
from zeroshard_testing.rank_pytest import CollectionFailure, Collector
from zeroshard_testing.rank_values import RankValues, set_rank_values

if TYPE_CHECKING:
    from zeroshard_testing.process_group import GroupKeeper
    from zeroshard_testing.process_state import ProcessState
    from zeroshard_testing.rank_inspector import RankInspector


@dataclass(frozen=True)
class Rank:
    """What a worker keeps from test to test.

    Attributes:
        channel: The control channel.
        groups: Makes the process groups.
        state: Puts back what tests change.
        session: The pytest session of this process.
        collector: Collects test files in it.
        plugin: Gives the fixtures of a rank, and keeps reports.
        inspector: Told when a test begins.
        faults: Those of the current test.
    """

    channel: Channel
    groups: GroupKeeper
    state: ProcessState
    session: pytest.Session
    collector: Collector
    plugin: RankPlugin
    inspector: RankInspector
    faults: Faults

    def tear_down(self, keep: Iterable[str]) -> None:
        """Tear down what is set up for collectors that no test needs any more.

        Args:
            keep: Ids of the nodes that the next test needs.

        Raises:
            Exception: What a fixture's teardown raises.
        """
        # Private to pytest: it is what `nextitem` of the protocol's hooks comes to.
        self.session._setupstate.teardown_exact(_next_item(self.session._setupstate.stack, keep))

    def held(self) -> list[str]:
        """Return the ids of nodes that are set up."""
        return [node.nodeid for node in self.session._setupstate.stack]


def outcome_of_test(rank: Rank, message: Message, payload: bytes) -> tuple[Outcome, bytes]:
    """Run a test, or a call of ``run_on_ranks``, whatever it does.

    Args:
        rank: Where it runs.
        message: The controller's request.
        payload: What is to be called, for a call.

    Returns:
        How it ended, and what a call returned.
    """
    result = b""
    try:
        item = _prepared(rank, message, payload)
        # What another file has left, if the controller could not tell that it was the last of its tests.
        rank.session._setupstate.teardown_exact(item)
        outcome = _outcome(rank.plugin.run(item, _next_item(item.listchain()[:-1], message["keep"])))
        result = getattr(item, "result", b"")
        unreached = [] if "faults" in message["checks_off"] else unreached_faults(rank.faults)
        if outcome.kind == kinds.PASSED and unreached:
            outcome = Outcome(kinds.FAILED, f"left faults unreached: {', '.join(unreached)}", found_by_controller=True)
    except CollectionFailure as error:
        text = printable(str(error))
        outcome = Outcome(kinds.FAILED, "the test's module cannot be collected on the rank", text, time.monotonic())
    except BaseException as error:  # noqa: BLE001 - whatever a test raises is its outcome
        outcome = _of_exception(error)
    return outcome, result


def _prepared(rank: Rank, message: Message, payload: bytes) -> pytest.Item:
    rank.state.restore_surroundings(message)
    path = message["path"]
    if path and not rank.collector.has(path):
        # The time that imports take is not the test's.
        rank.channel.send({"op": "importing", "run": message["run"]})
        rank.collector.collect(path)
        rank.channel.send({"op": "imported", "run": message["run"]})
    rank.state.restore_defaults()
    rank.inspector.begin(message["run"], message["timeout"])
    if message["init"]:
        rank.groups.begin(
            message["group"], message["backend"], message["rank"], message["world_size"], message["timeout"]
        )
    begin_faults(rank.faults, message["run"], message["rank"])
    set_rank_values(_rank_values(rank, message))
    if payload:
        return call_item(rank.session, message["nodeid"], payload)
    return rank.collector.item(path, message["nodeid"])


class _NextItem:
    """Stands for the next test, which may run elsewhere: all that pytest asks of it is its chain of nodes."""

    def __init__(self, nodes: list[Any]) -> None:
        self._nodes = nodes

    def listchain(self) -> list[Any]:
        return self._nodes


def _next_item(nodes: Iterable[Any], keep: Iterable[str]) -> Any:  # noqa: ANN401 - in place of an item
    kept = set(keep)
    return _NextItem([node for node in nodes if node.nodeid in kept]) if kept else None


def _outcome(reports: Reports) -> Outcome:
    decisive = next((report for report in reports.all if report.failed), None)
    decisive = decisive or next((report for report in reports.all if report.skipped), None)
    extras: dict[str, Any] = {
        "moment": time.monotonic(),
        "warnings": tuple(reports.warnings),
        "sections": tuple(
            dict.fromkeys(
                (title, printable(text))
                for report in reports.all
                for title, text in report.sections
                if not title.startswith(("Captured stdout", "Captured stderr"))
            )
        ),
        "properties": tuple(
            dict.fromkeys(
                (str(name), printable(str(value))) for report in reports.all for name, value in report.user_properties
            )
        ),
    }
    if decisive is None:
        expected = next((report.wasxfail for report in reports.all if hasattr(report, "wasxfail")), None)
        return Outcome(kinds.PASSED if expected is None else kinds.XPASSED, expected or "", **extras)
    if hasattr(decisive, "wasxfail"):
        return Outcome(kinds.XFAILED, printable(decisive.wasxfail.removeprefix("reason: ")), **extras)
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
    """Return the outcome of what has passed through pytest's protocol, or kept the test from starting."""
    info: pytest.ExceptionInfo[BaseException] = pytest.ExceptionInfo.from_exception(error)
    moment = time.monotonic()
    summary = _attempt(lambda: info.exconly(tryshort=True).splitlines()[0], type(error).__name__)
    detail = _attempt(lambda: str(info.getrepr(style="native")), f"{summary}\n(the traceback cannot be rendered)")
    return Outcome(kinds.FAILED, printable(summary), printable(detail), moment)


def _attempt(make: Callable[[], str], otherwise: str) -> str:
    try:
        return make()
    except Exception:  # noqa: BLE001 - a value whose repr raises must not hide the error
        return otherwise


def _rank_values(rank: Rank, message: Message) -> RankValues:
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if message["backend"] in ("nccl", "gloo-cuda"):
        device = torch.device("cuda", message["rank"] % torch.cuda.device_count())
    group = dist.group.WORLD if message["init"] else None
    tmp_path = Path(message["tmp_path"])
    return RankValues(message["rank"], message["world_size"], device, group, rank.faults, tmp_path)
