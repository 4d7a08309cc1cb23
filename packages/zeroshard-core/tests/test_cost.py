"""The weight of an optimizer's state is what the optimizer really allocates."""

import pytest
import torch
from zeroshard_core import TensorSpec, state_bytes

SHAPES = [(), (9,), (4, 6), (2, 3, 4), (2, 3, 4, 5), (2, 1, 3, 2, 2), (2, 1, 3, 2, 2, 2)]


def allocated(optimizer_class, spec, **defaults):
    param = torch.zeros(spec.shape, dtype=spec.dtype, requires_grad=True)
    param.grad = torch.ones_like(param)
    optimizer = optimizer_class([param], **defaults)
    optimizer.step()
    tensors = [value for value in optimizer.state[param].values() if isinstance(value, torch.Tensor)]
    return sum(value.numel() * value.element_size() for value in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("optimizer_class", "defaults"),
    [
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.Rprop, {}),
    ],
)
def test_the_measured_weight_is_what_is_allocated(optimizer_class, defaults, shape, dtype):
    spec = TensorSpec("weight", shape, dtype)
    assert state_bytes(optimizer_class, **defaults)(spec) == allocated(optimizer_class, spec, **defaults)


@pytest.mark.parametrize("shape", [(9,), (4, 6), (40, 7), (2, 3, 4)])
def test_factored_state_weighs_its_factors(shape):
    spec = TensorSpec("weight", shape, torch.float32)
    assert state_bytes(torch.optim.Adafactor)(spec) == allocated(torch.optim.Adafactor, spec)


def test_a_class_that_cannot_be_measured_is_refused_by_name():
    with pytest.raises(ValueError, match=r"the state of LBFGS could not be measured for 'weight'"):
        state_bytes(torch.optim.LBFGS)(TensorSpec("weight", (3,), torch.float32))


def test_a_dtype_that_cannot_be_stepped_is_refused_by_name():
    with pytest.raises(ValueError, match=r"Adam could not be measured for 'ids' on a 1-dimensional torch.int64"):
        state_bytes(torch.optim.Adam)(TensorSpec("ids", (3,), torch.int64))


def test_measuring_is_done_once_per_shape_and_dtype():
    made = []

    class CountedAdam(torch.optim.Adam):
        def __init__(self, params):
            made.append(1)
            super().__init__(params)

    weigh = state_bytes(CountedAdam)
    for size in (3, 4, 3, 4, 4):
        weigh(TensorSpec("weight", (size, 3), torch.float32))
    assert len(made) == 2
