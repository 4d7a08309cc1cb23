"""What can be done with gradients that were sent to their owners: accumulate, clip, discard; and what is refused."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ddp_models import Detached
from support.ddp_training import HOOKS, Twins, assert_close, batch, not_freed, register, steps_in_backward
from support.training import EVERYWHERE, cutting
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from zeroshard import GradPlaceholder, ZeroRedundancyOptimizer
from zeroshard_integrations.ddp import reduce_to_owner_hook

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")
EVERY_HOOK = pytest.mark.parametrize("hook", HOOKS)
STEPPING_HOOKS = pytest.mark.parametrize("hook", HOOKS[1:])
VIEWS = pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
PARTITIONS = pytest.mark.parametrize("partition", ["whole", "split"])


def owner(partition: str = "whole", *, views: bool = True, exact: bool = True) -> Twins:
    return Twins("reduce_to_owner_hook", partition=partition, ddp={"gradient_as_bucket_view": views}, exact=exact)


@pytest.mark.by_default(
    "2-views-reduce_to_owner_hook | 2-views-hook_with_zero_step_interleaved | 3-copies-hook_with_zero_step"
)
@pytest.mark.ranks(2, 3, backend=EVERYWHERE)
@EVERY_HOOK
@VIEWS
def test_no_sync_accumulates_and_sends_nothing(hook: str, views: bool) -> None:
    twins = Twins(hook, ddp={"gradient_as_bucket_view": views})
    for number in range(4):
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad()
            with ddp.no_sync():
                before = twins.optimizer.traffic.total()
                twins.backward(ddp, 10 * number)
                twins.backward(ddp, 10 * number + 1)
                assert twins.optimizer.traffic.total() == before
            twins.backward(ddp, 10 * number + 2)
            optimizer.step()
        twins.check(f"after iteration {number}")


@pytest.mark.by_default("2-under no_sync-views | 2-synchronized-copies")
@pytest.mark.ranks(2, backend=EVERYWHERE)
@VIEWS
@pytest.mark.parametrize("local", [True, False], ids=["under no_sync", "synchronized"])
def test_nothing_is_added_to_a_gradient_that_was_reduced(views: bool, local: bool) -> None:
    twins = owner(views=views)
    twins.iterate(0)
    twins.optimizer.zero_grad()
    twins.backward(twins.ddp, 1)
    before = twins.optimizer.traffic.total()
    told = r"accumulate under ddp\.no_sync\(\), and synchronize only the last backward.*zeroshard\.shard_gradients\(\)"
    with pytest.raises(RuntimeError, match=told), twins.ddp.no_sync() if local else contextlib.nullcontext():
        twins.backward(twins.ddp, 2)
    if local:
        assert twins.optimizer.traffic.total() == before
        twins.optimizer.step()
        twins.plain.zero_grad()
        twins.backward(twins.plain_ddp, 1)
        twins.plain.step()
    else:
        # The second backward has taken the place of the first one.
        with pytest.raises(RuntimeError, match=told):
            twins.optimizer.step()
        twins.iterate(3)
    twins.check("after the refusal")


class Backwards(nn.Module):
    """Calls its layers in the order opposite to that of its parameters, by which DDP first makes its buckets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            inputs = layer(inputs).tanh()
        return inputs


