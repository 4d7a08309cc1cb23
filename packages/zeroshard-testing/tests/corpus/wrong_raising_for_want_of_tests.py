"""A rank collects other tests than pytest's own process."""

import os

import pytest

pytestmark = pytest.mark.ranks(2, timeout=30)

if os.environ.get("RANK") != "1":

    @pytest.mark.says(r"rank 1 .*(not found|not collected|no test|did not collect|does not collect)")
    def test_is_not_there(rank):
        pass


@pytest.mark.parametrize("where", [os.environ.get("RANK", "nowhere")])
@pytest.mark.says(r"ranks 0, 1 .*(not found|not collected|no test|did not collect|does not collect)")
def test_has_other_parameters(rank, where):
    pass


def test_healthy_beside_it(rank):
    pass
