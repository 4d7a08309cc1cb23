"""Gradients that lie at their owners are clipped, scaled and unscaled by the optimizer and by torch as plain ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from support.ddp_by_collectives import BOTH_WAYS
from support.ddp_gradients import BareTwins, assert_same, clip_by_norm, reduced, step_and_check
from support.ddp_training import PARTITIONS, Twins, assert_close, with_hook
from support.training import EVERYWHERE
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError
from zeroshard_integrations.ddp import register_reduce_to_owner

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")


# ---------------------------------------------------------------------- by the optimizer


@pytest.mark.exhaustive_at(3)
@pytest.mark.ranks(2, 3, backend=EVERYWHERE)
@BOTH_WAYS
@pytest.mark.parametrize(("norm_type", "partition"), [(2.0, "whole"), (1.0, "split"), (float("inf"), "whole")])
def test_the_optimizer_clips_by_the_norm_over_all_ranks(
    twins_by: type[Twins], partition: str, norm_type: float
) -> None:
    twins = twins_by(partition=partition, exact=False)
    for number in range(5):
        norms = []
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad()
            twins.backward(ddp, number)
            if ddp is twins.ddp:
                norms.append(twins.optimizer.clip_grad_norm_(0.01, norm_type))
            else:
                norms.append(nn.utils.clip_grad_norm_(ddp.parameters(), 0.01, norm_type))
            optimizer.step()
        torch.testing.assert_close(norms[0].to(norms[1].device), norms[1], rtol=1e-13, atol=0.0)
        # Norms are summed in another order: 1e-13 in the gradients, which Adam passes on.
        assert_close(twins.ddp.module, twins.plain_ddp.module, 1e-10, f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_clipping_without_a_hook_is_that_of_torch() -> None:
    # Before its first bucket this one has no effect.
    twins = BareTwins()
    ours, theirs = twins.ddp.module, twins.plain_ddp.module
    for model in (ours, theirs):
        for number, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, number + 1.0)
    assert torch.equal(twins.optimizer.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(theirs.parameters(), 0.5))
    twins.optimizer.step()
    twins.plain.step()
    twins.check("after the step")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_what_is_not_finite_or_differs_is_not_clipped(rank: int) -> None:
    twins = Twins()
    twins.backward(twins.ddp, 0)
    infinite = Twins()
    infinite.backward(infinite.ddp, 0, lambda ddp, x: (ddp(x) * (float("inf") if rank else 1.0)).sum())
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        infinite.optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    with pytest.raises(RuntimeError, match=r"rank 0 called it with max_norm=1\.0, .*rank 1 with max_norm=2\.0"):
        twins.optimizer.clip_grad_norm_(1.0 + rank)
    with pytest.raises(ValueError, match="rank 1: could not convert"):
        twins.optimizer.clip_grad_norm_("high" if rank else 1.0)  # type: ignore[arg-type]
    assert twins.optimizer.clip_grad_norm_(1.0) > 0


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("order", [0.0, -1.0, -float("inf")])
def test_orders_of_norms_that_are_not_positive_are_refused(order: float) -> None:
    twins = Twins()
    twins.backward(twins.ddp, 0)
    with pytest.raises(ValueError, match="pass a positive order"):
        twins.optimizer.clip_grad_norm_(1.0, order)
    twins.optimizer.step()


# ---------------------------------------------------------------------- by torch


@pytest.mark.exhaustive_at(2)
@pytest.mark.ranks(1, 2, backend=EVERYWHERE)
@pytest.mark.parametrize(
    ("foreach", "partition"),
    [(None, "whole"), (True, "split"), (False, "whole")],
    ids=["default", "foreach", "for-loop"],
)
def test_torch_clips_by_the_norm(partition: str, foreach: bool | None) -> None:
    twins = Twins(partition=partition, exact=partition == "whole")
    for number in range(3):
        norms = []
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad(set_to_none=number != 1)
            twins.backward(ddp, number)
            norms.append(clip_by_norm(list(ddp.parameters()), foreach=foreach))
            optimizer.step()
        assert_same(*norms, partition)
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize(
    ("foreach", "partition"),
    [(None, "whole"), (True, "split"), (False, "whole")],
    ids=["default", "foreach", "for-loop"],
)
def test_torch_clips_by_value(partition: str, foreach: bool | None) -> None:
    twins = Twins(partition=partition)
    for number in range(3):
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad()
            twins.backward(ddp, number)
            nn.utils.clip_grad_value_(ddp.parameters(), 1e-3, foreach=foreach)
            optimizer.step()
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_groups_are_clipped_one_by_one() -> None:
    twins, ours, theirs = reduced()
    for params in (ours[:2], ours[2:]), (theirs[:2], theirs[2:]):
        for group in params:
            clip_by_norm(group)
    for param, other in zip(ours, theirs, strict=True):
        assert_same(param.grad.norm(), other.grad.norm(), "split")
    step_and_check(twins)


def clip_by_value(params: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_value_(params, 1e-3)


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


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize(
    ("clip", "partition"), [(clip_by_norm, "whole"), (clip_by_value, "split")], ids=["by the norm", "by value"]
)
def test_mixed_dtypes_and_missing_gradients_are_clipped(rank: int, partition: str, clip: Callable[..., object]) -> None:
    sides = []
    for is_sharded in (True, False):
        model = Mixed()
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        if is_sharded:
            optimizer = with_hook("reduce_to_owner_hook", ddp, partition=partition)
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
@PARTITIONS
def test_our_clipping_and_torchs_follow_each_other(partition: str) -> None:
    twins, ours, _ = reduced(partition=partition)
    before = nn.utils.get_total_norm([param.grad for param in ours])
    found = twins.optimizer.clip_grad_norm_(float(before) / 2)
    torch.testing.assert_close(found.to(before.device), before, rtol=1e-12, atol=0)
    after = nn.utils.get_total_norm([param.grad for param in ours])
    torch.testing.assert_close(after, before / 2, rtol=1e-4, atol=0)
    twins.optimizer.step()


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


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize(("clips", "partition"), [(True, "whole"), (False, "split")], ids=["unscaled", "stepped"])
def test_torchs_grad_scaler_skips_the_same_steps(rank: int, partition: str, clips: bool) -> None:
    twins = Twins(partition=partition, exact=partition == "whole")
    device = torch.get_default_device()
    scalers = [torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=2) for _ in twins.sides]
    for number in range(5):
        norms = []
        for (ddp, optimizer), scaler in zip(twins.sides, scalers, strict=True):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(2 * number + rank)
            inputs = torch.randn(8, 40, dtype=torch.float64, generator=generator, device="cpu").to(device)
            if number == 2 and rank == 1:
                inputs[0, 0] = math.inf
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


# ---------------------------------------------------------------------- on one rank alone


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (lambda params: clip_by_norm(params, 1.0), r"norm of order 1.0.*clip_grad_norm_\(max_norm, norm_type=1.0\)"),
        (lambda params: clip_by_norm(params, 3.0, foreach=True), r"norm of order 3.0.*clip_grad_norm_"),
        (lambda params: params[0].grad.norm(dim=0), "a norm over some dimensions"),
        (lambda params: params[0].grad.norm(dtype=torch.float32), "another dtype"),
        (lambda params: params[0].grad.mul_(torch.ones(40)), "a tensor other than a number"),
        (lambda params: torch.ones_like(params[0]).mul_(params[0].grad), "a tensor other than a number"),
        (
            lambda params: params[0].grad.add_(1.0),
            r"adding is not supported on it:\nevery rank knows its 2-norm, p\.grad\.norm\(\)",
        ),
        (
            lambda params: clip_by_norm(params, math.inf),
            r"norm of order inf.*clip_grad_norm_\(max_norm, norm_type=inf\)",
        ),
        (lambda params: params[0].grad.isfinite().all(), r"p\.grad\.norm\(\), which is finite if all values are"),
        (lambda params: params[0].grad.isnan().any(), r"aten\.isnan.*\n.*p\.grad\.norm\(\), which is finite"),
    ],
    ids=["order 1", "order 3", "dim", "dtype", "times a tensor", "times it", "add", "order inf", "isfinite", "isnan"],
)
def test_one_rank_alone_is_refused_by_name_and_none_hangs(
    rank: int, operation: Callable[[list[nn.Parameter]], object], message: str
) -> None:
    twins, ours, _ = reduced()
    if rank == 1:
        with pytest.raises(RuntimeError, match=message):
            operation(ours)
    step_and_check(twins)


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_one_rank_alone_may_ask(rank: int) -> None:
    twins, ours, theirs = reduced()
    if rank == 0:
        assert_same(nn.utils.get_total_norm([p.grad for p in ours]), nn.utils.get_total_norm([p.grad for p in theirs]))
    step_and_check(twins)


CHANGES: list[Callable[[list[nn.Parameter]], object]] = [
    clip_by_norm,
    clip_by_value,
    lambda params: params[1].grad.mul_(0.5),
    lambda params: params[0].grad.mul_(2.0),
]


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("change", CHANGES, ids=["by the norm", "by value", "scaled", "scaled again"])
def test_clipping_on_one_rank_alone_is_an_error_on_every_rank(rank: int, change: Callable[..., object]) -> None:
    twins, ours, theirs = reduced()
    for params in (ours, theirs):
        params[0].grad.mul_(0.5)
    if rank == 1:
        change(ours)
    with pytest.raises(DisagreementError, match=r"the checksum of operations on gradients .* is \d+ on rank 0 and "):
        twins.optimizer.step()
    twins.check("after the error")
    # Nothing is lost: new gradients are new, and those that were changed are still told apart.
    with pytest.raises(DisagreementError, match="operations on gradients"):
        twins.optimizer.step()
    for number in range(2):
        twins.iterate(number)
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize(("done", "partition"), [("set to None", "whole"), ("zero_()", "split")])
def test_a_gradient_that_one_rank_drops_or_zeroes_is_an_error(rank: int, partition: str, done: str) -> None:
    twins, ours, theirs = reduced(partition=partition)
    before = [param.detach().clone() for param in ours]
    if rank == 0 and done == "zero_()":
        ours[0].grad.zero_()
    elif rank == 0:
        ours[0].grad = None
    with pytest.raises(DisagreementError, match="operations on gradients"):
        twins.optimizer.step()
    assert all(map(torch.equal, ours, before))
    # On all ranks it is allowed, and the others' gradients are still there.
    for params in (ours, theirs):
        if done == "zero_()":
            params[0].grad.zero_()
        else:
            params[0].grad = None
    step_and_check(twins)
