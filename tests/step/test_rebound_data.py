"""``.data`` that is rebound or exchanged between steps, by averagers, by closures or by a conversion of the model."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from support.combinations import FLAG, LAYOUTS, PARTITIONS, each_of
from support.training import (
    EVERYWHERE,
    assert_bitwise_equal,
    convolutions,
    cutting,
    set_gradients,
    small_model,
    train_equally,
    twin_optimizers,
    twins,
)
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_testing import assert_replicas_equal

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")


def average_as_torch_does(params: list[torch.Tensor]) -> None:
    """Rebind as torch's averagers do: to parts of a flat tensor, in row-major order."""
    flat = torch.cat([param.data.reshape(-1) for param in params]) / 2
    for param, part in zip(params, flat.split([param.numel() for param in params]), strict=True):
        param.data = part.view_as(param).type_as(param)


REBOUND: dict[str, Callable[[list[torch.Tensor]], None]] = {
    "averaged": average_as_torch_does,
    "from a vector": lambda params: nn.utils.vector_to_parameters(
        torch.cat([param.data.reshape(-1) for param in params]) * 0.5, params
    ),
}


@pytest.mark.ranks(2, backend=EVERYWHERE)
@each_of("how", REBOUND, partition=["whole", "split"], adds=FLAG)
def test_data_that_was_rebound_is_copied_back_into_the_buffers(partition: str, how: str, adds: bool) -> None:
    pair = twins(lambda: nn.Sequential(*convolutions(), nn.Conv2d(8, 16, 3)).to(memory_format=torch.channels_last))
    sharded, plain = twin_optimizers(pair, optim.Adam, partition, True)
    train_equally(pair, (sharded, plain), range(2))
    buffers, strides = sharded.buffers, [param.stride() for param in pair[0].parameters()]
    for module in pair:
        REBOUND[how](list(module.parameters()))
    for param in pair[1].parameters():
        param.data = param.data.clone()
    if adds:
        for optimizer in (sharded, plain):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5))]})
    train_equally(pair, (sharded, plain), range(2, 4))
    storages = {buffer.untyped_storage().data_ptr() for buffer in buffers}
    assert {param.untyped_storage().data_ptr() for param in pair[0].parameters()} == storages
    assert all(map(operator.is_, sharded.buffers, buffers))
    assert [param.stride() for param in pair[0].parameters()] == strides


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_data_that_one_rank_has_rebound_is_copied_back(rank: int) -> None:
    pair = twins()
    sharded, plain = twin_optimizers(pair, optim.Adam, as_bucket_view=True)
    for step in range(4):
        if rank == step % 2:
            for param in pair[0].parameters():
                param.data = param.data.clone()
        train_equally(pair, (sharded, plain), range(step, step + 1))


@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
def test_a_model_without_state_may_change_its_dtype_and_memory_format(partition: str) -> None:
    pair = twins(convolutions)
    sharded, plain = twin_optimizers(pair, optim.SGD, partition, lr=0.1)
    train_equally(pair, (sharded, plain), range(2))
    for module in pair:
        module.double()
    train_equally(pair, (sharded, plain), range(2, 4))
    for module in pair:
        module.to(memory_format=torch.channels_last)
    train_equally(pair, (sharded, plain), range(4, 6))


@pytest.mark.ranks(2, backend=EVERYWHERE)
@LAYOUTS
def test_a_step_bumps_version_counters_of_all_parameters(partition: str, as_bucket_view: bool) -> None:
    model = small_model()
    sharded = ZeroRedundancyOptimizer(
        model.parameters(), optim.SGD, lr=0.1, partition=cutting(partition), parameters_as_bucket_view=as_bucket_view
    )
    loss = model(torch.ones(3, 40)).sum()
    loss.backward(retain_graph=True)
    before = [param._version for param in model.parameters()]
    sharded.step()
    # Of what this rank owns, and of what it has received.
    assert all(param._version > version for param, version in zip(model.parameters(), before, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.ranks(2, backend=EVERYWHERE)
@LAYOUTS
def test_two_parameters_may_exchange_their_data(as_bucket_view: bool, partition: str) -> None:
    pair = twins(lambda: nn.Sequential(*[nn.Linear(40, 40) for _ in range(4)]))
    sharded, plain = twin_optimizers(pair, optim.Adam, partition, as_bucket_view)
    for step in range(4):
        for module, optimizer in zip(pair, (sharded, plain), strict=True):
            if step == 2:
                one, other = module[0].weight, module[3].weight
                one.data, other.data = other.data, one.data
            set_gradients(module.parameters(), step)
            optimizer.step()
        assert_bitwise_equal(*pair, f"after step {step}")
    assert_replicas_equal(pair[0].parameters())


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_weights_may_be_exchanged_with_an_average_and_back() -> None:
    pair = twins()
    # With bucket views the tensors that were the weights are the buffers' memory.
    sharded, plain = twin_optimizers(pair, optim.Adam)
    averages = [[param.detach().clone() for param in module.parameters()] for module in pair]
    for step in range(6):
        for module, optimizer, average in zip(pair, (sharded, plain), averages, strict=True):
            for number, param in enumerate(module.parameters()):
                # By pointer, as some implementations of averages do: the tensors that were the weights are kept.
                param.data, average[number] = average[number], param.data
            set_gradients(module.parameters(), step)
            optimizer.step()
        assert_bitwise_equal(*pair, f"after step {step}")
        for ours, theirs in zip(*averages, strict=True):
            assert torch.equal(ours, theirs)
