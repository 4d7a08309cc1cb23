"""What loops do with ``p.grad`` after a backward with a hook: answered as by values, or refused by its true cause."""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
import copy
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ddp_training import HOOKS, Twins, batch, register, steps_in_backward
from support.training import EVERYWHERE, cutting, small_model
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import PeerLostError
from zeroshard_integrations.ddp import reduce_to_owner_hook
from zeroshard_testing import assert_replicas_equal, raises_on

EVERY_HOOK = pytest.mark.parametrize("hook", HOOKS)
STEPPING_HOOKS = pytest.mark.parametrize("hook", HOOKS[1:])
WHERE = pytest.mark.parametrize("where", ["on all ranks", "on rank 1"])
PARTITIONS = pytest.mark.parametrize("partition", ["whole", "split", "level"])
VIEWS = pytest.mark.parametrize("views", [False, True])


def reduced(**arguments: Any) -> Twins:
    """Twins after a backward of each, in the second iteration."""
    twins = Twins("reduce_to_owner_hook", **arguments)
    twins.iterate(0)
    for ddp, optimizer in twins.sides:
        optimizer.zero_grad()
        twins.backward(ddp, 1)
    return twins


def step_and_check(twins: Twins) -> None:
    for _, optimizer in twins.sides:
        optimizer.step()
    twins.check("after the step")


# ---------------------------------------------------------------------- what is answered


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


@pytest.mark.by_default("1-small_model-False-whole | 1-small_model-False-level | 2-convolution-True-split")
@pytest.mark.usefixtures("tensors_on_the_device")
@pytest.mark.ranks(1, 2, backend=EVERYWHERE)
@PARTITIONS
@VIEWS
@pytest.mark.parametrize("model", [small_model, convolution])
def test_norms_by_other_words(partition: str, model: Callable[[], nn.Module], *, views: bool) -> None:
    twins = reduced(partition=partition, model=model, parameters_as_bucket_view=views)
    for scale in (1.0, -0.5):
        for param, other in zip(twins.ddp.parameters(), twins.plain_ddp.parameters(), strict=True):
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
@PARTITIONS
def test_norms_by_other_words_beside_master_weights(partition: str) -> None:
    sides = []
    for is_sharded in (True, False):
        model = small_model().to(torch.bfloat16)
        ddp = DistributedDataParallel(model)
        if is_sharded:
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), optim.SGD, partition=cutting(partition), master_weights=True, lr=0.1
            )
            register("reduce_to_owner_hook", ddp, optimizer)
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
    twins = reduced()
    sums = []
    for ddp, _ in twins.sides:
        grad = next(ddp.parameters()).grad
        squares, flat = grad**2, grad.flatten()
        grad.mul_(2.0)
        sums.append((squares.sum(), flat.norm()))
    torch.testing.assert_close(*sums, rtol=1e-13, atol=0)


@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
def test_a_norm_may_be_changed_in_place(partition: str) -> None:
    twins = reduced(partition=partition, exact=partition == "whole")
    for ddp, _ in twins.sides:
        for param in ddp.parameters():
            for norm in (param.grad.norm(), (param.grad**2).sum()):
                norm.mul_(0.0)
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
    step_and_check(twins)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize(
    ("operation", "named"),
    [
        (lambda grad: grad.abs().max(), "aten.abs.default"),
        (lambda grad: grad**3, "the power 3"),
        (lambda grad: (grad**2).mean(), "aten.mean.default of its squares"),
        (lambda grad: (grad**2).sum(0), "aten.sum.dim_IntList of its squares"),
        (lambda grad: torch.cat([grad.flatten()]).norm(), "aten.cat.default"),
        (lambda grad: f"{grad:.3f}", "formatting its value as '.3f'"),
    ],
)
def test_other_reads_are_refused_in_three_short_lines(operation: Callable[[Any], object], named: str) -> None:
    twins = reduced()
    grad = next(twins.ddp.parameters()).grad
    with pytest.raises(RuntimeError, match=re.escape(named)) as told:
        operation(grad)
    lines = str(told.value).splitlines()
    assert len(lines) == 3
    assert all(len(line.split()) <= 18 for line in lines)
    assert "p.grad.norm()" in lines[1]
    assert f"{grad}" == repr(grad)
    step_and_check(twins)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("factor", [2 + 0j, torch.tensor(2 + 0j)], ids=["number", "tensor"])
def test_a_complex_factor(factor: Any) -> None:
    twins = reduced()
    for param in twins.ddp.parameters():
        with pytest.raises(RuntimeError, match=r"scaling by a complex number .*multiply it by a real number"):
            param.grad.mul_(factor)
    step_and_check(twins)


