"""A module's setup fails on a rank: its only test fails."""

import os

import pytest

pytestmark = pytest.mark.ranks(2, timeout=30)


def setup_module(module):
    if os.environ.get("RANK") == "1":
        raise OSError(f"cannot set up {module.__name__}")


@pytest.mark.says(r"rank 1 failed: OSError: cannot set up wrong_xunit_setup_module")
def test_setup_module():
    pass
