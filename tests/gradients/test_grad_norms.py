"""torch's functions for clipping, and its GradScaler, on gradients that lie at their owners: as on values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ddp_training import Twins
from support.training import EVERYWHERE, cutting
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zeroshard import GradPlaceholder, ZeroRedundancyOptimizer
from zeroshard_comm import Coordinator, DisagreementError
from zeroshard_integrations.ddp import register_reduce_to_owner

INF = math.inf
pytestmark = pytest.mark.usefixtures("tensors_on_the_device")
PARTITIONS = pytest.mark.parametrize("partition", ["whole", "split"])
FOREACH = pytest.mark.parametrize("foreach", [None, True, False])


def clip_by_norm(params: list[nn.Parameter], order: float = 2.0, foreach: bool | None = None) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(params, 0.01, order, foreach=foreach)


def reduced(partition: str = "whole", seed: int = 0) -> tuple[Twins, list[nn.Parameter], list[nn.Parameter]]:
    """Twins after a backward of each, and the parameters of both."""
    twins = Twins("reduce_to_owner_hook", partition=partition)
    for ddp, _ in twins.sides:
        twins.backward(ddp, seed)
    ours, theirs = (list(ddp.parameters()) for ddp, _ in twins.sides)
    assert all(type(param.grad) is GradPlaceholder for param in ours)
    return twins, ours, theirs


def assert_same(actual: torch.Tensor, expected: torch.Tensor, partition: str = "whole") -> None:
    """Bitwise for tensors with one owner; the squares of parts are added in another order, in float64."""
    assert type(actual) is torch.Tensor
    assert (actual.dtype, actual.device, actual.shape) == (expected.dtype, expected.device, expected.shape)
    rounding = 1e-12 if partition == "split" else 0.0
    torch.testing.assert_close(actual, expected, rtol=rounding, atol=0, equal_nan=True)


@pytest.mark.by_default("1-None-whole | 1-False-whole | 2-True-split")
@pytest.mark.ranks(1, 2, backend=EVERYWHERE)
@PARTITIONS
@FOREACH
def test_clipping_by_the_norm(partition: str, foreach: bool | None) -> None:
    twins = Twins("reduce_to_owner_hook", partition=partition, exact=partition == "whole")
    for number in range(3):
        norms = []
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad(set_to_none=number != 1)
            twins.backward(ddp, number)
            norms.append(clip_by_norm(list(ddp.parameters()), foreach=foreach))
            optimizer.step()
        assert_same(*norms, partition)
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(3, backend=EVERYWHERE)
@PARTITIONS
def test_every_rank_has_the_same_bits(partition: str, world_size: int) -> None:
    _, ours, theirs = reduced(partition)
    found = torch.stack([param.grad.norm() for param in ours])
    everybodys = [torch.empty_like(found) for _ in range(world_size)]
    dist.all_gather(everybodys, found)
    assert all(torch.equal(found, other) for other in everybodys)
    # DDP's all-reduce adds three ranks in another order.
    expected = torch.stack([param.grad.norm() for param in theirs])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.by_default("2-None-whole | 2-True-split | 2-False-whole")
@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
@FOREACH
def test_clipping_by_value(partition: str, foreach: bool | None) -> None:
    twins = Twins("reduce_to_owner_hook", partition=partition)
    for number in range(3):
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad()
            twins.backward(ddp, number)
            nn.utils.clip_grad_value_(ddp.parameters(), 1e-3, foreach=foreach)
            optimizer.step()
        twins.check(f"after iteration {number}")


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
def test_ways_to_ask_for_a_norm() -> None:
    _, ours, theirs = reduced()
    for read in READS:
        for param, other in zip(ours, theirs, strict=True):
            assert_same(read(param.grad), read(other.grad))


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (lambda params: clip_by_norm(params, 1.0), r"norm of order 1.0.*clip_grad_norm_\(max_norm, norm_type=1.0\)"),
        (lambda params: clip_by_norm(params, 3.0, foreach=True), r"norm of order 3.0.*clip_grad_norm_"),
        (lambda params: params[0].grad.norm(dim=0), "a norm over some dimensions"),
        (lambda params: params[0].grad.norm(dtype=torch.float32), "another dtype"),
        (lambda params: params[0].grad.mul_(torch.ones(40)), "another tensor than a number"),
        (lambda params: torch.ones_like(params[0]).mul_(params[0].grad), "another tensor than a number"),
        (
            lambda params: params[0].grad.add_(1.0),
            r"adding is not supported on it:\nevery rank knows its 2-norm, p\.grad\.norm\(\)",
        ),
        (lambda params: clip_by_norm(params, INF), r"norm of order inf.*clip_grad_norm_\(max_norm, norm_type=inf\)"),
        (lambda params: params[0].grad.isfinite().all(), r"p\.grad\.norm\(\), which is finite if all values are"),
        (lambda params: params[0].grad.isnan().any(), r"aten\.isnan.*\n.*p\.grad\.norm\(\), which is finite"),
    ],
)
def test_one_rank_alone_is_refused_by_name_and_none_hangs(
    rank: int, operation: Callable[[list[nn.Parameter]], object], message: str
) -> None:
    twins, ours, _ = reduced()
    if rank == 1:
        with pytest.raises(RuntimeError, match=message):
            operation(ours)
    for _, optimizer in twins.sides:
        optimizer.step()
    twins.check("after the refusal")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_one_rank_alone_may_ask(rank: int) -> None:
    twins, ours, theirs = reduced()
    if rank == 0:
        assert_same(nn.utils.get_total_norm([p.grad for p in ours]), nn.utils.get_total_norm([p.grad for p in theirs]))
    for _, optimizer in twins.sides:
        optimizer.step()
    twins.check("after asking")


@pytest.mark.by_default("2-nan-whole | 2-inf-split | 2--inf-whole")
@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
@pytest.mark.parametrize("value", [math.nan, INF, -INF])
def test_what_is_not_finite_on_one_rank(rank: int, partition: str, value: float) -> None:
    twins = Twins("reduce_to_owner_hook", partition=partition)
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


class Mixed(nn.Module):
    """Parameters of two dtypes, a frozen one, one that is not used, an empty one and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(40, 30).to(torch.bfloat16)
        self.frozen = nn.Linear(30, 30, bias=False).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.last = nn.Linear(30, 2)
        self.gain, self.empty = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(self.first(inputs).float())).square().mean() * self.gain + self.empty.sum()


