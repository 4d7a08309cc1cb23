"""Checksums by which ranks see in which order they were handed parameters without names."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zeroshard.param_order import checksums


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.complex128),
        *(torch.int64, torch.uint8, torch.bool),
    ],
)
def test_checksums_see_elements_that_change_places(dtype: torch.dtype) -> None:
    values = torch.arange(24).view(4, 6)
    if dtype is torch.bool:
        values[2:] = 0
    others = [values.flip(0), values.flip(1), values.view(6, 4).t().contiguous(), values.roll(1)]
    assert checksums([values.to(dtype), values.clone().to(dtype)]) == checksums([values.to(dtype)]) * 2
    assert len({*checksums([each.to(dtype) for each in (values, *others)])}) == 5


def test_checksums_of_values_by_their_places_alone() -> None:
    values = torch.randn(4, 5, 6)
    gapped = torch.stack([values, values], dim=-1)[..., 0]
    turned = torch.empty(6, 5, 4).permute(2, 1, 0).copy_(values)
    one, same, dense, parameter = checksums([values, gapped, turned, nn.Parameter(values)])
    assert one == same == parameter != dense
    assert checksums([torch.tensor(float("nan")), torch.tensor(-0.0)]) == checksums(
        [torch.tensor(float("nan")), torch.tensor(-0.0)]
    )
    assert checksums([torch.tensor(-0.0)]) != checksums([torch.tensor(0.0)])


def test_checksums_of_more_elements_than_are_read_at_once() -> None:
    values = torch.arange(2**18 + 3)
    others = [values.roll(1), torch.cat([values[-3:], values[:-3]]), torch.cat([values[2**18 :], values[: 2**18]])]
    assert len({*checksums([values, *others])}) == 3


def test_checksums_of_tensors_without_values_that_can_be_read() -> None:
    class Wrapped(torch.Tensor):
        pass

    empty, meta, wrapped = torch.zeros(0, 3), torch.zeros(3, device="meta"), torch.ones(3).as_subclass(Wrapped)
    assert checksums([empty, meta, wrapped]) == [0, 0, 0]
    assert checksums([]) == []


def test_checksums_of_sparse_tensors() -> None:
    sparse = torch.sparse_coo_tensor([[3, 1, 3]], [1.0, 2.0, 0.5], (5,))
    others = [torch.sparse_coo_tensor([[1, 4]], [2.0, 1.5], (5,)), torch.sparse_coo_tensor([[1, 3]], [1.5, 2.0], (5,))]
    same, coalesced, *different = checksums([sparse, sparse.coalesce(), *others])
    assert same == coalesced
    assert len({same, *different}) == 3
