"""Every rank knows the norm of every gradient that lies at its owner, with the same bits, whatever is done to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.combinations import each_of
from support.ddp_gradients import assert_same, clip_by_norm, reduced, step_and_check
from support.ddp_training import PARTITIONS, Twins, with_hook
from support.training import EVERYWHERE
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zeroshard import GradPlaceholder, ZeroRedundancyOptimizer
from zeroshard_comm import Coordinator, DisagreementError
from zeroshard_integrations.ddp import register_reduce_to_owner

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")


@pytest.mark.ranks(3, backend=EVERYWHERE)
@PARTITIONS
def test_every_rank_has_the_same_bits(partition: str, world_size: int) -> None:
    _, ours, theirs = reduced(partition=partition)
    found = torch.stack([param.grad.norm() for param in ours])
    everybodys = [torch.empty_like(found) for _ in range(world_size)]
    dist.all_gather(everybodys, found)
    assert all(torch.equal(found, other) for other in everybodys)
    # DDP's all-reduce adds three ranks in another order, before the first step too.
    expected = torch.stack([param.grad.norm() for param in theirs])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)


READS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    torch.Tensor.norm,
    lambda grad: grad.data.norm(2),
    lambda grad: grad.detach().norm("fro"),
    torch.norm,
    torch.linalg.norm,
    lambda grad: torch.linalg.vector_norm(grad, dim=tuple(range(grad.dim()))),
    lambda grad: torch._foreach_norm([grad, torch.ones(3)])[0],
    lambda grad: nn.utils.get_total_norm([grad, torch.ones(3)]),
]


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_norm_is_asked_for_in_several_ways() -> None:
    _, ours, theirs = reduced()
    for read in READS:
        for param, other in zip(ours, theirs, strict=True):
            assert_same(read(param.grad), read(other.grad))


class LoadSource(nn.Module):
    """The gradients of its parameters are given, the same on every rank."""

    def __init__(self, gradients: list[torch.Tensor]) -> None:
        super().__init__()
        self.gradients = gradients
        self.params = nn.ParameterList([torch.zeros_like(gradient) for gradient in gradients])

    def forward(self) -> torch.Tensor:
        return torch.stack([(p * g).sum().float() for p, g in zip(self.params, self.gradients, strict=True)]).sum()


KEPT: list[ZeroRedundancyOptimizer] = []


def given(gradients: list[torch.Tensor], partition: str) -> list[GradPlaceholder]:
    """Return the placeholders of gradients of these values."""
    ddp = DistributedDataParallel(LoadSource(gradients))
    # The optimizer knows what its placeholders stand for.
    KEPT.append(with_hook("reduce_to_owner_hook", ddp, partition=partition, lr=0.0))
    ddp().backward()
    return [param.grad for param in ddp.module.params]


ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Thousands of roundings in the dtype in which torch adds up; in half precision, that of the result."""


