"""Process groups, default devices and warnings around training."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from support.combinations import LAYOUTS
from support.training import (
    EVERYWHERE,
    assert_bitwise_equal,
    assert_same_state,
    set_gradients,
    small_model,
    twin_optimizers,
    twins,
)
from torch import optim
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")


@pytest.mark.ranks(4, backend=EVERYWHERE)
def test_optimizers_may_be_sharded_in_subgroups(rank: int) -> None:
    # Two independent replicas pairs in one world: ranks {0, 2} and {1, 3}.
    groups = [torch.distributed.new_group([0, 2]), torch.distributed.new_group([1, 3])]
    mine = groups[rank % 2]
    pair = twins()
    sharded = ZeroRedundancyOptimizer(pair[0].parameters(), optim.Adam, process_group=mine)
    plain = optim.Adam(pair[1].parameters())
    assert (sharded.rank, sharded.global_rank, sharded.world_size) == (rank // 2, rank, 2)
    for step in range(3):
        for module, optimizer in zip(pair, (sharded, plain), strict=True):
            set_gradients(module.parameters(), step + 10 * (rank % 2))
            optimizer.step()
        assert_bitwise_equal(*pair, f"after step {step}")
    sharded.consolidate_state_dict(to=1)
    if sharded.rank == 1:
        assert_same_state(sharded.state_dict(), plain.state_dict())


@pytest.mark.ranks(2, backend=EVERYWHERE)
@LAYOUTS
def test_the_default_device_need_not_be_the_models(rank: int, partition: str, as_bucket_view: bool) -> None:
    pair = twins()
    # What is made on this device has no values, so whatever ends there by mistake is an error.
    with torch.device("meta"):
        sharded, plain = twin_optimizers(pair, optim.SGD, partition, as_bucket_view, lr=0.1, momentum=0.9)
        for step in range(4):
            for module, optimizer in zip(pair, (sharded, plain), strict=True):
                for param in module.parameters():
                    param.grad = param.detach() / (step + 1)
                optimizer.step()
            sharded.consolidate_state_dict(to=step % 2)
            if step == 1:
                sharded.load_state_dict(plain.state_dict())
        with pytest.raises(ValueError, match=r"rank 1: .*empty parameter list"):
            ZeroRedundancyOptimizer([] if rank == 1 else pair[0].parameters(), optim.SGD, lr=0.1)
    assert_bitwise_equal(*pair, "under another default device")
    if rank == 1:
        assert_same_state(sharded.state_dict(), plain.state_dict())


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_group_without_a_backend_for_the_cpu_carries_errors(rank: int) -> None:
    model = small_model().requires_grad_(False)
    group = dist.new_group(backend="cuda:gloo")
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1, process_group=group)
    sharded.step()
    sharded.consolidate_state_dict()
    # Statuses find their way without any parameter that they could travel with.
    with pytest.raises(TypeError, match=r"rank 1: .*unexpected keyword argument 'loud'"):
        sharded.step(**({"loud": True} if rank == 1 else {}))
    if rank == 0:
        model.requires_grad_(True)
    with pytest.raises(DisagreementError, match=r"rank 1 differs from rank 0: .* trainable True here, False there"):
        sharded.step()


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_training_warns_of_nothing() -> None:
    pair = twins()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sharded = ZeroRedundancyOptimizer(pair[0].parameters(), optim.AdamW, parameters_as_bucket_view=True)
        set_gradients(pair[0].parameters(), 0)
        sharded.step()
        sharded.consolidate_state_dict()
