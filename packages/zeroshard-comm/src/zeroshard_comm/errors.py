"""The errors of this package, and functions that make them from a backend's errors and from reports of ranks."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta


class DisagreementError(RuntimeError):
    """Ranks of one group called different methods, or hold different plans or settings."""


class DifferentCallsError(DisagreementError):
    """Ranks called different methods, or called one method of different optimizers or at different steps."""


class PeerLostError(RuntimeError):
    """A rank of the group closed its connection, died, or did not answer within the group's timeout.

    The rank that raises it has closed zeroshard's own connections, so every other exchange of zeroshard on that group
    raises too, on every rank. If the group has a backend for devices, such as NCCL, this rank has aborted its own
    operations there. A gloo group is not aborted: collectives of DistributedDataParallel on it may wait until its
    timeout for a rank that is still alive.

    Attributes:
        peer: group rank of the lost rank; None if unknown.
    """

    def __init__(self, message: str = "", peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


def builtin_name(error: BaseException) -> str:
    """Return the name of the nearest built-in type of an error, which other ranks can raise too."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")


def rebuild_exception(type_name: str, message: str) -> Exception:
    """Return an error of this module or of a built-in type, else a RuntimeError that contains the name.

    This imports nothing, because a peer's text must not decide what this process imports.
    """
    own = {kind.__name__: kind for kind in (PeerLostError, DisagreementError, DifferentCallsError)}
    kind = own.get(type_name) or getattr(builtins, type_name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and kind not in (UnicodeDecodeError, UnicodeEncodeError):
        with suppress(TypeError):
            return kind(message)
    return RuntimeError(f"{type_name}: {message}")


def peer_lost(
    failure: RuntimeError | None, peer: int | None, rank: int, operation: str, timeout: timedelta | None = None
) -> PeerLostError:
    """Return a PeerLostError that names the peer, for an error of the backend or a timeout.

    Args:
        failure: the error of the backend; None if there is none.
        peer: group rank of the lost rank; None if unknown.
        rank: group rank of this process.
        operation: the operation of the ranks.
        timeout: the time for which this rank has waited, if the peer is only late.
    """
    call, said = _call_in(operation), ""
    if failure is not None:
        # The next lines are a stack trace.
        first = str(failure).partition("\n")[0]
        said = f" (The backend said: {first or type(failure).__name__})"
    everywhere = "on every rank, outside of `if rank == 0:`"
    if peer is None or timeout is None:
        unless = f" If it has ended without an error, call {call} {everywhere}." if call else ""
        text = (
            f"rank {rank} lost {'another rank' if peer is None else f'rank {peer}'} during {operation}: that process "
            f"has ended, was cut off, or {_missed(operation)} within the process group's timeout. Look at its output "
            f"first.{unless}"
        )
    else:
        advice = f"call it {everywhere}" if call else "look at its output"
        text = (
            f"rank {peer} {_missed(operation)} within {timeout.total_seconds():g} s: {advice}. If it was only slow, "
            f"give init_process_group() a longer timeout. Rank {rank} has waited for it."
        )
    return PeerLostError(text + _uneven(operation) + said, peer)


def lost_by_another(rank: int, peer: int | None, operation: str) -> PeerLostError:
    """Return the error of a rank that another rank told of a lost one; ``peer`` is the lost one, None if unknown."""
    who, whose = ("a rank", "all ranks") if peer is None else (f"rank {peer}", f"rank {peer}")
    return PeerLostError(
        f"rank {rank} could not finish {operation}: another rank has lost {who}, whose process has ended, was cut off, "
        f"or {_missed(operation)} within the process group's timeout. Look at the output of {whose} first."
        f"{_uneven(operation)}",
        peer,
    )


def _uneven(operation: str) -> str:
    advice = (
        " With uneven data, use zeroshard_integrations.join.Join([ddp, optimizer]), or the join() of "
        "shard_gradients(), instead of ddp.join()."
    )
    return advice if operation == "step()" else ""


def _call_in(operation: str) -> str:
    """Return the call that an operation is, or begins with, e.g. ``"step()"``; ``""`` for others."""
    found = re.fullmatch(r"(\w+\([^()]*\))(, .*)?", operation)
    return found[1] if found else ""


def _missed(operation: str) -> str:
    call = _call_in(operation)
    return f"did not call {call}" if call else f"did not reach {operation}"


def unconnected(failure: RuntimeError, rank: int, world_size: int) -> PeerLostError:
    """Return the error of a rank that could not connect to all other ranks."""
    return PeerLostError(
        f"{peer_lost(failure, None, rank, 'connect()')}. If all {world_size} ranks are alive, check that `ulimit -n` "
        f"allows {world_size - 1} more connections per rank, and that GLOO_SOCKET_IFNAME names the right interface"
    )


Explain = Callable[[str, str, int, int], "str | None"]
"""A function of the details of two ranks and their numbers. It returns the first difference; None if none is found."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a rank reports if ranks differ. ``call`` is the operation and the position of the optimizer."""

    rank: int
    operation: str
    call: str
    digest: int | None
    detail: str
    error_type: str
    error: str


def resolve_errors(reports: Sequence[RankReport], explain: Explain | None) -> tuple[str, str]:
    """Return the type and the message of the error that every rank raises, from all reports.

    An error that every rank has is returned unchanged, and each rank raises its own.
    """
    failed = [report for report in reports if report.error_type]
    if failed:
        kind, message = failed[0].error_type, failed[0].error
        alike = [report.rank for report in failed if (report.error_type, report.error) == (kind, message)]
        if len(alike) < len(reports):
            message = f"{_ranks(alike)}: {message}"
        return kind, message
    calls = dict.fromkeys(report.call for report in reports)
    if len(calls) > 1:
        called = "; ".join(f"{_ranks([r.rank for r in reports if r.call == call])} called {call}" for call in calls)
        return "DifferentCallsError", f"{called}. Every rank of the group must make the same calls in the same order."
    reference, *following = [report for report in reports if report.digest is not None]
    others = [report for report in following if report.digest != reference.digest]
    words = explain(reference.detail, others[0].detail, reference.rank, others[0].rank) if explain is not None else None
    return "DisagreementError", (
        f"{reference.operation}: {_ranks([report.rank for report in others])} "
        f"{'differs' if len(others) == 1 else 'differ'} from rank {reference.rank}: "
        f"{words or 'their values differ'}. "
        f"Build the same model and optimizer on every rank, and make the same changes to them."
    )


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}{f' and {len(ranks) - 8} more' if len(ranks) > 8 else ''}"
