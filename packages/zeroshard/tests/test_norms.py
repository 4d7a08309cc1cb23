"""Norms of one rank's parts of gradients, compared with float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from zeroshard.grads.norms import _norms

INF = math.inf
DTYPES = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}
"""Hundreds of roundings in the dtype in which norms are taken: float32 for half precision."""

# Squares of magnitudes above overflow in float32, and those of magnitudes below lose digits.
MAGNITUDES = st.one_of(st.just(0.0), st.floats(1e-4, 6e4), st.floats(-6e4, -1e-4))
WIDE = st.one_of(st.just(0.0), st.floats(1e-15, 1e17), st.floats(-1e17, -1e-15))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None)
@given(data=st.data())
def test_2_norms(dtype: torch.dtype, data: st.DataObject) -> None:
    numbers = MAGNITUDES if dtype is torch.float16 else WIDE
    grads = [
        torch.tensor(values, dtype=dtype) for values in data.draw(st.lists(st.lists(numbers, min_size=1), min_size=1))
    ]
    found = _norms(grads)
    assert found.dtype == torch.float64
    expected = torch.stack([grad.double().norm() for grad in grads])
    torch.testing.assert_close(found, expected, rtol=DTYPES[dtype], atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None)
@given(values=st.lists(st.floats(width=16), min_size=1))
def test_a_norm_is_finite_if_all_values_are(dtype: torch.dtype, values: list[float]) -> None:
    grad = torch.tensor(values, dtype=dtype)
    assert bool(_norms([grad]).isfinite()) == bool(grad.isfinite().all())


def test_a_2_norm_in_half_precision_does_not_overflow() -> None:
    grad = torch.full((1000,), 6e4, dtype=torch.float16)
    torch.testing.assert_close(_norms([grad]), grad.double().norm().view(1), rtol=1e-6, atol=0)
    assert grad.norm() == INF
