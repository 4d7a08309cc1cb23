"""Calls a function on ranks from an ordinary test, a script or another test runner."""

from __future__ import annotations

import atexit
import io
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zeroshard_testing.session import RanksSession, running_sessions
from zeroshard_testing.spec import RanksSpec, parse_checks

_is_rank = False


def run_on_ranks(
    function: Callable[..., Any],
    ranks: int,
    *args: object,
    backend: str = "gloo",
    timeout: float | None = None,
    init: bool = True,
    checks: str = "",
    title: str | None = None,
    **kwargs: object,
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on every rank of a process group, and return the results by rank.

    Args:
        function: The function to call, with `torch.distributed` initialized. It is sent by cloudpickle if that is
            installed, otherwise by pickle, which accepts only functions at the top level of a module.
        ranks: Number of ranks.
        *args: Arguments, sent in the same way.
        backend: The backend, as for ``@pytest.mark.ranks``.
        timeout: Seconds that the call may take; the timeout of a test by default.
        init: Whether the default process group is initialized.
        checks: The checks to turn off, or on if they are off by default.
        title: The name of the call in reports; the function's name by default.
        **kwargs: Named arguments.

    Returns:
        The return value of each rank, in order. It may be a tensor, number, string or None, or hold these in lists,
        tuples and dicts.

    Raises:
        RanksFailure: If the function raised, ended, or left out a collective on a rank. The text names the cause first.
        RuntimeError: If the caller is a rank, or the machine lacks the backend.
        TypeError: If the function or the arguments cannot be sent.
    """
    __tracebackhide__ = True
    if _is_rank:
        raise RuntimeError("run_on_ranks starts ranks of its own: call it in an ordinary test, not on a rank")
    import torch

    off, on = parse_checks(checks)
    spec = RanksSpec(ranks, backend, timeout=timeout, init=init, checks_off=off, checks_on=on)
    name = title or str(getattr(function, "__qualname__", function))
    title = f"{name} on {'one rank' if ranks == 1 else f'{ranks} ranks'}"
    returned = _session().call(title, spec, _pickled((function, args, kwargs), name))
    # Reads only tensors and plain values, whatever the bytes contain.
    return [torch.load(io.BytesIO(returned[rank]), weights_only=True) for rank in sorted(returned)]


def refuse_on_this_process() -> None:
    """Mark this process as a rank, so that it starts no ranks of its own."""
    global _is_rank
    _is_rank = True


def _session() -> RanksSession:
    if not running_sessions:
        folder = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
        session = RanksSession(None, lambda: Path(folder.name))
        running_sessions.append(session)
        atexit.register(folder.cleanup)
        atexit.register(session.close)
    return running_sessions[-1]


def _pickled(value: object, name: str) -> bytes:
    try:
        import cloudpickle as pickler  # type: ignore[import-untyped]  # it has no types

        advice = "create it inside the function"
    except ImportError:
        pickler = pickle
        advice = "install cloudpickle, or use a function at the top level of a module and arguments that pickle takes"
    try:
        return bytes(pickler.dumps(value))
    except Exception as error:
        raise TypeError(
            f"run_on_ranks: {name} and its arguments cannot be sent to the ranks ({error}): {advice}"
        ) from error