@pytest.mark.exhaustive_at(1, 4)
@pytest.mark.ranks(1, 2, 4, backend=EVERYWHERE)
@each_of("dtype", ROUNDING, partition=["whole", "split"])
def test_norms_are_those_in_float64_but_for_roundings(partition: str, dtype: torch.dtype) -> None:
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    shapes = [(64, 40), (3,), (1, 300), (0, 3), (), (7, 5, 9)]
    sizes = (1.0, 1e3, 1e-3, 1.0, 0.0, 1e2)
    values = [
        torch.randn(shape, generator=generator).mul(size).to(dtype) for shape, size in zip(shapes, sizes, strict=True)
    ]
    for grad, value in zip(given(values, partition), values, strict=True):
        rounding = ROUNDING[dtype]
        expected = value.double().norm()
        torch.testing.assert_close(grad.norm().double(), expected, rtol=rounding, atol=0)


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_squares_of_parts_do_not_overflow_where_those_of_the_parts_elements_do_not() -> None:
    values = torch.zeros(64, 40)
    # The square of one is finite in float32, and the sum of both is not.
    values[0, 0] = values[-1, -1] = 1.5e19
    cut, whole = given([values], "split"), given([values], "whole")
    torch.testing.assert_close(cut[0].norm(), values.double().norm().float(), rtol=1e-6, atol=0)
    assert whole[0].norm() == values.norm() == math.inf


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_norms_follow_what_is_done_to_gradients() -> None:
    twins, ours, theirs = reduced()
    for change in (
        lambda grad: grad.mul_(-0.25),
        lambda grad: torch._foreach_mul_([grad], torch.tensor(0.5)),
        lambda grad: torch._foreach_mul_([grad], 4.0),
        lambda grad: grad.div_(4),
        lambda grad: torch._foreach_div_([grad], 2.0),
        lambda grad: grad.zero_(),
    ):
        for param, other in zip(ours, theirs, strict=True):
            change(param.grad)
            change(other.grad)
            assert_same(param.grad.norm(), other.grad.norm())
    step_and_check(twins)


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_what_would_make_something_of_zero_is_refused() -> None:
    twins, ours, theirs = reduced()
    for params in (ours, theirs):
        params[0].grad.zero_().mul_(3.0).clamp_(-1.0, 1.0).div_(2.0)
    assert_same(ours[0].grad.norm(), theirs[0].grad.norm())
    with pytest.raises(RuntimeError, match=r"clamping to 0.5 and None is not supported on it: it was set to zero"):
        ours[0].grad.clamp_(min=0.5)
    with pytest.raises(RuntimeError, match="scaling by inf is not supported on it: it was set to zero"):
        ours[0].grad.mul_(math.inf)
    step_and_check(twins)


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_converted_gradient_is_a_copy_that_has_norms() -> None:
    twins, ours, theirs = reduced()
    torch.testing.assert_close(ours[0].grad.float().norm(), theirs[0].grad.norm().float(), rtol=0, atol=0)
    for change in (lambda grad: grad.mul_(0.5), torch.Tensor.zero_, lambda grad: grad.clamp_(0.0, 1.0)):
        with pytest.raises(RuntimeError, match="it is a copy or an earlier gradient, not the current one"):
            change(ours[0].grad.float())
    step_and_check(twins)


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_norms_can_be_read_after_the_step() -> None:
    twins, ours, theirs = reduced()
    for _, optimizer in twins.sides:
        optimizer.step()
    for param, other in zip(ours, theirs, strict=True):
        assert_same(param.grad.norm(), other.grad.norm())
    with pytest.raises(RuntimeError, match=r"a step has used it: change gradients before step\(\)"):
        clip_by_norm(ours)
    twins.optimizer.zero_grad(set_to_none=False)
    assert ours[0].grad.norm() == 0
    with pytest.raises(RuntimeError, match=r"scaling by 0\.0 is not supported on it: it was set to zero"):
        ours[0].grad.div_(0.0)


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_norms_are_unknown_after_clamping_and_after_local_gradients() -> None:
    twins = Twins()
    # DDP rebuilds its buckets in the second forward.
    twins.iterate(0)
    twins.optimizer.zero_grad()
    twins.backward(twins.ddp, 0)
    ours = list(twins.ddp.parameters())
    nn.utils.clip_grad_value_(ours, 1.0)
    with pytest.raises(RuntimeError, match="it was clamped, so its norm is not known: take norms before clamping"):
        clip_by_norm(ours)
    twins.optimizer.zero_grad(set_to_none=False)
    with twins.ddp.no_sync():
        twins.backward(twins.ddp, 1)
    for operation in (torch.Tensor.norm, lambda grad: grad.mul_(2.0), lambda grad: grad.clamp_(0.0, 1.0)):
        with pytest.raises(RuntimeError, match="has added values to it that no backward has reduced yet"):
            operation(ours[0].grad)
    twins.backward(twins.ddp, 2)
    assert clip_by_norm(ours) > 0
    twins.optimizer.step()


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_norms_are_unknown_after_a_failed_exchange(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    twins, ours, _ = reduced()

    def failing(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Coordinator, "combine_disjoint", failing)
    twins.optimizer.zero_grad()
    with pytest.raises(ZeroDivisionError):
        twins.backward(twins.ddp, 1)
    with pytest.raises(RuntimeError, match="exchange norms at the end of each successful backward"):
        ours[0].grad.norm()


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize(("norms", "where"), [(2, (0, 1)), ((2, math.inf), (1,)), (None, (0, 1))], ids=str)
def test_other_norms_are_refused_on_every_rank(rank: int, norms: Any, where: tuple[int, ...]) -> None:
    model = nn.Linear(4, 3)
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    with pytest.raises(ValueError, match="is not supported: pass True for the 2-norms of all gradients, or False"):
        register_reduce_to_owner(ddp, optimizer, norms=norms if rank in where else True)


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_ranks_that_differ_in_norms_are_told_so(rank: int) -> None:
    model = nn.Linear(4, 3)
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    register_reduce_to_owner(ddp, optimizer, norms=rank == 0)
    with pytest.raises(DisagreementError, match="norms is True on rank 0 and False on rank 1"):
        ddp(torch.ones(2, 4)).sum().backward()


# ---------------------------------------------------------------------- what is not finite


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize(("value", "partition"), [(math.nan, "whole"), (math.inf, "split"), (-math.inf, "whole")])
def test_what_is_not_finite_on_one_rank_is_an_error_on_all(rank: int, partition: str, value: float) -> None:
    twins = Twins(partition=partition)
    for ddp, optimizer in twins.sides:
        optimizer.zero_grad()
        inputs = torch.full((8, 40), value if rank == 1 else 0.5, dtype=torch.float64)
        ddp(inputs).square().mean().backward()
        params = list(ddp.parameters())
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    ours, theirs = (list(ddp.parameters()) for ddp, _ in twins.sides)
    for param, other in zip(ours, theirs, strict=True):
        assert_same(param.grad.norm(), other.grad.norm(), partition)
    assert_same(clip_by_norm(ours), clip_by_norm(theirs), partition)
    for _, optimizer in twins.sides:
        optimizer.step()


@pytest.mark.exhaustive_at(1)
@pytest.mark.ranks(1, 2, backend=EVERYWHERE)
@each_of("special", [math.nan, -math.inf, math.inf, 0.0], partition=["whole", "split"])
def test_what_is_not_finite_is_so_on_every_rank(partition: str, special: float) -> None:
    values = torch.ones(64, 40)
    values[3, 7] = special
    grad, other = given([values, torch.ones(4)], partition)
    torch.testing.assert_close(grad.norm(), values.norm(), rtol=1e-6, atol=0, equal_nan=True)
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([other, grad], found, torch.ones(1))
    assert bool(found) == (not math.isfinite(special))


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_norm_that_overflows_is_of_finite_values() -> None:
    model = nn.Linear(4, 1, bias=False).half()
    ddp = DistributedDataParallel(model)
    KEPT.append(with_hook("reduce_to_owner_hook", ddp))
    ddp(torch.full((1, 4), 6e4, dtype=torch.float16)).sum().backward()
    grad, found = model.weight.grad, torch.zeros(1)
    assert grad.norm() == math.inf
    torch._amp_foreach_non_finite_check_and_unscale_([grad], found, torch.tensor([0.25]))
    assert found == 0
    assert grad.norm() == 3e4
    # Finite values that a factor makes infinite.
    grad.mul_(1e6)
    torch._amp_foreach_non_finite_check_and_unscale_([grad], found, torch.tensor([0.25]))
    assert found == 1


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_scaler_finds_infinities_by_the_norm() -> None:
    # Finite values, of which the 2-norm is not.
    (grad,) = given([torch.full((4,), 1e20)], "whole")
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([grad], found, torch.ones(1))
    assert found == 1


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_all_ranks_find_the_same_infinities(rank: int) -> None:
    model = nn.Linear(4, 1, bias=False)
    ddp = DistributedDataParallel(model)
    KEPT.append(with_hook("reduce_to_owner_hook", ddp))
    ddp(torch.ones(1, 4)).sum().backward()
    found = torch.zeros(1)
    # Infinite in float32, and not in the float64 in which ranks follow the norm.
    for factor in (3e38, 1e20, 1e-30, 1e-28):
        model.weight.grad.mul_(factor)
    torch._amp_foreach_non_finite_check_and_unscale_([model.weight.grad], found, torch.ones(1))
    assert found == 1
