"""A module's teardown fails on a rank: its only test fails."""

import os

import pytest

pytestmark = pytest.mark.ranks(2, timeout=30)


def teardown_module(module):
    if os.environ.get("RANK") == "1":
        raise OSError(f"cannot end {module.__name__}")


@pytest.mark.says(r"rank 1 failed: OSError: cannot end wrong_xunit_teardown_module")
def test_teardown_module():
    pass
