"""Tests that are not marked and ask for what ranks alone have."""

import pytest
from zeroshard_testing import rank_fixture

says = pytest.mark.says


@rank_fixture
def on_ranks(rank):
    return rank


@says(r"[\s\S]*mark it with @pytest.mark.ranks\(2\)")
def test_asked_for_a_rank(rank):
    pass


@says(r"[\s\S]*mark it with @pytest.mark.ranks\(2\)")
def test_asked_for_a_process_group(process_group):
    pass


@says(r"[\s\S]*mark it with @pytest.mark.ranks\(2\)")
def test_asked_for_a_rank_fixture(on_ranks):
    pass


@says(r"[\s\S]*mark it with @pytest.mark.ranks\(2\)")
def test_got_a_rank_fixture(request):
    request.getfixturevalue("on_ranks")


@pytest.mark.usefixtures("on_ranks")
@says(r"[\s\S]*mark it with @pytest.mark.ranks\(2\)")
def test_used_a_rank_fixture():
    pass