@pytest.mark.by_default("2-discarded-views-whole | 3-stepped-copies-split")
@pytest.mark.ranks(2, 3, backend=EVERYWHERE)
@PARTITIONS
@VIEWS
@pytest.mark.parametrize("discard", [True, False], ids=["discarded", "stepped"])
def test_gradients_outlive_a_forward_in_which_ddp_rebuilds_its_buckets(
    partition: str, views: bool, discard: bool
) -> None:
    arguments = {"gradient_as_bucket_view": views, "bucket_cap_mb": 0.02}
    twins = Twins("reduce_to_owner_hook", model=Backwards, partition=partition, ddp=arguments)
    buckets = []
    for number in range(4):
        for ddp, optimizer in twins.sides:
            loss = ddp(batch(number)).square().mean()
            if discard:
                optimizer.zero_grad(set_to_none=number % 2 == 0)
            elif number > 0:
                optimizer.step()
                optimizer.zero_grad()
                loss = ddp(batch(number)).square().mean()
            loss.backward()
            if discard:
                optimizer.step()
        buckets.append([bucket.tensors for bucket in twins.optimizer.describe().buckets])
        twins.check(f"after iteration {number}")
    assert buckets[0] != buckets[1] == buckets[2]


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.ranks(2, backend=EVERYWHERE)
@VIEWS
def test_gradients_outlive_a_forward_that_is_interrupted(views: bool) -> None:
    twins = owner(views=views)
    for ddp, optimizer in twins.sides:
        twins.backward(ddp, 0)
        handle = ddp.module[0].register_forward_pre_hook(interrupt)
        with contextlib.suppress(KeyboardInterrupt):
            ddp(batch(1))
        handle.remove()
        optimizer.step()
    twins.check("after the step")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_gradients_may_be_zeroed_in_the_forward_in_which_ddp_rebuilds_its_buckets() -> None:
    twins = owner()
    for number in range(3):
        for ddp, optimizer in twins.sides:
            handle = ddp.module[0].register_forward_pre_hook(lambda *_, optimizer=optimizer: optimizer.zero_grad())
            twins.backward(ddp, number)
            handle.remove()
            optimizer.step()
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_window_that_was_given_up_leaves_nothing() -> None:
    twins = owner()
    twins.iterate(0)
    for ddp, optimizer in twins.sides:
        optimizer.zero_grad(set_to_none=False)
        with ddp.no_sync():
            twins.backward(ddp, 1)
        optimizer.zero_grad()
        optimizer.step()
    twins.check("after a step without gradients")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_the_gradient_of_another_parameter_is_refused() -> None:
    twins = owner()
    twins.backward(twins.ddp, 0)
    first, second = list(twins.ddp.parameters())[1::2][:2]
    first.grad, second.grad = second.grad, first.grad
    with pytest.raises(RuntimeError, match="which stands for another gradient"):
        twins.optimizer.step()


class BareTwins(Twins):
    """Of which the hook was registered without the model."""

    def register(self, hook: str, inner: Callable[..., Any], inner_state: object) -> None:
        self.ddp.register_comm_hook(self.optimizer, reduce_to_owner_hook)


@pytest.mark.ranks(2, backend=EVERYWHERE)
@VIEWS
def test_a_hook_that_was_registered_without_the_model(views: bool) -> None:
    twins = BareTwins("reduce_to_owner_hook", ddp={"gradient_as_bucket_view": views})
    for number in range(5):
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad()
            with ddp.no_sync():
                twins.backward(ddp, 10 * number)
            twins.backward(ddp, 10 * number + 1)
            optimizer.step()
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_gradients_that_are_kept_while_ddp_rebuilds_its_buckets_without_the_model() -> None:
    twins = BareTwins("reduce_to_owner_hook")
    twins.backward(twins.ddp, 0)
    match = r"in its second forward: call zero_grad\(\) before that; or, for the forward, register_reduce_to_owner"
    with pytest.raises(RuntimeError, match=match):
        twins.backward(twins.ddp, 1)


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_gradients_are_not_copied_between_forward_and_backward() -> None:
    # Of a model whose buckets are never rebuilt.
    twins = Twins("reduce_to_owner_hook", ddp={"find_unused_parameters": True})
    twins.iterate(0)
    loss = twins.ddp(batch(1)).square().mean()
    param = next(twins.ddp.parameters())
    with pytest.raises(RuntimeError, match="copying is not supported on it"):
        torch.empty_like(param).copy_(param.grad)
    twins.optimizer.zero_grad()
    loss.backward()


@pytest.mark.by_default("2-optimizer-views | 2-model-copies | 2-to zero-views")
@pytest.mark.ranks(2, backend=EVERYWHERE)
@VIEWS
@pytest.mark.parametrize("discard", ["optimizer", "model", "to zero"])
def test_gradients_can_be_discarded(views: bool, discard: str) -> None:
    twins = owner(views=views)
    for number in range(6):
        for ddp, optimizer in twins.sides:
            # In the first iterations zero_grad() comes behind the forward, in which DDP rebuilds its buckets.
            loss = ddp(torch.full((1, 40), 0.1, dtype=torch.float64)).sum()
            if discard == "model":
                ddp.zero_grad()
            else:
                optimizer.zero_grad(set_to_none=discard == "optimizer")
            loss.backward()
            if number % 2:
                optimizer.step()
        twins.check(f"after iteration {number}")


