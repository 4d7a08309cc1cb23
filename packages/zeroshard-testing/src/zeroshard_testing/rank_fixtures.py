"""Fixtures only for rank tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zeroshard_testing.marker import RANK_FIXTURES

_made: set[Callable[..., Any]] = set()


def rank_fixture(function: Callable[..., Any] | None = None, **options: Any) -> Any:  # noqa: ANN401 - as pytest.fixture
    """Make a fixture for tests marked with ``ranks``: `pytest.fixture`, which every rank sets up for itself.

    All fixtures of a rank test run on its ranks. One that is made with this may use ``rank``, ``process_group`` and
    ``device`` even if it is ``autouse``: it does not run for tests that are not marked.

    Args:
        function: What to make a fixture of: a function or a method, with ``return`` or ``yield``.
        **options: ``scope``, ``params``, ``autouse``, ``ids`` and ``name``, as for `pytest.fixture`. A scope wider than
            ``"function"`` lives until pytest would end it, and outlives the process group, which is each test's own.

    Returns:
        The fixture, or a decorator if there is no function.
    """
    if function is None:
        return lambda wrapped: rank_fixture(wrapped, **options)
    _made.add(function)
    return pytest.fixture(function, **options)


def leave_out_rank_fixtures(item: Any) -> None:  # noqa: ANN401 - an item that has fixtures, a function or a doctest
    """Take rank fixtures that are ``autouse`` away from a test that does not run on ranks; others fail by name."""
    info = item._fixtureinfo
    asked_for = {*info.argnames, *(name for mark in item.iter_markers("usefixtures") for name in mark.args)}
    found = {name: info.name2fixturedefs.get(name) for name in info.names_closure if name not in asked_for}
    functions = {name: known[-1].func for name, known in found.items() if known}
    automatic = [name for name, one in functions.items() if getattr(one, "__func__", one) in _made]
    if automatic:
        # What they would have asked for is set up only if something else asks for it.
        left_out = {*automatic, *RANK_FIXTURES} - asked_for
        info.names_closure[:] = [name for name in info.names_closure if name not in left_out]
