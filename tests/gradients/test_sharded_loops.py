"""Unusual loops with sharded gradients are those of one process, or are refused by name on every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn, optim
from torch.utils.checkpoint import checkpoint
from zeroshard import ZeroRedundancyOptimizer, shard_gradients
from zeroshard_comm import DisagreementError
from zeroshard_testing import assert_replicas_equal

pytestmark = pytest.mark.ranks(2, backend="gloo")


def layers(*, has_norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8) if has_norm else nn.Identity()
    return nn.Sequential(nn.Linear(6, 8), norm, nn.Tanh(), nn.Linear(8, 4)).double()


def batch(rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(5, 6, generator=generator, dtype=torch.float64)


def sharded(model: nn.Module) -> ZeroRedundancyOptimizer:
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), optim.SGD, lr=0.1)
    shard_gradients(model, optimizer, bucket_mb=1e-4)
    return optimizer


def check(rank: int, backward: Callable[[nn.Module, int, int], torch.Tensor], change: Callable[..., object]) -> None:
    """Train three steps, with a change of gradients between backward and step, and compare with one process."""
    model, plain = layers(), layers()
    optimizer, reference = sharded(model), optim.SGD(plain.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        backward(model, rank, number).backward()
        (sum(backward(plain, each, number) for each in range(2)) / 2).backward()
        for trained in (model, plain):
            change(trained)
        optimizer.step()
        reference.step()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param, expected)


def clip_values(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def drop_first(model: nn.Module) -> None:
    next(model.parameters()).grad = None


@pytest.mark.parametrize("change", [clip_values, drop_first])
def test_layers_that_are_all_in_reentrant_checkpoints_train_alike(
    rank: int, change: Callable[[nn.Module], None]
) -> None:
    """No output of the model itself is in the graph of the outer backward."""

    def loss(model: nn.Sequential, rank: int, number: int) -> torch.Tensor:
        inner = checkpoint(model[:3], batch(rank, number).requires_grad_(), use_reentrant=True)
        return checkpoint(lambda x: checkpoint(model[3], x, use_reentrant=True), inner, use_reentrant=True).sum()

    check(rank, loss, change)


def test_several_forwards_of_a_model_with_statistics_keep_replicas_equal(rank: int) -> None:
    """Buffers are broadcast before the second one, and autograd has saved them in the first."""
    model = layers(has_norm=True)
    optimizer = sharded(model)
    for number in range(2):
        optimizer.zero_grad()
        (model(batch(rank, number)).sum() + model.eval()(batch(rank, number + 5)).square().sum()).backward()
        model.train()
        optimizer.step()
    assert_replicas_equal(model.parameters())


class Constant(torch.autograd.Function):
    """Returns memory of an array as the gradient."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        ctx.values = values  # type: ignore[attr-defined]
        return weight.sum()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, _: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        values: torch.Tensor = ctx.values  # type: ignore[attr-defined]
        return values, None


def test_a_gradient_in_memory_of_an_array_is_not_overwritten(rank: int) -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.full((64, 64), 1.0 + rank)
    model = nn.Linear(64, 64, bias=False).double()
    optimizer = sharded(model)
    before = array.copy()
    Constant.apply(model.weight, torch.from_numpy(array)).backward()
    optimizer.step()
    assert (array == before).all()


# ---------------------------------------------------------------------- refused


def change_zero(optimizer: optim.Optimizer, _: nn.Module) -> None:
    optimizer.zero_grad()


def change_scale(_: optim.Optimizer, model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad.mul_(0.5)


@pytest.mark.parametrize("change", [change_zero, change_scale])
def test_a_change_of_gradients_on_one_rank_between_two_backwards_is_told(
    rank: int, change: Callable[[optim.Optimizer, nn.Module], None]
) -> None:
    model = layers()
    optimizer = sharded(model)
    model(batch(rank, 0)).sum().backward()
    if rank == 1:
        change(optimizer, model)
    with pytest.raises(DisagreementError, match="the checksum of operations on gradients before it"):
        model(batch(rank, 1)).sum().backward()


def test_a_step_in_a_hook_is_refused(rank: int) -> None:
    model = layers()
    optimizer = sharded(model)
    model[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(RuntimeError, match=r"called inside of backward\(\), for example in a hook"):
        model(batch(rank, 0)).sum().backward()


def test_a_hook_that_drops_a_gradient_that_was_sent_is_refused(rank: int) -> None:
    model = layers()
    optimizer = sharded(model)

    def drop(param: torch.Tensor) -> None:
        param.grad = None

    model[3].weight.register_post_accumulate_grad_hook(drop)
    with pytest.raises(RuntimeError, match=r"a hook has changed \.grad of .* inside of backward\(\)"):
        model(batch(rank, 0)).sum().backward()
    del optimizer


class Extra(nn.Module):
    """Has a frozen table or a buffer of a size of its own, before what is trained."""

    def __init__(self, kind: str, size: int) -> None:
        super().__init__()
        if kind == "a frozen parameter":
            self.table = nn.Parameter(torch.zeros(size), requires_grad=False)
        elif kind == "a buffer":
            self.register_buffer("table", torch.zeros(size))
        self.trained = nn.Linear(3, 3)


@pytest.mark.parametrize("kind", ["a frozen parameter", "a buffer", "broadcast_buffers"])
def test_ranks_whose_frozen_parameters_or_buffers_differ_are_told(rank: int, kind: str) -> None:
    model = Extra(kind, 4 + rank)
    optimizer = ZeroRedundancyOptimizer(model.trained.named_parameters(), optim.SGD, lr=0.1)
    expected = (
        "broadcast_buffers is" if kind == "broadcast_buffers" else r"frozen parameters and buffers is 'table \(4,\)"
    )
    with pytest.raises(DisagreementError, match=expected):
        shard_gradients(model, optimizer, broadcast_buffers=kind != "broadcast_buffers" or rank == 0)


def test_an_expanded_buffer_is_refused() -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("mask", torch.ones(1, 4).expand(4, 4))
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="the buffer 'mask' is sparse or expanded"):
        shard_gradients(model, optimizer)
