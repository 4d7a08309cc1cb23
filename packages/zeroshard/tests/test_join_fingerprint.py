"""Fingerprints of tensors."""

from __future__ import annotations

import pytest
import torch
from zeroshard.joining.fingerprint import fingerprint


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64]
)
def test_equal_tensors_have_equal_ones_and_changed_ones_do_not(dtype: torch.dtype) -> None:
    values = torch.arange(1, 25).to(dtype).view(4, 6)
    assert fingerprint([values]) == fingerprint([values.clone()])
    changed = values.clone()
    changed[2, 3] = changed[2, 2]
    assert fingerprint([values]) != fingerprint([changed])
    assert fingerprint([values, changed]) != fingerprint([changed, values])


def test_order_in_memory_does_not_count_and_absence_does() -> None:
    values = torch.randn(3, 4, 5)
    turned = torch.empty(5, 4, 3).permute(2, 1, 0).copy_(values)
    assert fingerprint([values]) == fingerprint([turned])
    assert len({fingerprint(each) for each in ([], [None], [values], [values, None], [None, values])}) == 5
    assert fingerprint([torch.zeros(0)]) != fingerprint([None])


def test_sparse_tensors() -> None:
    sparse = torch.sparse_coo_tensor([[1, 3]], [1.0, 2.0], (5,))
    other = torch.sparse_coo_tensor([[1, 4]], [1.0, 2.0], (5,))
    assert fingerprint([sparse]) == fingerprint([sparse.clone()])
    assert fingerprint([sparse]) != fingerprint([other])


@pytest.mark.parametrize("value", [float("nan"), -0.0, float("inf")])
def test_values_that_are_not_equal_to_themselves(value: float) -> None:
    assert fingerprint([torch.tensor([value])]) == fingerprint([torch.tensor([value])])
    assert fingerprint([torch.tensor([value])]) != fingerprint([torch.tensor([0.0])])
