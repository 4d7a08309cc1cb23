"""What loops do with `p.grad` after a hook has reduced it: answered as by values, or refused by its true cause."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ddp_gradients import reduced, step_and_check
from support.ddp_training import VIEWS, Twins, batch, each_hook_with, with_hook
from support.groups import group_of
from support.training import EVERYWHERE, small_model
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import GradPlaceholder, ZeroRedundancyOptimizer
from zeroshard_testing import raises_on

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")

# ---------------------------------------------------------------------- what is answered


EVERY_PARTITION = pytest.mark.parametrize("partition", ["whole", "split", "level"])


def convolution() -> nn.Module:
    """Weights in channels_last and transposed, and a scalar."""
    torch.manual_seed(0)
    last = nn.Linear(3 * 4 * 4, 2, bias=False)
    last.weight = nn.Parameter(torch.randn(3 * 4 * 4, 2).t())
    made = nn.Sequential(nn.Unflatten(1, (1, 8, 5)), nn.Conv2d(1, 3, (5, 2)), nn.ReLU(), nn.Flatten(), last, nn.PReLU())
    return made.to(memory_format=torch.channels_last)


IDIOMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flatten().norm()": lambda grad: grad.flatten().norm(),
    "view(-1).norm()": lambda grad: (grad.view(-1) if grad.is_contiguous() else grad.reshape(-1)).norm(),
    "reshape(-1).norm(2)": lambda grad: grad.reshape(-1).norm(2),
    "ravel().norm()": lambda grad: torch.ravel(grad.data).norm(),
    "(p.grad ** 2).sum()": lambda grad: (grad**2).sum(),
    "pow(2).sum()": lambda grad: grad.detach().pow(2).sum(),
    "square().sum()": lambda grad: grad.flatten().square().sum().sqrt(),
    "square().sum(dtype=...)": lambda grad: grad.square().sum(dtype=torch.float64),
}


@pytest.mark.ranks(1, 2, backend=EVERYWHERE)
@pytest.mark.parametrize(
    ("model", "partition", "views"),
    [(small_model, "whole", False), (small_model, "level", False), (convolution, "split", True)],
    ids=["whole", "level", "split and odd memory formats"],
)
def test_norms_by_other_words_are_those_of_values(model: Callable[[], nn.Module], partition: str, views: bool) -> None:
    twins, ours, theirs = reduced(partition=partition, model=model, parameters_as_bucket_view=views)
    for scale in (1.0, -0.5):
        for param, other in zip(ours, theirs, strict=True):
            for gradient in (param.grad, other.grad):
                gradient.mul_(scale)
            for name, read in IDIOMS.items():
                found, expected = read(param.grad), read(other.grad)
                assert type(found) is torch.Tensor, name
                torch.testing.assert_close(
                    found, expected, rtol=1e-13, atol=0, msg=lambda text, at=name: f"{at}: {text}"
                )
    step_and_check(twins)


@pytest.mark.ranks(2, backend="gloo")
@EVERY_PARTITION
def test_norms_by_other_words_are_those_of_values_beside_master_weights(partition: str) -> None:
    sides = []
    for is_sharded in (True, False):
        model = small_model().to(torch.bfloat16)
        ddp = DistributedDataParallel(model)
        if is_sharded:
            _kept = with_hook("reduce_to_owner_hook", ddp, partition=partition, master_weights=True)
        ddp(batch(0).bfloat16()).square().mean().backward()
        sides.append(list(model.parameters()))
    for name, read in IDIOMS.items():
        for param, other in zip(*sides, strict=True):
            found, expected = read(param.grad), read(other.grad)
            assert found.dtype is expected.dtype, name
            # bfloat16 has 8 bits, and torch rounds each square.
            torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)


@pytest.mark.ranks(2, backend="gloo")
def test_squares_are_of_the_values_at_their_time() -> None:
    twins, *_ = reduced()
    sums = []
    for ddp, _ in twins.sides:
        grad = next(ddp.parameters()).grad
        squares, flat = grad**2, grad.flatten()
        grad.mul_(2.0)
        sums.append((squares.sum(), flat.norm()))
    torch.testing.assert_close(*sums, rtol=1e-13, atol=0)


@pytest.mark.ranks(2, backend="gloo")
@EVERY_PARTITION
def test_a_norm_may_be_changed_in_place(partition: str) -> None:
    twins, *_ = reduced(partition=partition, exact=partition == "whole")
    for ddp, _ in twins.sides:
        for param in ddp.parameters():
            for norm in (param.grad.norm(), (param.grad**2).sum()):
                norm.mul_(0.0)
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
    step_and_check(twins)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_nothing_reads_a_part_of_the_gradients_in_silence() -> None:
    twins, ours, _ = reduced()
    assert "shape=(64, 40)" in repr(ours[0].grad)
    for read in (torch.Tensor.sum, torch.Tensor.clone, torch.Tensor.isnan, copy.deepcopy):
        with pytest.raises(RuntimeError, match="is sharded"):
            read(ours[0].grad)
    with pytest.raises(RuntimeError, match="every rank knows its 2-norm"):
        ours[0].grad.add_(1.0)
    twins.optimizer.step()


@pytest.mark.ranks(2, backend=EVERYWHERE)
@VIEWS
def test_gradients_are_neither_written_nor_read_by_users(views: bool) -> None:
    twins = Twins(ddp={"gradient_as_bucket_view": views})
    twins.iterate(0)
    twins.optimizer.zero_grad()
    twins.backward(twins.ddp, 1)
    param = next(twins.ddp.parameters())
    log = torch.zeros_like(param)
    writes = {
        "add": lambda: param.grad.add_(param, alpha=0.1),
        "plus": lambda: param.grad + 1.0,
        "copy to": lambda: param.grad.copy_(log),
        "copy from": lambda: log.copy_(param.grad),
        "share": lambda: twins.ddp.share_memory(),
        "pickle": lambda: pickle.dumps(param.grad),
        "storage": lambda: param.grad.untyped_storage(),
    }
    for name, write in writes.items():
        with pytest.raises(RuntimeError, match="is sharded"):
            write()
        assert type(param.grad) is GradPlaceholder, name
    twins.optimizer.step()
    twins.plain.zero_grad()
    twins.backward(twins.plain_ddp, 1)
    twins.plain.step()
    twins.check("after it all")


OTHER_READS: dict[str, Callable[[Any], object]] = {
    "aten.abs.default": lambda grad: grad.abs().max(),
    "the power 3": lambda grad: grad**3,
    "aten.mean.default of its squares": lambda grad: (grad**2).mean(),
    "aten.sum.dim_IntList of its squares": lambda grad: (grad**2).sum(0),
    "aten.cat.default": lambda grad: torch.cat([grad.flatten()]).norm(),
    "formatting its value as '.3f'": lambda grad: f"{grad:.3f}",
}


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("named", OTHER_READS)
def test_other_reads_are_refused_in_three_short_lines(named: str) -> None:
    twins, ours, _ = reduced()
    grad = ours[0].grad
    with pytest.raises(RuntimeError, match=re.escape(named)) as told:
        OTHER_READS[named](grad)
    lines = str(told.value).splitlines()
    assert len(lines) == 3
    assert all(len(line.split()) <= 18 for line in lines)
    assert "p.grad.norm()" in lines[1]
    assert f"{grad}" == repr(grad)
    step_and_check(twins)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("factor", [2 + 0j, torch.tensor(2 + 0j)], ids=["number", "tensor"])
def test_a_complex_factor_is_refused(factor: Any) -> None:
    twins, ours, _ = reduced()
    for param in ours:
        with pytest.raises(RuntimeError, match=r"scaling by a complex number .*multiply it by a real number"):
            param.grad.mul_(factor)
    step_and_check(twins)


@pytest.mark.ranks(2, backend="gloo")
def test_changes_of_a_flattened_gradient_are_refused() -> None:
    twins, ours, _ = reduced()
    flat = ours[0].grad.view(-1)
    for change in (lambda: flat.mul_(2.0), lambda: flat.zero_(), lambda: setattr(flat, "data", torch.ones(2560))):
        with pytest.raises(RuntimeError, match=r"it is a copy or an earlier gradient.*change p\.grad"):
            change()
    step_and_check(twins)


PLAIN: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda params: optim.SGD(params, lr=0.1),
    "SGD for-loop": lambda params: optim.SGD(params, lr=0.1, foreach=False, weight_decay=0.1),
    "AdamW": lambda params: optim.AdamW(params, lr=0.1, fused=True),
    "Adafactor": lambda params: optim.Adafactor(params, lr=0.1),
    "ZeroRedundancyOptimizer": lambda params: ZeroRedundancyOptimizer(params, optim.Adam, lr=0.1),
}


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("kind", PLAIN)
def test_another_optimizer_that_steps_beside_a_hook_is_refused(kind: str) -> None:
    twins, ours, _ = reduced()
    other = PLAIN[kind](ours)
    words = (
        rf"{kind.split()[0]}\.step\(\) reads the gradient of '\d\.weight', which .*\nCall step\(\) of the hook's own"
    )
    with pytest.raises(RuntimeError, match=words):
        other.step()
    step_and_check(twins)


@pytest.mark.ranks(2, backend="gloo")
def test_a_closure_of_the_sharded_optimizer_reads_norms() -> None:
    twins, ours, _ = reduced()

    def closure() -> None:
        ours[0].grad.abs()

    with pytest.raises(RuntimeError, match="every rank knows its 2-norm"):
        twins.optimizer.step(closure)


# ---------------------------------------------------------------------- what is assigned


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_the_gradient_of_another_parameter_is_refused() -> None:
    twins, ours, _ = reduced()
    first, second = ours[1::2][:2]
    first.grad, second.grad = second.grad, first.grad
    with pytest.raises(RuntimeError, match="which belongs to another gradient"):
        twins.optimizer.step()


@pytest.mark.ranks(2, backend="gloo")
@each_hook_with("partition, where", ("whole", "on all ranks"), ("split", "on rank 1"), ("level", "on all ranks"))
def test_assigning_the_data_of_a_gradient_is_refused(rank: int, hook: str, partition: str, where: str) -> None:
    twins = Twins(hook, partition=partition, parameters_as_bucket_view=partition == "split", exact=partition == "whole")
    twins.iterate(0)
    twins.optimizer.zero_grad()
    twins.backward(twins.ddp, 1)
    before = copy.deepcopy(twins.ddp.module.state_dict())
    if where == "on all ranks" or rank == 1:
        for param in twins.ddp.parameters():
            param.grad.data = torch.ones_like(param)
            assert torch.equal(param.grad, torch.ones_like(param))
    # A hook that has stepped in backward has nothing to agree on.
    if hook == "reduce_to_owner_hook" or where == "on all ranks" or rank == 1:
        told = r"(was replaced after backward\(\) had|has not been) reduced.*: .*\.grad (or \.grad\.data )?was assigned"
        with pytest.raises(RuntimeError, match=told):
            twins.optimizer.step()
    for name, value in twins.ddp.module.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize(("how", "where"), [("assigned", "on all ranks"), ("made under no_sync()", "on rank 1")])
def test_a_gradient_that_was_replaced_is_told_so_on_every_rank(rank: int, where: str, how: str) -> None:
    twins = Twins(process_group=group_of())
    twins.iterate(0)
    twins.optimizer.zero_grad()
    twins.backward(twins.ddp, 1)
    param = next(twins.ddp.parameters())
    if where == "on all ranks" or rank == 1:
        if how == "assigned":
            param.grad = torch.ones_like(param)
        else:
            twins.optimizer.zero_grad()
            with twins.ddp.no_sync():
                twins.backward(twins.ddp, 2)
    with pytest.raises(RuntimeError, match=r"tensor \d .* was replaced after backward\(\) had reduced it"):
        twins.optimizer.step()


@pytest.mark.ranks(2, backend="gloo")
def test_gradients_of_torch_autograd_grad_are_told_so_on_every_rank() -> None:
    twins = Twins()
    twins.iterate(0)
    twins.optimizer.zero_grad()
    params = list(twins.ddp.parameters())
    for param, grad in zip(params, torch.autograd.grad(twins.ddp(batch(1)).sum(), params), strict=True):
        param.grad = grad
    with raises_on(
        RuntimeError, ranks=(0, 1), match=r"has not been reduced.*: perhaps \.grad was assigned, .* torch\.autograd"
    ):
        twins.optimizer.step()
