"""A module that imports on one rank what there is not."""

import os

import pytest

if os.environ.get("RANK") == "1":
    import not_to_be_found


@pytest.mark.ranks(2)
@pytest.mark.says(r"rank 1 failed: ModuleNotFoundError: No module named 'not_to_be_found'")
def test_imports_what_there_is_not_on_one(rank):
    assert not_to_be_found