@pytest.mark.ranks(2, backend="gloo")
def test_changes_of_a_flattened_gradient_are_refused() -> None:
    twins = reduced()
    flat = next(twins.ddp.parameters()).grad.view(-1)
    for change in (lambda: flat.mul_(2.0), lambda: flat.zero_(), lambda: setattr(flat, "data", torch.ones(2560))):
        with pytest.raises(RuntimeError, match=r"it is not the gradient of its parameter.*change p\.grad itself"):
            change()
    step_and_check(twins)


# ---------------------------------------------------------------------- what is assigned


@pytest.mark.by_default(
    "2-reduce_to_owner_hook-on all ranks-False-whole | 2-hook_with_zero_step-on rank 1-True-split | "
    "2-hook_with_zero_step_interleaved-on all ranks-False-level"
)
@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
@VIEWS
@WHERE
@EVERY_HOOK
def test_assigning_the_data_of_a_gradient(rank: int, hook: str, partition: str, where: str, *, views: bool) -> None:
    twins = Twins(hook, partition=partition, parameters_as_bucket_view=views, exact=partition == "whole")
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
        told = r"(was replaced after backward\(\) had|has not been) reduced.*: \.grad (or \.grad\.data )?was assigned"
        with pytest.raises(RuntimeError, match=told):
            twins.optimizer.step()
    for name, value in twins.ddp.module.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.ranks(2, backend="gloo")
def test_gradients_of_torch_autograd_grad_are_told_so_on_every_rank() -> None:
    twins = Twins("reduce_to_owner_hook")
    twins.iterate(0)
    twins.optimizer.zero_grad()
    params = list(twins.ddp.parameters())
    for param, grad in zip(params, torch.autograd.grad(twins.ddp(batch(1)).sum(), params), strict=True):
        param.grad = grad
    with raises_on(
        RuntimeError, ranks=(0, 1), match=r"has not been reduced.*: \.grad was assigned, as after torch\.autograd"
    ):
        twins.optimizer.step()


# ---------------------------------------------------------------------- what copies a gradient


class BareTwins(Twins):
    """The hook is registered at DDP, which does not tell when it rebuilds its buckets."""

    def register(self, hook: str, inner: Callable[..., Any], inner_state: object) -> None:
        self.ddp.register_comm_hook(self.optimizer, reduce_to_owner_hook)


@pytest.mark.by_default("1-False-False-whole | 1-False-False-level | 2-True-True-split")
@pytest.mark.ranks(1, 2, backend="gloo")
@PARTITIONS
@VIEWS
@pytest.mark.parametrize("accumulates", [False, True])
def test_the_bare_hook_after_gradients_were_set_to_zero(partition: str, *, views: bool, accumulates: bool) -> None:
    twins = BareTwins(
        "reduce_to_owner_hook", partition=partition, parameters_as_bucket_view=views, exact=partition == "whole"
    )
    for number in range(4):
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad(set_to_none=False)
            if accumulates:
                with ddp.no_sync():
                    twins.backward(ddp, 10 + number)
            twins.backward(ddp, number)
            optimizer.step()
        twins.check(f"after iteration {number}")


COPIES: dict[str, Callable[[Twins], object]] = {
    "another DDP": lambda twins: DistributedDataParallel(twins.ddp.module, gradient_as_bucket_view=True),
    "share_memory()": lambda twins: twins.ddp.module.share_memory(),
}


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("how", COPIES)
def test_a_model_is_wrapped_again_or_shared_only_after_zero_grad(how: str) -> None:
    twins = reduced()
    with pytest.raises(RuntimeError, match=r"^[^\n]* is not supported on it: [^\n]*call zero_grad\(\) before"):
        COPIES[how](twins)
    step_and_check(twins)
    twins.optimizer.zero_grad()
    COPIES[how](twins)


@pytest.mark.by_default(
    "2-{}-whole-reduce_to_owner_hook | 2-{'gradient_as_bucket_view': False}-split-hook_with_zero_step | "
    "2-{'static_graph': True}-level-hook_with_zero_step_interleaved"
)
@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
@PARTITIONS
@pytest.mark.parametrize("arguments", [{}, {"gradient_as_bucket_view": False}, {"static_graph": True}], ids=str)
def test_a_forward_between_a_backward_and_its_step(hook: str, partition: str, arguments: dict[str, Any]) -> None:
    twins = Twins(hook, partition=partition, ddp=arguments, exact=partition == "whole")
    for number in range(4):
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad()
            twins.backward(ddp, number)
            ddp(batch(number + 10))
            optimizer.step()
        twins.check(f"after iteration {number}")


