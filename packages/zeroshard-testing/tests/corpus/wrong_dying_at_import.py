"""A rank's process ends while it imports the test's module."""

import os

import pytest

pytestmark = pytest.mark.ranks(2, timeout=30)

if os.environ.get("RANK") == "1":
    os._exit(4)


@pytest.mark.says(r"rank 1 exited with status 4 before it reported")
def test_import_exited(rank):
    pass
