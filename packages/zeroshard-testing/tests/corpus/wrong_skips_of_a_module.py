"""A module that is skipped on one rank."""

import os

import pytest

if os.environ.get("RANK") == "1":
    pytest.skip("not on rank 1", allow_module_level=True)


@pytest.mark.ranks(2)
@pytest.mark.says(r"rank 1 skipped alone: not on rank 1")
def test_in_a_module_that_one_rank_skips(rank):
    pass
