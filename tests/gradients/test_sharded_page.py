"""The example on the page of sharded gradients runs as it stands."""

# No `from __future__ import annotations`: examples are executed as they are.
from typing import Any

import pytest
from support.example_scripts import page_script
from zeroshard_testing import assert_replicas_equal


@pytest.mark.ranks(2, backend="gloo")
def test_the_example_on_the_page_trains_and_saves(rank: int) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(page_script("sharding"), names)
    assert names["losses"][-1] < names["losses"][0] / 10
    assert ("saved" in names) is (rank == 0)
    assert_replicas_equal(names["model"].parameters())
