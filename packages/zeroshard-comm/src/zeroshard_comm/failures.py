"""The errors of this package, and how a backend's error becomes one."""

from __future__ import annotations

import builtins


class DisagreementError(RuntimeError):
    """Ranks of one group called different methods, or hold different plans or settings."""


class PeerLostError(RuntimeError):
    """A rank of the group closed its connection, died, or did not answer within the group's timeout."""


def builtin_name(error: BaseException) -> str:
    """Name the nearest built-in type of an error, by which other ranks can raise it too.

    >>> class DamagedFile(ValueError): ...
    >>> builtin_name(DamagedFile("x"))
    'ValueError'
    """
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")


def revive(type_name: str, message: str) -> Exception:
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
