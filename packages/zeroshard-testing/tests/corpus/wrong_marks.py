"""Marks that cannot say on how many ranks a test runs."""

import pytest

says = pytest.mark.says


@pytest.mark.parametrize("x", [pytest.param(2, marks=pytest.mark.ranks(4))])
@pytest.mark.ranks(2)
@says(r"[\s\S]*the ranks marker goes on a function, a class or a module, not on a parameter")
def test_marked_by_a_parameter_too(x, world_size):
    assert world_size in (2, 4)


@pytest.mark.parametrize("x", [pytest.param(2, marks=pytest.mark.ranks(4))])
@says(r"[\s\S]*the ranks marker goes on a function, a class or a module, not on a parameter")
def test_marked_by_a_parameter(x):
    pass