@pytest.mark.by_default("2-clip_by_norm-whole | 2-<lambda>-split")
@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
@pytest.mark.parametrize("clip", [clip_by_norm, lambda params: nn.utils.clip_grad_value_(params, 1e-3)])
def test_mixed_dtypes_and_missing_gradients(rank: int, partition: str, clip: Callable[..., object]) -> None:
    sides = []
    for is_sharded in (True, False):
        model = Mixed()
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        if is_sharded:
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.SGD, lr=0.1, partition=cutting(partition)
            )
            register_reduce_to_owner(ddp, optimizer)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sides.append((ddp, optimizer))
    for number in range(3):
        results = []
        for ddp, optimizer in sides:
            optimizer.zero_grad()
            torch.manual_seed(10 * number + rank)
            ddp(torch.randn(8, 40, dtype=torch.bfloat16)).backward()
            results.append(clip(list(ddp.parameters())))
            optimizer.step()
        ours, theirs = (list(ddp.parameters()) for ddp, _ in sides)
        # Parts of cut tensors add their squares in float64, and the unsharded ones in float32.
        rounding = 0.0 if partition == "whole" else 1e-5
        torch.testing.assert_close(results[0], results[1], rtol=rounding, atol=0)
        torch.testing.assert_close(ours, theirs, rtol=rounding, atol=rounding)


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_norms_follow_what_is_done_to_gradients() -> None:
    twins, ours, theirs = reduced()
    for change in (
        lambda grad: grad.mul_(-0.25),
        lambda grad: torch._foreach_mul_([grad], torch.tensor(0.5)),
        lambda grad: torch._foreach_mul_([grad], 4.0),
        lambda grad: grad.zero_(),
    ):
        for param, other in zip(ours, theirs, strict=True):
            change(param.grad)
            change(other.grad)
            assert_same(param.grad.norm(), other.grad.norm())
    for _, optimizer in twins.sides:
        optimizer.step()
    twins.check("after zero gradients")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_norms_are_unknown_after_clamping_and_after_local_gradients() -> None:
    twins = Twins("reduce_to_owner_hook")
    # DDP rebuilds its buckets in the second forward.
    twins.iterate(0)
    twins.optimizer.zero_grad()
    twins.backward(twins.ddp, 0)
    ours = list(twins.ddp.parameters())
    nn.utils.clip_grad_value_(ours, 1.0)
    with pytest.raises(RuntimeError, match="it was clamped, after which its norm is not known: take norms before"):
        clip_by_norm(ours)
    twins.optimizer.zero_grad(set_to_none=False)
    with twins.ddp.no_sync():
        twins.backward(twins.ddp, 1)
    for operation in (torch.Tensor.norm, lambda grad: grad.mul_(2.0), lambda grad: grad.clamp_(0.0, 1.0)):
        with pytest.raises(RuntimeError, match="has added to it what no backward has reduced yet"):
            operation(ours[0].grad)
    twins.backward(twins.ddp, 2)
    assert clip_by_norm(ours) > 0
    twins.optimizer.step()