@pytest.mark.by_default("2-optimizer-whole-views | 2-model-split-copies | 2-to zero-whole-views")
@pytest.mark.ranks(2, backend=EVERYWHERE)
@VIEWS
@PARTITIONS
@pytest.mark.parametrize("discard", ["optimizer", "model", "to zero"])
def test_windows_can_be_given_up(views: bool, partition: str, discard: str) -> None:
    twins = owner(partition, views=views)
    for number in range(4):
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            with ddp.no_sync():
                twins.backward(ddp, 10 * number)
                twins.backward(ddp, 10 * number + 1)
            if discard == "model":
                ddp.zero_grad()
            else:
                optimizer.zero_grad(set_to_none=discard == "optimizer")
            twins.backward(ddp, 10 * number + 2)
            optimizer.step()
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_gradients_set_to_zero_still_move_momentum() -> None:
    twins = Twins("reduce_to_owner_hook", optimizer=torch.optim.SGD, settings={"momentum": 0.9, "weight_decay": 0.1})
    for number in range(4):
        twins.iterate(number)
        for _, optimizer in twins.sides:
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_second_step_uses_the_same_gradients() -> None:
    twins = owner()
    for number in range(3):
        twins.iterate(number)
        for _, optimizer in twins.sides:
            optimizer.step()
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_parameters_whose_gradient_was_set_to_none_are_not_stepped() -> None:
    twins = owner()
    for number in range(3):
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad()
            twins.backward(ddp, number)
            for param in list(ddp.parameters())[:2]:
                param.grad = None
            optimizer.step()
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
def test_gradients_of_the_last_step_must_be_discarded(hook: str) -> None:
    twins = Twins(hook)
    twins.iterate(0)
    twins.iterate(1)
    with pytest.raises(RuntimeError, match=r"call optimizer.zero_grad\(\) before backward\(\)"):
        twins.backward(twins.ddp, 2)


@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
def test_gradients_that_were_never_reduced_are_not_stepped(hook: str) -> None:
    twins = Twins(hook)
    twins.iterate(0)
    twins.optimizer.zero_grad()
    with twins.ddp.no_sync():
        twins.backward(twins.ddp, 1)
    with pytest.raises(RuntimeError, match=r"has not been reduced.*the last backward\(\) before step\(\) was under"):
        twins.optimizer.step()


# ---------------------------------------------------------------------- clipping


@pytest.mark.by_default("2-2.0-whole | 2-inf-whole | 3-1.0-split")
@pytest.mark.ranks(2, 3, 4, backend=EVERYWHERE)
@PARTITIONS
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_by_the_norm_over_all_ranks(partition: str, norm_type: float) -> None:
    twins = owner(partition, exact=False)
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
    twins = BareTwins("reduce_to_owner_hook")
    ours, theirs = twins.ddp.module, twins.plain_ddp.module
    for model in (ours, theirs):
        for number, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, number + 1.0)
    assert torch.equal(twins.optimizer.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(theirs.parameters(), 0.5))
    twins.optimizer.step()
    twins.plain.step()
    twins.check("after the step")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_clipping_what_is_not_finite(rank: int) -> None:
    twins = owner()
    twins.backward(twins.ddp, 0)
    infinite = Twins("reduce_to_owner_hook")
    infinite.backward(infinite.ddp, 0, lambda ddp, x: (ddp(x) * (float("inf") if rank else 1.0)).sum())
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        infinite.optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    with pytest.raises(RuntimeError, match=r"rank 0 called it with max_norm=1\.0, .*rank 1 with max_norm=2\.0"):
        twins.optimizer.clip_grad_norm_(1.0 + rank)
    with pytest.raises(ValueError, match="rank 1: could not convert"):
        twins.optimizer.clip_grad_norm_("high" if rank else 1.0)  # type: ignore[arg-type]
    assert twins.optimizer.clip_grad_norm_(1.0) > 0


