"""Errors that another rank reports."""

from __future__ import annotations

from datetime import timedelta

import pytest
from zeroshard_comm.errors import builtin_name, lost_by_another, peer_lost, rebuild_exception


class DamagedError(ValueError):
    """An error of a library's own."""


def test_a_builtin_error_comes_back_as_itself() -> None:
    error = rebuild_exception("ZeroDivisionError", "rank 1: no")
    assert type(error) is ZeroDivisionError
    assert str(error) == "rank 1: no"


@pytest.mark.parametrize(
    "name", ["KeyboardInterrupt", "SystemExit", "os.system", "DamagedError", "print", "UnicodeDecodeError"]
)
def test_nothing_else_is_made_from_a_peers_text(name: str) -> None:
    error = rebuild_exception(name, "text")
    assert type(error) is RuntimeError
    assert name in str(error)


def test_a_librarys_error_travels_as_its_nearest_builtin_type() -> None:
    assert builtin_name(DamagedError("x")) == "ValueError"
    assert builtin_name(KeyError("x")) == "KeyError"


@pytest.mark.parametrize(
    ("operation", "missed"),
    [
        ("step()", "did not call step()"),
        ("consolidate_state_dict(to=0)", "did not call consolidate_state_dict(to=0)"),
        ("backward(), before gradients are read", "did not call backward()"),
        ("the end of step()", "did not reach the end of step()"),
        ("the transfer of consolidate_state_dict(to=0)", "did not reach the transfer of consolidate_state_dict(to=0)"),
    ],
)
def test_what_a_lost_rank_missed_is_a_sentence(operation: str, missed: str) -> None:
    failure = RuntimeError("[gloo] Timed out\nin frame 1")
    late = str(peer_lost(failure, 1, 0, operation, timedelta(seconds=30)))
    assert late.startswith(f"rank 1 {missed} within 30 s: ")
    assert ("call it on every rank, outside of `if rank == 0:`" in late) == ("did not call" in missed)
    unknown = str(peer_lost(failure, None, 0, operation))
    assert f"or {missed} within the process group's timeout" in unknown
    assert f"or {missed} within the process group's timeout" in str(lost_by_another(0, 1, operation))
    ended = str(peer_lost(failure, 1, 0, operation))
    assert ended.startswith(f"rank 0 lost rank 1 during {operation}: that process has ended")
    for text in (late, unknown, ended):
        assert text.endswith("(The backend said: [gloo] Timed out)")
    assert "backend" not in str(peer_lost(None, 1, 0, operation, timedelta(seconds=30)))
