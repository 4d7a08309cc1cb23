"""What the tests of frameworks have in common: each begins without what the one before has left in a framework."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from support.framework_training import forget_accelerator


@pytest.fixture(autouse=True)
def _state_of_this_test_alone() -> Iterator[None]:
    yield
    if "accelerate" in sys.modules:
        forget_accelerator()