CHANGES: list[Callable[[list[nn.Parameter]], object]] = [
    clip_by_norm,
    lambda params: nn.utils.clip_grad_value_(params, 1e-3),
    lambda params: params[1].grad.mul_(0.5),
    lambda params: params[0].grad.mul_(2.0),
]


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("change", CHANGES)
def test_clipping_on_one_rank_alone_is_an_error_on_every_rank(rank: int, change: Callable[..., object]) -> None:
    twins, ours, theirs = reduced()
    for params in (ours, theirs):
        params[0].grad.mul_(0.5)
    if rank == 1:
        change(ours)
    with pytest.raises(DisagreementError, match="what was done to gradients"):
        twins.optimizer.step()
    twins.check("after the error")
    # Nothing is lost: new gradients are new, and those that were changed are still told apart.
    with pytest.raises(DisagreementError, match="what was done to gradients"):
        twins.optimizer.step()
    for number in range(2):
        twins.iterate(number)
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_other_factors_on_ranks_are_an_error(rank: int) -> None:
    twins, ours, _ = reduced()
    ours[0].grad.mul_(1.0 + rank)
    with pytest.raises(DisagreementError, match=r"the checksum of what was done to gradients .* is \d+ on rank 0 and "):
        twins.optimizer.step()


@pytest.mark.by_default("2-set to None-whole | 2-zero_()-split")
@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
@pytest.mark.parametrize("done", ["set to None", "zero_()"])
def test_a_gradient_that_one_rank_drops_or_zeroes_is_an_error(rank: int, partition: str, done: str) -> None:
    twins, ours, theirs = reduced(partition)
    before = [param.detach().clone() for param in ours]
    if rank == 0 and done == "zero_()":
        ours[0].grad.zero_()
    elif rank == 0:
        ours[0].grad = None
    with pytest.raises(DisagreementError, match="what was done to gradients"):
        twins.optimizer.step()
    assert all(map(torch.equal, ours, before))
    # On all ranks it is allowed, and the others' gradients are still there.
    for params in (ours, theirs):
        if done == "zero_()":
            params[0].grad.zero_()
        else:
            params[0].grad = None
    for _, optimizer in twins.sides:
        optimizer.step()
    twins.check("after the step")


@pytest.mark.by_default("2-unscaled-whole | 2-stepped-split")
@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
@pytest.mark.parametrize("clips", [True, False], ids=["unscaled", "stepped"])
def test_torchs_grad_scaler(rank: int, partition: str, clips: bool) -> None:
    twins = Twins("reduce_to_owner_hook", partition=partition, exact=partition == "whole")
    device = torch.get_default_device()
    scalers = [torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=2) for _ in twins.sides]
    for number in range(5):
        norms = []
        for (ddp, optimizer), scaler in zip(twins.sides, scalers, strict=True):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(2 * number + rank)
            inputs = torch.randn(8, 40, dtype=torch.float64, generator=generator, device="cpu").to(device)
            if number == 2 and rank == 1:
                inputs[0, 0] = INF
            scaler.scale(ddp(inputs).square().mean()).backward()
            if clips:
                scaler.unscale_(optimizer)
                norms.append(clip_by_norm(list(ddp.parameters())))
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        if clips:
            assert_same(*norms, partition)
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_norm_that_overflows_is_of_finite_values() -> None:
    model = nn.Linear(4, 1, bias=False).half()
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    register_reduce_to_owner(ddp, optimizer)
    ddp(torch.full((1, 4), 6e4, dtype=torch.float16)).sum().backward()
    grad, found = model.weight.grad, torch.zeros(1)
    assert grad.norm() == INF
    torch._amp_foreach_non_finite_check_and_unscale_([grad], found, torch.tensor([0.25]))
    assert found == 0
    assert grad.norm() == 3e4
    # Finite values that a factor makes infinite.
    grad.mul_(1e6)
    torch._amp_foreach_non_finite_check_and_unscale_([grad], found, torch.tensor([0.25]))
    assert found == 1


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_without_norms_torchs_clipping_is_refused_and_ours_is_not() -> None:
    model = nn.Linear(40, 3).double()
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    register_reduce_to_owner(ddp, optimizer, norms=False)
    ddp(torch.ones(2, 40, dtype=torch.float64)).sum().backward()
    with pytest.raises(RuntimeError, match=r"norms=False: call optimizer.clip_grad_norm_\(\)"):
        clip_by_norm(list(model.parameters()))
    assert optimizer.clip_grad_norm_(1.0) > 1.0
    model.weight.grad.mul_(2.0)
    optimizer.step()


