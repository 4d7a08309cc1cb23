"""Makes tests from a ``ranks`` marker, one for each world size and backend, and fixtures for marked tests only."""

from __future__ import annotations

from collections.abc import Callable
from itertools import dropwhile
from typing import Any

import pytest

from zeroshard_testing.spec import RanksSpec, SpecError, parse_marker

SPEC_FIXTURE = "_ranks_spec"
RANK_FIXTURES = (
    *("rank", "world_size", "process_group", "device", "faults", "ranks_tmp_path"),
    *("device_costs", "host_never_waits"),
)
"""Fixtures that exist only on ranks."""
_made: set[Callable[..., Any]] = set()


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Make a test for each world size and backend that the nearest marker names; CollectError if it is invalid."""
    specs = _marked_specs(metafunc.definition)
    if specs:
        metafunc.fixturenames.append(SPEC_FIXTURE)
        metafunc.parametrize(SPEC_FIXTURE, specs, indirect=True, ids=[spec.test_id for spec in specs])


def spec_of(item: pytest.Item) -> RanksSpec | None:
    """Return the spec of a collected test that runs on ranks; None if it is not marked."""
    call_spec = getattr(item, "callspec", None)
    return None if call_spec is None else call_spec.params.get(SPEC_FIXTURE)


def place_of(node: Any) -> str:  # noqa: ANN401 - a node of pytest, whose base class is not exported
    """Return a name of a node that is equal in every process; its id differs if the file is outside the root folder."""
    below = dropwhile(lambda one: not isinstance(one, pytest.File), node.listchain())
    return "::".join([str(node.path), *[one.name for one in below][1:]])


def _marked_specs(definition: pytest.Item) -> list[RanksSpec]:
    marks = list(definition.iter_markers_with_node("ranks"))
    # Markers of one node add up; markers of a nearer node replace those of other nodes.
    nearest = [mark for node, mark in marks if node is marks[0][0]]
    try:
        specs = [spec for mark in reversed(nearest) for spec in parse_marker(mark.args, mark.kwargs)]
    except (SpecError, TypeError) as error:
        raise pytest.Collector.CollectError(f"{definition.nodeid}: @pytest.mark.ranks: {error}") from error
    return list(dict.fromkeys(specs))


def rank_fixture(function: Callable[..., Any] | None = None, **options: Any) -> Any:  # noqa: ANN401 - as pytest.fixture
    """Make a fixture for tests marked with ``ranks``: `pytest.fixture`, which every rank sets up for itself.

    All fixtures of a rank test run on its ranks. A fixture made with this decorator may use ``rank``,
    ``process_group`` and ``device`` even if it is ``autouse``, because it does not run for tests without the marker.

    Args:
        function: The function or method of the fixture, with ``return`` or ``yield``.
        **options: ``scope``, ``params``, ``autouse``, ``ids`` and ``name``, as for `pytest.fixture`. A fixture of a
            wider scope than ``"function"`` ends when pytest ends it, after the process group, which is each test's own.

    Returns:
        The fixture, or a decorator if there is no function.
    """
    if function is None:
        return lambda wrapped: rank_fixture(wrapped, **options)
    _made.add(function)
    return pytest.fixture(function, **options)


def leave_out_rank_fixtures(item: Any) -> None:  # noqa: ANN401 - an item that has fixtures, a function or a doctest
    """Remove ``autouse`` rank fixtures from a test that does not run on ranks. Any other rank fixture raises."""
    info = item._fixtureinfo
    asked_for = {*info.argnames, *(name for mark in item.iter_markers("usefixtures") for name in mark.args)}
    found = {name: info.name2fixturedefs.get(name) for name in info.names_closure if name not in asked_for}
    functions = {name: known[-1].func for name, known in found.items() if known}
    automatic = [name for name, one in functions.items() if getattr(one, "__func__", one) in _made]
    if automatic:
        # Fixtures that they request are set up only if another one requests them.
        left_out = {*automatic, *RANK_FIXTURES} - asked_for
        info.names_closure[:] = [name for name in info.names_closure if name not in left_out]
