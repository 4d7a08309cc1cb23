"""The weight of an optimizer's state is what the optimizer really allocates."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from zeroshard_core import TensorSpec, adam, newton_schulz, partition, state_bytes

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


def work(cost, *shape):
    return cost(TensorSpec("weight", shape, torch.float32))


def test_adam_counts_elements_and_calls():
    assert work(adam(100), 10, 20) - work(adam(100)) == 100 * 199
    assert work(adam(100), 0) > 0
    assert work(adam(), 1000) > work(adam(140), 1000)


@pytest.mark.parametrize("shape", [(30, 50), (50, 30), (30, 5, 10), (30, 2, 5, 5)])
def test_newton_schulz_counts_the_products_of_its_iterations(shape):
    # Three dimensions are a stack of matrices; four are a convolution, which is a matrix of (out, rest).
    matrix, count = ((5, 10), 30) if len(shape) == 3 else ((30, 50), 1)
    short = torch.zeros(matrix)
    with FlopCounterMode(display=False) as counter:
        gram = short @ short.T
        (gram + gram @ gram) @ short
    per_step = work(newton_schulz(3), *shape) - work(newton_schulz(2), *shape)
    assert per_step - work(newton_schulz(1), 0, 0) == count * counter.get_total_flops()


@pytest.mark.parametrize("shape", [(), (7,), (0, 3), (3, 0, 2), (0, 2, 2)])
def test_newton_schulz_takes_what_is_no_matrix(shape):
    assert work(newton_schulz(), *shape) >= work(newton_schulz(), 0, 0) > 0


def test_a_dict_gives_its_numbers_and_names_the_tensor_that_it_lacks():
    specs = [TensorSpec(name, (3,), torch.float32) for name in ("a", "b")]
    assert partition(specs, 2, cost={"a": 2, "b": 5}).loads == (5.0, 2.0)
    with pytest.raises(ValueError, match="the dict of costs has no tensor 'b'"):
        partition(specs, 2, cost={"a": 2})