# ---------------------------------------------------------------------- what is refused


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_nothing_reads_a_part_of_the_gradients_in_silence() -> None:
    twins = owner()
    twins.backward(twins.ddp, 0)
    params = list(twins.ddp.parameters())
    assert all(type(param.grad) is GradPlaceholder for param in params)
    assert "shape=(64, 40)" in repr(params[0].grad)
    for read in (torch.Tensor.sum, torch.Tensor.clone, torch.Tensor.isnan, copy.deepcopy):
        with pytest.raises(RuntimeError, match="is sharded"):
            read(params[0].grad)
    with pytest.raises(RuntimeError, match="every rank knows its 2-norm"):
        params[0].grad.add_(1.0)
    twins.optimizer.step()


@pytest.mark.ranks(2, backend=EVERYWHERE)
@STEPPING_HOOKS
def test_what_cannot_be_done_once_backward_has_stepped(hook: str) -> None:
    twins = Twins(hook)
    twins.iterate(0)
    with pytest.raises(ValueError, match="takes neither a closure nor arguments"):
        twins.optimizer.step(lambda: 0.0)
    with pytest.raises(ValueError, match="nothing left to clip"):
        twins.optimizer.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match="this hook steps during backward"):
        nn.utils.clip_grad_norm_(twins.ddp.parameters(), 1.0)
    scaler = torch.amp.GradScaler(torch.get_default_device().type)
    scaler.scale(torch.ones(1))
    with pytest.raises(RuntimeError, match="this hook has stepped during backward, with the scaled gradients"):
        scaler.unscale_(twins.optimizer)


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_closure_is_called_once_before_the_step() -> None:
    def closure(ddp: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = ddp(torch.full((2, 40), 0.3 * number, dtype=torch.float64)).square().mean()
        loss.backward()
        return loss

    twins = owner()
    for number in range(3):
        losses = []
        for ddp, optimizer in twins.sides:
            losses.append(optimizer.step(functools.partial(closure, ddp, optimizer, number)))
        assert torch.equal(losses[0], losses[1])
        twins.check(f"after iteration {number}")


# ---------------------------------------------------------------------- autograd


@pytest.mark.by_default(
    "2-whole-reduce_to_owner_hook | 2-whole-hook_with_zero_step_interleaved | 2-split-hook_with_zero_step"
)
@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
@pytest.mark.parametrize("partition", ["whole", "split"])
def test_a_graph_that_saw_old_parameters_cannot_be_used_again(hook: str, partition: str) -> None:
    twins = Twins(hook, partition=partition)
    twins.iterate(0)
    loss = twins.ddp(torch.ones(2, 40, dtype=torch.float64)).sum()
    twins.optimizer.zero_grad()
    before = [param._version for param in twins.ddp.parameters()]
    loss.backward(retain_graph=True)
    twins.optimizer.step()
    # Of what this rank owns, and of what it has received.
    assert all(param._version > version for param, version in zip(twins.ddp.parameters(), before, strict=True))
    twins.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# An error breaks off the backward on every rank: what it had announced is never sent. Not by collectives, by which a
# bucket is stepped when the next one comes: after that node.
@pytest.mark.ranks(2, backend="gloo", checks="no:messages")
def test_stepping_a_weight_that_backward_still_needs_is_noticed() -> None:
    twins = Twins("hook_with_zero_step_interleaved", model=Detached, ddp={"bucket_cap_mb": 0.001})
    # In the first iteration all parameters are in one bucket, which is stepped last.
    twins.iterate(0)
    twins.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        twins.backward(twins.ddp, 1)


class Tied(nn.Module):
    """One weight at both ends."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.outer = nn.Linear(40, 40, bias=False)
        self.inner = nn.Linear(40, 40)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.inner(self.outer(inputs).relu()), self.outer.weight)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(40, 40), nn.Tanh()) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs.requires_grad_()
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=self.reentrant)
        return hidden


@pytest.mark.by_default(
    "2-tied-whole-reduce_to_owner_hook | 2-reentrant-split-hook_with_zero_step | "
    "2-non-reentrant-whole-hook_with_zero_step_interleaved"
)
@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
@PARTITIONS
@pytest.mark.parametrize("kind", ["tied", "reentrant", "non-reentrant"])
def test_tied_weights_and_activation_checkpointing(hook: str, partition: str, kind: str) -> None:
    model = Tied if kind == "tied" else lambda: Checkpointed(reentrant=kind == "reentrant")
    static = {"static_graph": True} if kind != "tied" else {}
    twins = Twins(hook, model=model, partition=partition, ddp={"bucket_cap_mb": 0.001, **static})
    for number in range(5):
        twins.iterate(number)
        twins.check(f"after iteration {number}")


# ---------------------------------------------------------------------- what only looks like one of DDP's own calls


@pytest.mark.ranks(2, backend=EVERYWHERE)
@VIEWS
def test_gradients_are_neither_written_nor_read_by_users(views: bool) -> None:
    twins = owner(views=views)
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


@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
def test_a_model_that_is_dropped_is_freed(hook: str) -> None:
    twins = Twins(hook)
    twins.iterate(0)
    twins.iterate(1)
    seen = [weakref.ref(param) for param in twins.ddp.parameters()]
    seen.append(weakref.ref(twins.optimizer))
    del twins
    assert not_freed(seen) == []


@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
def test_a_model_may_be_converted_after_its_step(hook: str) -> None:
    twins = Twins(hook)
    twins.iterate(0)
    twins.iterate(1)
    twins.ddp.module.float()
    assert all(param.dtype is torch.float32 for param in twins.ddp.parameters())


# ---------------------------------------------------------------------- memory formats


def convolution() -> nn.Module:
    torch.manual_seed(0)
    flat = nn.Linear(4 * 4 * 6, 5)
    flat.weight = nn.Parameter(torch.randn(4 * 4 * 6, 5).t())
    return nn.Sequential(
        nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 6, 3), nn.Flatten(), flat
    )


@pytest.mark.by_default(
    "1-whole-views-reduce_to_owner_hook | 1-whole-views-hook_with_zero_step_interleaved | "
    "2-split-copies-hook_with_zero_step"
)
@pytest.mark.ranks(1, 2, backend=EVERYWHERE)
@EVERY_HOOK
@VIEWS
@pytest.mark.parametrize("partition", ["whole", "split"])
def test_other_memory_formats(hook: str, partition: str, views: bool) -> None:
    twins = Twins(
        hook,
        model=lambda: convolution().to(memory_format=torch.channels_last),
        partition=partition,
        ddp={"gradient_as_bucket_view": views, "bucket_cap_mb": 0.001},
    )
    for number in range(4):
        twins.iterate(number, lambda ddp, inputs: ddp(inputs[:, :36]).square().mean())
        twins.check(f"after iteration {number}")


@pytest.mark.by_default(
    "2-views-reduce_to_owner_hook | 2-views-hook_with_zero_step_interleaved | 2-copies-hook_with_zero_step"
)
@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
@VIEWS
def test_a_memory_format_that_changes_behind_ddp(hook: str, views: bool) -> None:
    twins = Twins(hook, model=convolution, ddp={"gradient_as_bucket_view": views})
    twins.ddp.module.to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="has changed its memory format since DistributedDataParallel was built"):
        twins.backward(twins.ddp, 0, lambda ddp, inputs: ddp(inputs[:, :36]).square().mean())


# ---------------------------------------------------------------------- accumulation and unused parameters


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.halves = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))

    def forward(self, inputs: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        return sum(self.halves[number](inputs) for number in chosen)


@pytest.mark.by_default("2-whole-views | 3-split-copies")
@pytest.mark.ranks(2, 3, backend=EVERYWHERE)
@VIEWS
@PARTITIONS
def test_gradients_of_parameters_that_a_later_backward_does_not_use(rank: int, partition: str, views: bool) -> None:
    twins = Twins(
        "reduce_to_owner_hook",
        model=Halves,
        partition=partition,
        ddp={"find_unused_parameters": True, "gradient_as_bucket_view": views},
        exact=False,
    )
    for number in range(6):
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            with ddp.no_sync():
                for chosen in ((0, 1), (0,)):
                    halves(twins, ddp, number, chosen)
            halves(twins, ddp, number, (1, 2) if rank == number % 2 else (0,))
            optimizer.step()
        twins.check(f"after iteration {number}")


def zero_what_is_used(model: nn.Module, unused: int) -> None:
    """As a loop does that knows its heads."""
    for name, param in model.named_parameters():
        if f"halves.{unused}" not in name:
            param.grad = None


@pytest.mark.by_default(
    "2-unused--whole-views-reduce_to_owner_hook | 2-unused--split-views-reduce_to_owner_hook | "
    "2-unused--split-views-hook_with_zero_step | 2-unused--level-copies-hook_with_zero_step_interleaved | "
    "2-unused-master weights-whole-copies-hook_with_zero_step | 2-frozen--level-views-hook_with_zero_step | "
    "2-frozen-master weights-whole-views-hook_with_zero_step_interleaved | "
    "2-frozen-master weights-split-copies-hook_with_zero_step | "
    "2-frozen-master weights-split-copies-hook_with_zero_step_interleaved | "
    "2-frozen-master weights-level-copies-reduce_to_owner_hook"
)
@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
@VIEWS
@pytest.mark.parametrize("partition", ["whole", "split", "level"])
@pytest.mark.parametrize("masters", [False, True], ids=["", "master weights"])
@pytest.mark.parametrize("without", ["unused", "frozen"])
def test_a_kept_gradient_of_a_parameter_without_a_new_one_is_refused(
    hook: str, partition: str, views: bool, masters: bool, without: str
) -> None:
    """Plain steps it with the gradient of the last step, which its owner has used."""
    model = Halves().to(torch.bfloat16 if masters else torch.float64)
    ddp = DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=views)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        optim.AdamW,
        partition=cutting(partition),
        master_weights=masters,
        overlap_with_ddp=steps_in_backward(hook),
        lr=1e-2,
    )
    register(hook, ddp, optimizer)

    def backward(number: int, chosen: tuple[int, ...]) -> None:
        ddp(batch(number).to(model.halves[0].weight.dtype), chosen).square().mean().backward()

    # Two heads in turn: the first step uses both.
    for number in range(3):
        optimizer.zero_grad()
        backward(number, (0, 1, 2))
        optimizer.step()
    zero_what_is_used(model, 1)
    model.halves[1].requires_grad_(without == "unused")
    before, sent = [param.detach().clone() for param in model.parameters()], optimizer.traffic.of("reduce")
    says = r"tensor [23] 'halves\.1\.(weight|bias)' still has the gradient of the last step: call .*zero_grad"
    with pytest.raises(RuntimeError, match=says):
        backward(3, (0, 2))
    # Without an agreement where a backward begins, ranks learn of it at the end.
    assert hook == "reduce_to_owner_hook" or optimizer.traffic.of("reduce") == sent
    with pytest.raises(RuntimeError, match=says):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.by_default(
    "2-unused---whole | 2-unused---split | 2-unused--bucket view-level | 2-unused-master weights--whole | "
    "2-frozen--bucket view-split | 2-frozen-master weights--level | 2-frozen-master weights-bucket view-whole | "
    "2-frozen-master weights-bucket view-split"
)
@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("partition", ["whole", "split", "level"])
@pytest.mark.parametrize("in_buffer", [False, True], ids=["", "bucket view"])
@pytest.mark.parametrize("masters", [False, True], ids=["", "master weights"])
@pytest.mark.parametrize("without", ["unused", "frozen"])
def test_a_kept_gradient_of_a_parameter_without_a_new_one_is_stepped_without_a_hook(
    partition: str, in_buffer: bool, masters: bool, without: str
) -> None:
    models = [Halves().double() for _ in range(2)]
    ddps = [DistributedDataParallel(model, find_unused_parameters=True) for model in models]
    sharded = ZeroRedundancyOptimizer(
        models[0].parameters(),
        optim.AdamW,
        partition=cutting(partition),
        master_weights=masters,
        parameters_as_bucket_view=in_buffer,
        lr=1e-2,
    )
    optimizers = [sharded, optim.AdamW(models[1].parameters(), lr=1e-2)]
    for number in range(6):
        unused = 1 + number % 2
        for model, ddp, optimizer in zip(models, ddps, optimizers, strict=True):
            zero_what_is_used(model, unused)
            model.requires_grad_(True)
            model.halves[unused].requires_grad_(without == "unused")
            ddp(batch(number), (0, 3 - unused)).square().mean().backward()
            optimizer.step()
        for ours, theirs in zip(*[model.parameters() for model in models], strict=True):
            assert torch.equal(ours, theirs), f"in iteration {number}"


def halves(twins: Twins, ddp: nn.Module, number: int, chosen: tuple[int, ...]) -> None:
    twins.backward(ddp, number, lambda ddp, inputs: ddp(inputs, chosen).square().mean())