# ---------------------------------------------------------------------- groups that are added


@pytest.mark.by_default(
    "2-on all ranks-reduce_to_owner_hook | 2-on all ranks-hook_with_zero_step_interleaved | "
    "2-on rank 1-hook_with_zero_step"
)
@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
@WHERE
def test_a_group_of_parameters_that_ddp_does_not_reduce(rank: int, hook: str, where: str) -> None:
    model = small_model().double()
    model[3].requires_grad_(False)
    named = dict(model.named_parameters())
    late = [(name, named.pop(name)) for name in ("3.weight", "3.bias")]
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(
        list(named.items()), optim.SGD, overlap_with_ddp=steps_in_backward(hook), lr=0.1
    )
    register(hook, ddp, optimizer)

    def iterate(number: int) -> None:
        optimizer.zero_grad()
        ddp(batch(number)).square().mean().backward()
        optimizer.step()

    iterate(0)
    model[3].requires_grad_(True)
    added = {"params": late, "lr": 0.5}
    if where == "on rank 1":
        # The others add one that DDP was told to ignore.
        harmless = [(name, nn.Parameter(param.detach().clone())) for name, param in late]
        for _, param in harmless:
            param._ddp_ignored = True
        added = added if rank == 1 else {"params": harmless, "lr": 0.5}
    words = r"'3\.weight' is added after the first backward .*\nBuild both with all parameters .* unfreeze them later"
    with raises_on(ValueError, ranks=(0, 1), match=words):
        optimizer.add_param_group(added)
    assert len(optimizer.param_groups) == 1
    model[3].requires_grad_(False)
    iterate(1)
    assert_replicas_equal(model.parameters())


@pytest.mark.by_default(
    "1-False-whole-reduce_to_owner_hook | 1-False-level-hook_with_zero_step_interleaved | "
    "2-True-split-hook_with_zero_step"
)
@pytest.mark.ranks(1, 2, backend="gloo")
@EVERY_HOOK
@PARTITIONS
@VIEWS
def test_all_parameters_from_the_start_and_unfrozen_later(hook: str, partition: str, *, views: bool) -> None:
    twins = Twins(
        hook,
        partition=partition,
        parameters_as_bucket_view=views,
        ddp={"find_unused_parameters": True},
        exact=partition == "whole",
    )
    for number in range(6):
        for ddp, _ in twins.sides:
            ddp.module[0].requires_grad_(number > 2)
        twins.iterate(number)
        twins.check(f"after iteration {number}")


# ---------------------------------------------------------------------- other optimizers, and uneven data


PLAIN: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda params: optim.SGD(params, lr=0.1),
    "SGD for-loop": lambda params: optim.SGD(params, lr=0.1, foreach=False, weight_decay=0.1),
    "AdamW": lambda params: optim.AdamW(params, lr=0.1, fused=True),
    "Adafactor": lambda params: optim.Adafactor(params, lr=0.1),
    "ZeroRedundancyOptimizer": lambda params: ZeroRedundancyOptimizer(params, optim.Adam, lr=0.1),
}


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("kind", PLAIN)
def test_another_optimizer_that_is_stepped_while_a_hook_is_registered(kind: str) -> None:
    twins = reduced()
    other = PLAIN[kind](twins.ddp.parameters())
    words = (
        rf"{kind.split()[0]}\.step\(\) reads the gradient of '\d\.weight', which .*\nCall step\(\) of the hook's own"
    )
    with pytest.raises(RuntimeError, match=words):
        other.step()
    step_and_check(twins)


@pytest.mark.ranks(2, backend="gloo")
def test_a_closure_of_the_sharded_optimizer_reads_norms() -> None:
    twins = reduced()

    def closure() -> None:
        next(twins.ddp.parameters()).grad.abs()

    with pytest.raises(RuntimeError, match="every rank knows its 2-norm"):
        twins.optimizer.step(closure)


@pytest.mark.ranks(2, backend="gloo", checks="no:deadlock")
def test_uneven_data_in_the_join_of_ddp_without_a_hook(rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=3))
    model = small_model().double()
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, process_group=group, lr=0.1)

    def train() -> None:
        with ddp.join():
            for number in range(2 + rank):
                optimizer.zero_grad()
                ddp(batch(number)).sum().backward()
                optimizer.step()

    told = r"step\(\).* With uneven data use zeroshard_integrations\.join\.Join\(\[ddp, optimizer\]\)"
    # The other one waits in a collective of DDP.
    with pytest.raises(PeerLostError if rank == 1 else RuntimeError, match=told if rank == 1 else None):
        train()
