"""The errors of this package, how a backend's error becomes one, and how one travels to the other ranks."""

from __future__ import annotations

import builtins


class DisagreementError(RuntimeError):
    """Ranks of one group called different methods, or hold different plans or settings."""


class DifferentCallsError(DisagreementError):
    """Ranks called different methods, or the same one of different optimizers, or at different steps."""


class PeerLostError(RuntimeError):
    """A rank of the group closed its connection, died, or did not answer within the group's timeout.

    The rank that raises it has closed the connections that zeroshard had made for itself, so every other exchange of
    zeroshard on that group raises too, on every rank. The group itself is left alone: DistributedDataParallel's
    collectives on it may wait until its timeout for a rank that lives on.

    Attributes:
        peer: group rank of the lost one; None if unknown.
    """

    peer: int | None = None


def builtin_name(error: BaseException) -> str:
    """Name the nearest built-in type of an error, by which other ranks can raise it too.

    >>> class DamagedFile(ValueError): ...
    >>> builtin_name(DamagedFile("x"))
    'ValueError'
    """
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")


def rebuild_exception(type_name: str, message: str) -> Exception:
    """Make the error that another rank reported, from the name of its type and its message.

    Only the built-in exception types come back as themselves; anything else becomes a RuntimeError that carries the
    name, since a peer's text may not choose what is imported here.
    """
    kind = getattr(builtins, type_name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and kind not in (UnicodeDecodeError, UnicodeEncodeError):
        try:
            return kind(message)
        except TypeError:
            return RuntimeError(f"{type_name}: {message}")
    return RuntimeError(f"{type_name}: {message}")


def lost(failure: RuntimeError, peer: int | None, rank: int, operation: str) -> PeerLostError:
    """Make the error that names the peer out of the backend's own.

    Args:
        failure: what the backend raised.
        peer: group rank at the other end; None if it is not known which one was lost.
        rank: group rank at this end.
        operation: what the ranks were doing.
    """
    first_line = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
    who = f"rank {peer}" if peer is not None else "another rank"
    error = PeerLostError(
        f"rank {rank} lost {who} during {operation}: that process has ended, was cut off, or did not call "
        f"{operation} within the process group's timeout. Look at {who}'s own output first. "
        f"(The backend said: {first_line})"
    )
    error.peer = peer
    return error
