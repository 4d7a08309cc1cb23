"""A fixture of a module fails as the module ends: its only test fails."""

import os

import pytest

pytestmark = pytest.mark.ranks(2, timeout=30)


@pytest.fixture(scope="module")
def of_the_module():
    yield
    assert os.environ["RANK"] == "0"


@pytest.mark.says(r"rank 1 failed: .*'1' == '0'")
def test_found_in_teardown_of_the_module(of_the_module):
    pass
