"""Errors that another rank reports."""

from __future__ import annotations

import pytest
from zeroshard_comm.errors import builtin_name, rebuild_exception


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
