"""Computes one verdict from the outcomes of all ranks, with pure functions. Only this module defines a pass."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from zeroshard_testing import outcome as kinds
from zeroshard_testing.outcome import Outcome, is_echo

_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
_RANK_ARGUMENT = re.compile(r"\brank = \d+")


@dataclass(frozen=True)
class Verdict:
    """The result of a test: ``"passed"``, ``"skipped"``, ``"xfailed"``, ``"xpassed"`` or ``"failed"``.

    ``summary`` is one line, the root cause with its ranks or the reason of a skip, ``text`` the whole report of a
    failure. The root cause's ``path`` and ``line`` (1-based) are empty and 0 if unknown.
    """

    kind: str
    summary: str = ""
    text: str = ""
    path: str = ""
    line: int = 0


class RanksFailure(Exception):  # noqa: N818 - a verdict about the test, as pytest's own Failed
    """Raised if a test fails on its ranks. ``verdict`` has the details; outside pytest the message is the report."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(f"{verdict.summary}\n{verdict.text}")
        self.verdict = verdict


def judge(outcomes: Mapping[int, Outcome]) -> Verdict:
    """Return the verdict of a test, given its outcomes on all ranks.

    A test passes only if every rank reports a pass, and is skipped only if all ranks skip. It fails as expected if
    every rank does. Ranks may also pass if failing is optional, and hang or lose a peer if a mark expected the failure.
    Every other result is a failure, whose report shows causes before consequences, and each traceback once.
    """
    ended = [outcome for outcome in outcomes.values() if outcome.kind != kinds.FAULTED]
    found = {outcome.kind for outcome in ended} or {kinds.PASSED}
    if kinds.XFAILED in found:
        is_marked = any(outcome.by_mark for outcome in ended)
        others = (one for one in ended if one.kind != kinds.XPASSED and not (is_marked and _follows(one)))
        found = {outcome.kind for outcome in others}
    if len(found) == 1 and found <= {kinds.PASSED, kinds.SKIPPED, kinds.XFAILED, kinds.XPASSED}:
        kind = found.pop()
        texts = {outcome.summary for outcome in outcomes.values() if outcome.kind == kind}
        return Verdict(kind, "; ".join(sorted(texts)))
    groups = _grouped({rank: _as_failure(outcome, outcomes) for rank, outcome in outcomes.items()})
    parts = [_section(ranks, outcome) for ranks, outcome in groups]
    if passed := [rank for rank, outcome in outcomes.items() if outcome.kind in (kinds.PASSED, kinds.XPASSED)]:
        parts.append(f"{_name(passed)} passed")
    if faulted := [rank for rank, outcome in outcomes.items() if outcome.kind == kinds.FAULTED]:
        parts.append(f"{_name(faulted)} ended by the fault that the test requested")
    ranks, cause = groups[0]
    return Verdict("failed", f"{_name(ranks)} {cause.predicate}", "\n\n".join(parts), cause.path, cause.line)


def _follows(outcome: Outcome) -> bool:
    """Return True if a rank ended because another one had failed."""
    return outcome.kind in (kinds.STOPPED, kinds.DEADLOCKED) or _is_echo(outcome)


def _is_echo(outcome: Outcome) -> bool:
    return outcome.kind == kinds.FAILED and is_echo(outcome.summary)


def _as_failure(outcome: Outcome, outcomes: Mapping[int, Outcome]) -> Outcome:
    if outcome.kind not in (kinds.SKIPPED, kinds.XFAILED):
        return outcome
    verb = "skipped" if outcome.kind == kinds.SKIPPED else "expected a failure"
    others = [rank for rank, other in outcomes.items() if other.kind != outcome.kind]
    detail = f"A test that {verb} on only some ranks proves nothing: {_name(others)} did not."
    return replace(outcome, summary=f"{verb} alone: {outcome.summary}", detail=detail)


def _grouped(outcomes: Mapping[int, Outcome]) -> list[tuple[list[int], Outcome]]:
    """Return groups of ranks with equal outcomes, each with its earliest outcome, causes first."""
    alike: dict[tuple[str, str, str], list[int]] = {}
    for rank, outcome in sorted(outcomes.items()):
        if outcome.kind not in (kinds.PASSED, kinds.XPASSED, kinds.FAULTED):
            texts = (_RANK_ARGUMENT.sub("rank", _ADDRESS.sub("0x", text)) for text in (outcome.summary, outcome.detail))
            alike.setdefault((outcome.kind, *texts), []).append(rank)  # type: ignore[arg-type]
    groups = [
        (ranks, min((outcomes[rank] for rank in ranks), key=lambda outcome: outcome.moment)) for ranks in alike.values()
    ]
    return sorted(groups, key=lambda group: (_nearness_to_cause(group[1]), group[1].moment, group[0]))


def _nearness_to_cause(outcome: Outcome) -> int:
    if _is_echo(outcome):
        return 4
    if outcome.kind in (kinds.SKIPPED, kinds.XFAILED):
        # A mark expects the failure on every rank.
        return 7 if outcome.by_mark else 2
    return {kinds.DIED: 0, kinds.FAILED: 1, kinds.DEADLOCKED: 3, kinds.TIMED_OUT: 5}.get(outcome.kind, 6)


def _section(ranks: list[int], outcome: Outcome) -> str:
    title = f" {_name(ranks)} {outcome.predicate}{' (a consequence)' if _is_echo(outcome) else ''} "
    return "\n".join(part for part in (f"{title:=^100}", outcome.detail) if part)


def _name(ranks: list[int]) -> str:
    """Return text such as ``"rank 3"`` or ``"ranks 0, 2-5"``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(parts)}"
