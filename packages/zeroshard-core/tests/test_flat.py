"""Tensors become views of a flat buffer."""

import pytest
import torch
from zeroshard_core import FlatBuffer, TensorSpec, bucket_layouts, is_dense, partition, storage_view

CPU = torch.device("cpu")


def a_module():
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    return [conv.weight, conv.bias, torch.nn.Parameter(torch.randn(5, 3).t()), torch.nn.Parameter(torch.tensor(2.0))]


def packed(params, world_size=2):
    specs = [
        TensorSpec(f"p{i}", p.shape, p.dtype, stride=None if p.is_contiguous() else p.stride())
        for i, p in enumerate(params)
    ]
    (layout,) = bucket_layouts(partition(specs, world_size))
    buffer = FlatBuffer(layout, specs, CPU)
    buffer.adopt(dict(enumerate(params)))
    return buffer


def in_buffer(buffer, tensor):
    start = buffer.storage.data_ptr()
    return start <= tensor.data_ptr() < start + buffer.storage.numel() * buffer.storage.element_size()


def test_adopting_keeps_values_and_memory_formats():
    params, expected = a_module(), a_module()
    buffer = packed(params)
    for param, before in zip(params, expected, strict=True):
        assert in_buffer(buffer, param)
        assert torch.equal(param, before)
        assert param.stride() == before.stride()
        assert param.requires_grad


def test_adopting_keeps_the_strides_of_dimensions_of_size_one():
    params = [torch.nn.Conv2d(8, 4, 1).to(memory_format=torch.channels_last).weight, torch.nn.Parameter(torch.ones(3))]
    expected = params[0].detach().clone()
    buffer = packed(params)
    assert params[0].is_contiguous()
    assert params[0].stride() == (8, 1, 8, 8)
    assert in_buffer(buffer, params[0])
    assert torch.equal(params[0], expected)
    assert torch.equal(storage_view(params[0]), buffer.view(0).view(-1))


def test_writing_the_storage_writes_the_tensors():
    params = a_module()
    packed(params).storage.fill_(7.0)
    assert all(bool((param == 7.0).all()) for param in params)


def test_padding_is_zero():
    params = a_module()
    buffer = packed(params)
    for param in params:
        param.data.zero_()
    assert not buffer.storage.any()


def test_a_rebound_tensor_can_be_adopted_again():
    params = a_module()
    buffer = packed(params)
    params[1].data = torch.full((4,), 9.0)
    buffer.adopt({1: params[1]})
    assert in_buffer(buffer, params[1])
    assert buffer.view(1).tolist() == [9.0] * 4


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(5), r"tensor 1 'p1' has shape \(5,\), but its place in the buffer is for shape \(4,\)"),
        (torch.zeros(4).double(), "'p1' has dtype torch.float64"),
        (torch.zeros(4, device="meta"), "'p1' has device meta"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_and_no_tensor_changes(tensor, message):
    params = a_module()
    buffer = packed(params)
    fresh = torch.zeros(params[0].shape)
    with pytest.raises(ValueError, match=message):
        buffer.adopt({0: fresh, 1: tensor})
    assert not in_buffer(buffer, fresh)


def test_a_tensor_without_a_place_is_refused():
    with pytest.raises(ValueError, match="tensor 9 has no place"):
        packed(a_module()).view(9)


def test_tensors_without_elements_are_held_too():
    params = [torch.nn.Parameter(torch.empty(0, 3)), torch.nn.Parameter(torch.ones(2))]
    packed(params)
    assert params[0].shape == (0, 3)


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.empty(2, 3), True),
        (torch.empty(2, 3).t(), True),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.empty(()), True),
        (torch.empty(0, 3), True),
        (torch.empty(4)[1:], True),
        (torch.empty(2, 3)[:, :2], False),
        (torch.empty(3).expand(2, 3), False),
        (torch.empty(6)[::2], False),
        (torch.empty(2, 2).to_sparse(), False),
    ],
)
def test_a_flat_view_exists_for_dense_tensors_alone(tensor, dense):
    assert is_dense(tensor) == dense
    if dense:
        assert storage_view(tensor).data_ptr() == tensor.data_ptr()
        assert storage_view(tensor).shape == (tensor.numel(),)
    else:
        with pytest.raises(ValueError, match="has no flat view"):
            storage_view(tensor)


def test_a_flat_view_is_in_memory_order():
    flat = torch.arange(6.0)
    assert torch.equal(storage_view(flat.view(2, 3).t()), flat)
    assert torch.equal(storage_view(torch.arange(8.0)[2:].view(2, 3).t()), torch.arange(2.0, 8.0))