@pytest.mark.by_default("2-2-on all ranks | 2-(2, inf)-on rank 1 | 2-None-on all ranks")
@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("where", [(0, 1), (1,)], ids=["on all ranks", "on rank 1"])
@pytest.mark.parametrize("norms", [2, (2, INF), None], ids=str)
def test_other_norms_are_refused_on_every_rank(rank: int, norms: Any, where: tuple[int, ...]) -> None:
    model = nn.Linear(4, 3)
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    with pytest.raises(ValueError, match="is not supported: pass True for the 2-norms of all gradients, or False"):
        register_reduce_to_owner(ddp, optimizer, norms=norms if rank in where else True)


class LoadSource(nn.Module):
    """The gradients of its parameters are given, the same on every rank."""

    def __init__(self, gradients: list[torch.Tensor]) -> None:
        super().__init__()
        self.gradients = gradients
        self.params = nn.ParameterList([torch.zeros_like(gradient) for gradient in gradients])

    def forward(self) -> torch.Tensor:
        return torch.stack([(p * g).sum().float() for p, g in zip(self.params, self.gradients, strict=True)]).sum()


def given(gradients: list[torch.Tensor], partition: str) -> list[GradPlaceholder]:
    """Return the placeholders of gradients of these values."""
    model = LoadSource(gradients)
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.0, partition=cutting(partition))
    register_reduce_to_owner(ddp, optimizer)
    ddp().backward()
    # The optimizer knows what its placeholders stand for.
    KEPT.append(optimizer)
    return [param.grad for param in model.params]


