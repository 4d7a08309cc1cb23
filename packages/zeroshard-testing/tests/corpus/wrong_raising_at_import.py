"""A rank cannot import the test's module."""

import os

import pytest

pytestmark = pytest.mark.ranks(2, timeout=30)

if os.environ.get("RANK") == "1":
    raise OSError("not on rank 1")


@pytest.mark.says(r"rank 1 failed: OSError: not on rank 1")
def test_import_raised(rank):
    pass
