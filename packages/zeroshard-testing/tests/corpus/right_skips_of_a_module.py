"""A module that all ranks skip."""

import os

import pytest

if "RANK" in os.environ:
    pytest.importorskip("not_to_be_found")


@pytest.mark.ranks(2)
@pytest.mark.says(r"could not import 'not_to_be_found'")
def test_in_a_module_that_ranks_skip(rank):
    raise AssertionError