KEPT: list[ZeroRedundancyOptimizer] = []
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Thousands of roundings in the dtype in which torch adds up; in half precision, that of the result."""


@pytest.mark.by_default(
    "1-torch.float64-whole | 1-torch.float16-split | 2-torch.float32-split | 4-torch.bfloat16-whole"
)
@pytest.mark.ranks(1, 2, 4, backend=EVERYWHERE)
@PARTITIONS
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
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


@pytest.mark.by_default("1-inf-whole | 1-nan-whole | 2--inf-split | 2-0.0-split")
@pytest.mark.ranks(1, 2, backend=EVERYWHERE)
@PARTITIONS
@pytest.mark.parametrize("special", [INF, -INF, math.nan, 0.0])
def test_what_is_not_finite_is_so_on_every_rank(partition: str, special: float) -> None:
    values = torch.ones(64, 40)
    values[3, 7] = special
    grad, other = given([values, torch.ones(4)], partition)
    torch.testing.assert_close(grad.norm(), values.norm(), rtol=1e-6, atol=0, equal_nan=True)
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([other, grad], found, torch.ones(1))
    assert bool(found) == (not math.isfinite(special))


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_squares_of_parts_do_not_overflow_where_those_of_the_parts_elements_do_not() -> None:
    values = torch.zeros(64, 40)
    # The square of one is finite in float32, and the sum of both is not.
    values[0, 0] = values[-1, -1] = 1.5e19
    cut, whole = given([values], "split"), given([values], "whole")
    torch.testing.assert_close(cut[0].norm(), values.double().norm().float(), rtol=1e-6, atol=0)
    assert whole[0].norm() == values.norm() == INF


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_scaler_finds_infinities_by_the_norm() -> None:
    # Finite values, of which the 2-norm is not.
    (grad,) = given([torch.full((4,), 1e20)], "whole")
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([grad], found, torch.ones(1))
    assert found == 1


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_ranks_that_differ_in_norms_are_told_so(rank: int) -> None:
    model = nn.Linear(4, 3)
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    register_reduce_to_owner(ddp, optimizer, norms=rank == 0)
    with pytest.raises(DisagreementError, match="norms is True on rank 0 and False on rank 1"):
        ddp(torch.ones(2, 4)).sum().backward()


@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
def test_our_clipping_and_torchs_follow_each_other(partition: str) -> None:
    twins, ours, _ = reduced(partition)
    before = nn.utils.get_total_norm([param.grad for param in ours])
    found = twins.optimizer.clip_grad_norm_(float(before) / 2)
    torch.testing.assert_close(found.to(before.device), before, rtol=1e-12, atol=0)
    after = nn.utils.get_total_norm([param.grad for param in ours])
    torch.testing.assert_close(after, before / 2, rtol=1e-4, atol=0)
    twins.optimizer.step()


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_converted_gradient_is_a_copy_that_has_norms() -> None:
    twins, ours, theirs = reduced()
    torch.testing.assert_close(ours[0].grad.float().norm(), theirs[0].grad.norm().float(), rtol=0, atol=0)
    for change in (lambda grad: grad.mul_(0.5), torch.Tensor.zero_, lambda grad: grad.clamp_(0.0, 1.0)):
        with pytest.raises(RuntimeError, match="it is not the gradient of its parameter, but a copy"):
            change(ours[0].grad.float())
    for _, optimizer in twins.sides:
        optimizer.step()
    twins.check("after the refusals")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_what_would_make_something_of_zero_is_refused() -> None:
    twins, ours, theirs = reduced()
    for params in (ours, theirs):
        params[0].grad.zero_().mul_(3.0).clamp_(-1.0, 1.0).div_(2.0)
    assert_same(ours[0].grad.norm(), theirs[0].grad.norm())
    with pytest.raises(RuntimeError, match=r"clamping to 0.5 and None is not supported on it: it was set to zero"):
        ours[0].grad.clamp_(min=0.5)
    with pytest.raises(RuntimeError, match="scaling by inf is not supported on it: it was set to zero"):
        ours[0].grad.mul_(INF)
    for _, optimizer in twins.sides:
        optimizer.step()
    twins.check("after zero gradients")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_dividing_gradients() -> None:
    twins, ours, theirs = reduced()
    for params in (ours, theirs):
        for param in params:
            param.grad /= 4
        torch._foreach_div_([param.grad for param in params], 2.0)
    for param, other in zip(ours, theirs, strict=True):
        assert_same(param.grad.norm(), other.grad.norm())
    for _, optimizer in twins.sides:
        optimizer.step()
    twins.check("after dividing")


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
def test_clipping_group_by_group() -> None:
    twins, ours, theirs = reduced()
    for params in (ours[:2], ours[2:]), (theirs[:2], theirs[2:]):
        for group in params:
            clip_by_norm(group)
    for param, other in zip(ours, theirs, strict=True):
        assert_same(param.grad.norm(), other.grad.norm(), "split")
    for _, optimizer in twins.sides:
        optimizer.step()
    twins.check("after the step")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_all_ranks_find_the_same_infinities(rank: int) -> None:
    model = nn.Linear(4, 1, bias=False)
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    register_reduce_to_owner(ddp, optimizer)
    ddp(torch.ones(1, 4)).sum().backward()
    found = torch.zeros(1)
    # Infinite in float32, and not in the float64 in which ranks follow the norm.
    for factor in (3e38, 1e20, 1e-30, 1e-28):
        model.weight.grad.mul_(factor)
    torch._amp_foreach_non_finite_check_and_unscale_([model.weight.grad], found, torch.ones(1))
    assert found == 1


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_norms_are_unknown_after_a_failed_exchange(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    twins, ours, _ = reduced()

    def failing(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Coordinator, "combine_disjoint", failing)
    twins.optimizer.zero_grad()
    with pytest.raises(ZeroDivisionError):
        twins.backward(twins.ddp, 1)
    with pytest.raises(RuntimeError, match="norms are exchanged at the end of a backward, if it succeeds"):
        ours[0].grad.norm()
