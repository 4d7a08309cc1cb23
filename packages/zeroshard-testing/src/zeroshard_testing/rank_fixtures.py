"""Fixtures for rank tests alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

_made: set[Callable[..., Any]] = set()


def rank_fixture(function: Callable[..., Any] | None = None, **options: Any) -> Any:  # noqa: ANN401 - as pytest.fixture
    """Make a fixture for tests marked with ``ranks``: `pytest.fixture`, which every rank sets up for itself.

    All fixtures of a rank test run on its ranks. One that is made with this may use ``rank``, ``process_group`` and
    ``device`` even if it is ``autouse``: it does not run for tests that are not marked.

    Args:
        function: What to make a fixture of: a function or a method, with ``return`` or ``yield``.
        **options: ``scope``, ``params``, ``autouse``, ``ids`` and ``name``, as for `pytest.fixture`. A scope wider than
            ``"function"`` lives as long as its worker does, and outlives the process group, which is each test's own.

    Returns:
        The fixture, or a decorator if there is no function.

    Example:
        >>> @rank_fixture(scope="module", params=[1, 2])
        ... def offset(request):
        ...     return 10 * request.param
    """
    if function is None:
        return lambda wrapped: rank_fixture(wrapped, **options)
    _made.add(function)
    return pytest.fixture(function, **options)


def is_rank_fixture(function: Callable[..., Any]) -> bool:
    """Whether a fixture's function was given to `rank_fixture`."""
    return getattr(function, "__func__", function) in _made
