"""What the corpus needs beside its programs: the marker ``seeded``, and what each rank has found as a property."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator

import pytest
from zeroshard_testing import monitor
from zeroshard_testing.emulated import runtime


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "seeded(kind): a program with one error, and the kind of report that is due")
    # What a rank has found counts, however long it takes to come to its end after another has failed.
    monitor._GRACE = 20.0


@pytest.fixture(autouse=True)
def _properties(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Record what the checker has found on this rank: a report shows the first few alone."""
    yield
    for finding in runtime.findings():
        record_property("finding", json.dumps(finding.key))


WITHOUT_EDGES = json.loads(os.environ.get("EMULATED_CORPUS_WITHOUT_EDGES", "{}"))
"""By the names of functions, edges such as ``"right_by_page.py:14"``: each runs once without each of its edges."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if WITHOUT_EDGES:
        metafunc.parametrize("_dropped_edge", WITHOUT_EDGES.get(metafunc.function.__name__, []), indirect=True)


@pytest.fixture(autouse=True)
def _dropped_edge(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave an edge out, as the variable ZEROSHARD_DROP_EDGE does for a whole run."""
    if not hasattr(request, "param"):
        yield
        return
    runtime.extension().drop_edge([request.param])
    yield
    runtime.extension().drop_edge([])
