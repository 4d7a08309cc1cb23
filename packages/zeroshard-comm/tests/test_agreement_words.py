"""The word by which ranks agree: an OR of all of them tells whether their digests are equal."""

from __future__ import annotations

import functools
import operator

from hypothesis import given
from hypothesis import strategies as st
from zeroshard_comm.agreement import is_unanimous, word_of

DIGESTS = st.integers(0, 2**63 - 1)


@given(st.lists(st.tuples(DIGESTS, st.booleans()), min_size=1, max_size=6))
def test_ranks_are_unanimous_exactly_if_31_bits_of_their_digests_are_equal(ranks: list[tuple[int, bool]]) -> None:
    combined = functools.reduce(operator.or_, [word_of(digest, failed=failed) for digest, failed in ranks])
    assert is_unanimous(combined) == (len({digest % 2**31 for digest, _ in ranks}) == 1)
    assert bool(combined >> 62) == any(failed for _, failed in ranks)


@given(DIGESTS, st.integers(2, 6), st.booleans())
def test_equal_digests_are_unanimous_whoever_has_failed(digest: int, ranks: int, failed: bool) -> None:
    combined = functools.reduce(operator.or_, [word_of(digest, failed=failed and rank == 1) for rank in range(ranks)])
    assert is_unanimous(combined)
    assert 0 <= combined < 2**63
