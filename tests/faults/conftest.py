"""How gradients travel that are sharded in a training whose ranks have faults."""

from __future__ import annotations

import pytest
from zeroshard_comm import transport


@pytest.fixture(params=[False, True], ids=["messages", "reads"])
def reads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Let small models be read by other ranks too, or none."""
    monkeypatch.setattr(transport, "WORTH_READING", 1 if request.param else 2**60)
    is_read: bool = request.param
    return is_read
