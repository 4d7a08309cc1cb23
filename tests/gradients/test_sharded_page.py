"""The example on the page of sharded gradients runs as it stands."""

# No `from __future__ import annotations`: examples are executed as they are.
import re
from pathlib import Path
from typing import Any

import pytest
from zeroshard_testing import assert_replicas_equal

PAGE = Path(__file__).parents[2] / "docs" / "sharding.md"


@pytest.mark.ranks(2, backend="gloo")
def test_the_example(rank: int) -> None:
    found = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    script = next(block for block in found if "init_process_group" in block)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(script.replace('dist.init_process_group("gloo")\n', "").replace("dist.destroy_process_group()\n", ""), names)
    assert names["losses"][-1] < names["losses"][0] / 10
    assert ("saved" in names) is (rank == 0)
    assert_replicas_equal(names["model"].parameters())
