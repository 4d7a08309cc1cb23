"""From a ``ranks`` marker to tests: one for each world size and backend, in the controller and alike on ranks."""

from __future__ import annotations

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


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Make a test of each world size and backend that the nearest marker names; CollectError if it cannot be read."""
    specs = _marked_specs(metafunc.definition)
    if specs:
        metafunc.fixturenames.append(SPEC_FIXTURE)
        metafunc.parametrize(SPEC_FIXTURE, specs, indirect=True, ids=[spec.test_id for spec in specs])


def spec_of(item: pytest.Item) -> RanksSpec | None:
    """Return how a collected test is to run on ranks, None if it is not marked."""
    call_spec = getattr(item, "callspec", None)
    return None if call_spec is None else call_spec.params.get(SPEC_FIXTURE)


def place_of(node: Any) -> str:  # noqa: ANN401 - a node of pytest, whose base class is not exported
    """Return what names a node alike in every process, as its id does not where a file is outside the root folder."""
    below = dropwhile(lambda one: not isinstance(one, pytest.File), node.listchain())
    return "::".join([str(node.path), *[one.name for one in below][1:]])


def _marked_specs(definition: pytest.Item) -> list[RanksSpec]:
    marks = list(definition.iter_markers_with_node("ranks"))
    # Markers of one node add up; a nearer node's replace those of the farther ones.
    nearest = [mark for node, mark in marks if node is marks[0][0]]
    try:
        specs = [spec for mark in reversed(nearest) for spec in parse_marker(mark.args, mark.kwargs)]
    except (SpecError, TypeError) as error:
        raise pytest.Collector.CollectError(f"{definition.nodeid}: @pytest.mark.ranks: {error}") from error
    return list(dict.fromkeys(specs))
