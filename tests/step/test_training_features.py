"""Everything that people do around ``step()``: the sharded run stays bit for bit with the unsharded one."""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.training import (
    EVERYWHERE,
    assert_bitwise_equal,
    assert_same_state,
    cutting,
    set_gradients,
    small_model,
    twins,
)
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError
from zeroshard_testing import assert_replicas_equal

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")
PARTITIONS = pytest.mark.parametrize("partition", ["whole", "split"])
VIEWS = pytest.mark.parametrize("as_bucket_view", [False, True], ids=["params", "views"])


def run_steps(
    pair: tuple[nn.Module, nn.Module],
    optimizers: tuple[optim.Optimizer, optim.Optimizer],
    steps: range,
    before_step: Callable[[nn.Module], object] = lambda module: None,
) -> None:
    for step in steps:
        for module, optimizer in zip(pair, optimizers, strict=True):
            set_gradients(module.parameters(), step)
            before_step(module)
            optimizer.step()
        assert_bitwise_equal(*pair, f"after step {step}")
        assert_replicas_equal(pair[0].parameters())


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    """Two groups: matrices with decay, given as a generator, and everything else."""
    return [
        {"params": (p for p in module.parameters() if p.dim() > 1), "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.01},
    ]


@pytest.mark.by_default("2-params-whole | 3-views-split")
@pytest.mark.ranks(2, 3, 4, backend=EVERYWHERE)
@PARTITIONS
@VIEWS
def test_param_groups_given_as_generators(partition: str, as_bucket_view: bool) -> None:
    pair = twins()
    sharded = ZeroRedundancyOptimizer(
        groups_of(pair[0]), optim.AdamW, partition=cutting(partition), parameters_as_bucket_view=as_bucket_view
    )
    plain = optim.AdamW(groups_of(pair[1]))
    assert [len(group["params"]) for group in sharded.param_groups] == [4, 5]
    run_steps(pair, (sharded, plain), range(3))


@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
def test_named_parameters(partition: str) -> None:
    pair = twins()
    sharded = ZeroRedundancyOptimizer(pair[0].named_parameters(), optim.AdamW, partition=cutting(partition))
    plain = optim.AdamW(pair[1].named_parameters())
    assert sharded.param_groups[0]["param_names"] == plain.param_groups[0]["param_names"]
    assert [spec.name for spec in sharded.plan.tensors] == plain.param_groups[0]["param_names"]
    run_steps(pair, (sharded, plain), range(3))


@pytest.mark.by_default("2-params-whole | 3-views-split")
@pytest.mark.ranks(2, 3, 4, backend=EVERYWHERE)
@PARTITIONS
@VIEWS
def test_groups_added_midway(partition: str, as_bucket_view: bool) -> None:
    pair = twins()
    last = [list(module.parameters())[-1] for module in pair]
    middle = [list(module.parameters())[2:-1] for module in pair]
    first = [list(module.parameters())[:2] for module in pair]
    sharded = ZeroRedundancyOptimizer(
        first[0], optim.Adam, lr=0.01, partition=cutting(partition), parameters_as_bucket_view=as_bucket_view
    )
    plain = optim.Adam(first[1], lr=0.01)
    # Before the first step: the new group has the inner optimizer's defaults at once.
    given = {"params": [last[0]], "lr": 0.5}
    sharded.add_param_group(given)
    assert sharded.param_groups[1] is given
    plain.add_param_group({"params": [last[1]], "lr": 0.5})
    assert sharded.param_groups[1]["betas"] == (0.9, 0.999)
    run_steps(pair, (sharded, plain), range(2))
    sharded.add_param_group({"params": (p for p in middle[0]), "weight_decay": 0.1})
    plain.add_param_group({"params": middle[1], "weight_decay": 0.1})
    run_steps(pair, (sharded, plain), range(2, 5))


@pytest.mark.by_default("2-Adam-params-whole | 2-SGD-params-whole | 3-Adagrad-views-split")
@pytest.mark.ranks(2, 3, 4, backend=EVERYWHERE)
@PARTITIONS
@VIEWS
@pytest.mark.parametrize("optimizer_class", [optim.Adam, optim.Adagrad, optim.SGD])
def test_unfreezing_and_freezing_midway(
    partition: str, as_bucket_view: bool, optimizer_class: type[optim.Optimizer]
) -> None:
    pair = twins()
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9} if optimizer_class is optim.SGD else {"lr": 0.1}

    def set_trainable(trainable: bool, positions: range) -> None:
        for module in pair:
            params = list(module.parameters())
            for position in positions:
                params[position].requires_grad_(trainable)

    set_trainable(False, range(7))
    sharded = ZeroRedundancyOptimizer(
        pair[0].parameters(),
        optimizer_class,
        partition=cutting(partition),
        parameters_as_bucket_view=as_bucket_view,
        **settings,
    )
    plain = optimizer_class(pair[1].parameters(), **settings)
    run_steps(pair, (sharded, plain), range(2))
    set_trainable(True, range(3, 7))
    run_steps(pair, (sharded, plain), range(2, 4))
    set_trainable(True, range(3))
    set_trainable(False, range(5, 8))
    run_steps(pair, (sharded, plain), range(4, 6))
    set_trainable(True, range(9))
    run_steps(pair, (sharded, plain), range(6, 8))


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_frozen_tensors_are_placed_evenly_and_keep_their_owners() -> None:
    model = nn.ModuleList([nn.Linear(32, 32, bias=False) for _ in range(8)])
    for layer in model[:6]:
        layer.requires_grad_(False)
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam)
    before = sharded.plan
    assert before.imbalance == 1.0
    for number in (1, 6):
        model[:number].requires_grad_(True)
        set_gradients(model.parameters(), 0)
        sharded.step()
        assert sharded.plan.owners == before.owners
        assert sharded.plan.imbalance == sharded.describe().imbalance == (4 / 3 if number == 1 else 1.0)


@pytest.mark.ranks(2, backend=EVERYWHERE)
@VIEWS
def test_a_frozen_tensor_with_a_stale_gradient_is_stepped_on_all_replicas(as_bucket_view: bool) -> None:
    pair = twins()
    sharded = ZeroRedundancyOptimizer(pair[0].parameters(), optim.Adam, parameters_as_bucket_view=as_bucket_view)
    plain = optim.Adam(pair[1].parameters())
    run_steps(pair, (sharded, plain), range(1))
    for module in pair:
        list(module.parameters())[4].requires_grad_(False)
    for step in range(2):
        for optimizer in (sharded, plain):
            optimizer.step()
        assert_bitwise_equal(*pair, f"after step {step} with stale gradients")
        assert_replicas_equal(pair[0].parameters())


@pytest.mark.by_default("2-params-whole | 2-views-split")
@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
@VIEWS
def test_mixed_dtypes(partition: str, as_bucket_view: bool) -> None:
    def mixed() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleList([nn.Linear(64, 40, dtype=d) for d in (torch.float32, torch.float64, torch.bfloat16)])

    pair = twins(mixed)
    sharded = ZeroRedundancyOptimizer(
        pair[0].parameters(), optim.AdamW, partition=cutting(partition), parameters_as_bucket_view=as_bucket_view
    )
    plain = optim.AdamW(pair[1].parameters())
    run_steps(pair, (sharded, plain), range(3))


@pytest.mark.ranks(2, backend=EVERYWHERE)
@VIEWS
def test_complex_parameters(as_bucket_view: bool) -> None:
    def complex_model() -> nn.Module:
        torch.manual_seed(0)
        return nn.ParameterList([nn.Parameter(torch.randn(130, dtype=torch.complex64)) for _ in range(3)])

    pair = twins(complex_model)
    sharded = ZeroRedundancyOptimizer(pair[0].parameters(), optim.Adam, parameters_as_bucket_view=as_bucket_view)
    plain = optim.Adam(pair[1].parameters())
    run_steps(pair, (sharded, plain), range(3))


@pytest.mark.by_default("2-params-whole | 2-views-split")
@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
@VIEWS
def test_channels_last(partition: str, as_bucket_view: bool) -> None:
    def convolutions() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 8, 3)).to(memory_format=torch.channels_last)

    pair = twins(convolutions)
    strides = [param.stride() for param in pair[0].parameters()]
    sharded = ZeroRedundancyOptimizer(
        pair[0].parameters(), optim.AdamW, partition=cutting(partition), parameters_as_bucket_view=as_bucket_view
    )
    plain = optim.AdamW(pair[1].parameters())
    run_steps(pair, (sharded, plain), range(3))
    assert [param.stride() for param in pair[0].parameters()] == strides


@pytest.mark.by_default("2-whole | 3-split")
@pytest.mark.ranks(2, 3, 4, backend=EVERYWHERE)
@PARTITIONS
def test_clipping(partition: str) -> None:
    pair = twins()
    sharded = ZeroRedundancyOptimizer(pair[0].parameters(), optim.AdamW, partition=cutting(partition))
    plain = optim.AdamW(pair[1].parameters())
    run_steps(
        pair, (sharded, plain), range(3), lambda module: nn.utils.clip_grad_norm_(module.parameters(), max_norm=0.5)
    )


SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=10),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SWALR": lambda o: optim.swa_utils.SWALR(o, swa_lr=1e-4, anneal_epochs=2),
}


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_lr_schedulers(name: str) -> None:
    pair = twins()
    optimizers = (
        ZeroRedundancyOptimizer(pair[0].parameters(), optim.AdamW, lr=1e-3),
        optim.AdamW(pair[1].parameters(), lr=1e-3),
    )
    schedulers = [SCHEDULERS[name](optimizer) for optimizer in optimizers]
    for step in range(5):
        run_steps(pair, optimizers, range(step, step + 1))
        for scheduler in schedulers:
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]
        assert optimizers[0].param_groups[0]["betas"] == optimizers[1].param_groups[0]["betas"]


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_learning_rate_in_a_tensor() -> None:
    pair = twins()
    rates = (torch.tensor(0.01), torch.tensor(0.01))
    optimizers = (
        ZeroRedundancyOptimizer(pair[0].parameters(), optim.AdamW, lr=rates[0], foreach=False),
        optim.AdamW(pair[1].parameters(), lr=rates[1], foreach=False),
    )
    run_steps(pair, optimizers, range(2))
    for rate in rates:
        rate.fill_(0.1)
    run_steps(pair, optimizers, range(2, 4))


@pytest.mark.by_default("2-params-whole | 2-views-split")
@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
@VIEWS
def test_closures(partition: str, as_bucket_view: bool) -> None:
    pair = twins()
    optimizers = (
        ZeroRedundancyOptimizer(
            pair[0].parameters(), optim.Adam, partition=cutting(partition), parameters_as_bucket_view=as_bucket_view
        ),
        optim.Adam(pair[1].parameters()),
    )
    inputs = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    for step in range(3):
        losses = []
        for module, optimizer in zip(pair, optimizers, strict=True):

            def closure(module: nn.Module = module, optimizer: optim.Optimizer = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = module(inputs).square().mean()
                loss.backward()
                return loss

            losses.append(optimizer.step(closure))
        assert torch.equal(*losses)
        assert_bitwise_equal(*pair, f"after step {step}")


@pytest.mark.by_default("2-params-whole | 2-views-split")
@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
@VIEWS
def test_closures_that_rebind_data_and_drop_gradients_of_frozen_ones(partition: str, as_bucket_view: bool) -> None:
    pair = twins()
    optimizers = (
        ZeroRedundancyOptimizer(
            pair[0].parameters(), optim.Adam, partition=cutting(partition), parameters_as_bucket_view=as_bucket_view
        ),
        optim.Adam(pair[1].parameters()),
    )
    run_steps(pair, optimizers, range(2))
    for step in range(2, 5):
        for module, optimizer in zip(pair, optimizers, strict=True):
            # Frozen now, but with the gradient of the last step, which the closure drops.
            module[0].weight.requires_grad_(step != 3)

            def closure(module: nn.Module = module, step: int = step) -> None:
                for param in module.parameters():
                    param.data = param.data * 0.5
                set_gradients(module.parameters(), step)

            optimizer.step(closure)
        assert_bitwise_equal(*pair, f"after step {step}")


@pytest.mark.by_default("2-unfrozen-False-params-whole | 2-converted-True-views-split")
@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
@VIEWS
@pytest.mark.parametrize("on_rank_1_alone", [False, True])
@pytest.mark.parametrize("how", ["unfrozen", "converted"])
def test_closures_that_change_what_the_ranks_agreed_upon(
    rank: int, partition: str, as_bucket_view: bool, on_rank_1_alone: bool, how: str
) -> None:
    model, reference = twins()
    for module in (model, reference):
        module[0].weight.requires_grad_(False)
    sharded = ZeroRedundancyOptimizer(
        model.parameters(), optim.Adam, partition=cutting(partition), parameters_as_bucket_view=as_bucket_view
    )
    plain = optim.Adam(reference.parameters())

    def change(module: nn.Module) -> None:
        if how == "unfrozen":
            module[0].weight.requires_grad_(True)
        else:
            module[2].double()

    def closure() -> None:
        if rank == 1 or not on_rank_1_alone:
            change(model)
        set_gradients(model.parameters(), 0)

    if as_bucket_view and how == "converted":
        with pytest.raises(RuntimeError, match="is a view of a flat buffer"):
            sharded.step(closure)
        return
    if on_rank_1_alone:
        differs = {"unfrozen": "trainable False here, True", "converted": "dtype torch.float32 here, torch.float64"}
        words = f"{differs[how]} there .here: rank 0, there: rank 1"
        with pytest.raises(DisagreementError, match=words):
            sharded.step(closure)
        return
    # It is evaluated once, before the ranks agree.
    sharded.step(closure)
    change(reference)
    set_gradients(reference.parameters(), 0)
    plain.step()
    assert_bitwise_equal(model, reference, "after the step")
    for step in range(3):
        sharded.step(closure)
        set_gradients(reference.parameters(), 0)
        plain.step()
        assert_bitwise_equal(model, reference, f"after step {step}")


class ScaledSGD(optim.SGD):
    """Takes a further argument of its own in ``step``."""

    def step(self, closure: Any = None, *, scale: float = 1.0) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = 0.1 * scale
            group["scale"] = scale
        return super().step(closure)


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_extra_step_arguments_and_keys_that_the_inner_optimizer_adds() -> None:
    pair = twins()
    sharded = ZeroRedundancyOptimizer(pair[0].parameters(), ScaledSGD, lr=0.1)
    plain = ScaledSGD(pair[1].parameters(), lr=0.1)
    for step, scale in enumerate((1.0, 0.5)):
        for module, optimizer in zip(pair, (sharded, plain), strict=True):
            set_gradients(module.parameters(), step)
            optimizer.step(scale=scale)
        assert_bitwise_equal(*pair, f"after step {step}")
        assert sharded.param_groups[0]["scale"] == scale


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_each_hook_fires_once_and_sees_the_public_groups() -> None:
    pair = twins()
    sharded = ZeroRedundancyOptimizer(pair[0].parameters(), optim.Adam)
    seen: list[tuple[str, int]] = []

    def note(name: str) -> Callable[..., None]:
        return lambda optimizer, args, kwargs: seen.append((name, len(optimizer.param_groups[0]["params"])))

    handles = [
        register_optimizer_step_pre_hook(note("global pre")),
        register_optimizer_step_post_hook(note("global post")),
        sharded.register_step_pre_hook(note("pre")),
        sharded.register_step_post_hook(note("post")),
    ]
    try:
        set_gradients(pair[0].parameters(), 0)
        sharded.step()
    finally:
        for handle in handles:
            handle.remove()
    everything = len(list(pair[0].parameters()))
    assert seen == [(name, everything) for name in ("global pre", "pre", "post", "global post")]


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_hooks_that_change_the_arguments_and_are_removed() -> None:
    pair = twins()
    sharded = ZeroRedundancyOptimizer(pair[0].parameters(), ScaledSGD, lr=0.1)
    # Without a hook: torch would call that of a subclass twice.
    plain = ScaledSGD(pair[1].parameters(), lr=0.1)
    handle = sharded.register_step_pre_hook(lambda optimizer, args, kwargs: (args, {"scale": 0.5}))
    for step, scale in enumerate((0.5, 1.0)):
        for module in pair:
            set_gradients(module.parameters(), step)
        sharded.step()
        plain.step(scale=scale)
        assert_bitwise_equal(*pair, f"after step {step}")
        assert sharded.param_groups[0]["scale"] == scale
        handle.remove()


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("partition", ["whole", "split"])
def test_grad_scaler(partition: str) -> None:
    pair = twins()
    optimizers = (
        ZeroRedundancyOptimizer(pair[0].parameters(), optim.AdamW, partition=cutting(partition)),
        optim.AdamW(pair[1].parameters()),
    )
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in optimizers]
    for step in range(4):
        for module, optimizer, scaler in zip(pair, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            inputs = torch.randn(5, 40, generator=torch.Generator().manual_seed(step))
            loss = module(inputs).square().mean() * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert_bitwise_equal(*pair, f"after step {step}")
        assert scalers[0].get_scale() == scalers[1].get_scale()


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


@pytest.mark.by_default("2-step-averaged-whole | 2-add_param_group-from a vector-split")
@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
@pytest.mark.parametrize("how", REBOUND)
@pytest.mark.parametrize("adds", [False, True], ids=["step", "add_param_group"])
def test_data_that_was_rebound_is_copied_back_into_the_buffers(partition: str, how: str, adds: bool) -> None:
    pair = twins(lambda: nn.Sequential(*convolutions(), nn.Conv2d(8, 16, 3)).to(memory_format=torch.channels_last))
    sharded = ZeroRedundancyOptimizer(
        pair[0].parameters(), optim.Adam, partition=cutting(partition), parameters_as_bucket_view=True
    )
    plain = optim.Adam(pair[1].parameters())
    run_steps(pair, (sharded, plain), range(2))
    buffers, strides = sharded.buffers, [param.stride() for param in pair[0].parameters()]
    for module in pair:
        REBOUND[how](list(module.parameters()))
    for param in pair[1].parameters():
        param.data = param.data.clone()
    if adds:
        for optimizer in (sharded, plain):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5))]})
    run_steps(pair, (sharded, plain), range(2, 4))
    storages = {buffer.untyped_storage().data_ptr() for buffer in buffers}
    assert {param.untyped_storage().data_ptr() for param in pair[0].parameters()} == storages
    assert all(map(operator.is_, sharded.buffers, buffers))
    assert [param.stride() for param in pair[0].parameters()] == strides


@pytest.mark.ranks(2, backend="gloo")
def test_parameters_that_share_memory_by_a_rebound_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, parameters_as_bucket_view=True)
    model(torch.ones(2, 4)).sum().backward()
    model[0].weight.data = model[1].weight.data
    with pytest.raises(ValueError, match="share memory"):
        sharded.step()


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_data_that_one_rank_has_rebound(rank: int) -> None:
    pair = twins()
    sharded = ZeroRedundancyOptimizer(pair[0].parameters(), optim.Adam, parameters_as_bucket_view=True)
    plain = optim.Adam(pair[1].parameters())
    for step in range(4):
        if rank == step % 2:
            for param in pair[0].parameters():
                param.data = param.data.clone()
        run_steps(pair, (sharded, plain), range(step, step + 1))


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 8, 3))


@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
def test_a_model_that_changes_its_dtype_or_memory_format(partition: str) -> None:
    pair = twins(convolutions)
    sharded = ZeroRedundancyOptimizer(pair[0].parameters(), optim.SGD, lr=0.1, partition=cutting(partition))
    plain = optim.SGD(pair[1].parameters(), lr=0.1)
    run_steps(pair, (sharded, plain), range(2))
    for module in pair:
        module.double()
    run_steps(pair, (sharded, plain), range(2, 4))
    for module in pair:
        module.to(memory_format=torch.channels_last)
    run_steps(pair, (sharded, plain), range(4, 6))


@pytest.mark.ranks(4, backend=EVERYWHERE)
def test_subgroups(rank: int) -> None:
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


@pytest.mark.by_default("2-params-whole | 2-views-split")
@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
@VIEWS
def test_writes_behind_autograds_back_bump_version_counters(partition: str, as_bucket_view: bool) -> None:
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
def test_a_callable_partition_and_a_declared_optimizer(rank: int) -> None:
    def everything_to_the_last(tensors: Any, loads: Any, cost: Any) -> list[tuple[int, ...]]:
        return [(len(loads) - 1,)] * len(tensors)

    class MySGD(optim.SGD):
        pass

    pair = twins()
    sharded = ZeroRedundancyOptimizer(pair[0].parameters(), optim.Adam, partition=everything_to_the_last)
    plain = optim.Adam(pair[1].parameters())
    run_steps(pair, (sharded, plain), range(2))
    assert len(sharded.optim.state) == (0 if rank == 0 else len(list(pair[0].parameters())))

    with pytest.raises(ValueError, match="MySGD is not known to be elementwise"):
        ZeroRedundancyOptimizer(small_model().parameters(), MySGD, lr=0.1, partition=cutting("split"))
    ZeroRedundancyOptimizer(small_model().parameters(), MySGD, lr=0.1, partition=cutting("split"), elementwise=True)


@pytest.mark.by_default("2-params-whole | 2-views-split")
@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
@VIEWS
def test_a_default_device_that_is_not_the_models(rank: int, partition: str, as_bucket_view: bool) -> None:
    pair = twins()
    # What is made on this device has no values, so whatever ends there by mistake is an error.
    with torch.device("meta"):
        sharded = ZeroRedundancyOptimizer(
            pair[0].parameters(),
            optim.SGD,
            lr=0.1,
            momentum=0.9,
            partition=cutting(partition),
            parameters_as_bucket_view=as_bucket_view,
        )
        plain = optim.SGD(pair[1].parameters(), lr=0.1, momentum=0.9)
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


@pytest.mark.by_default("2-before the first step-whole | 2-after a step-split")
@pytest.mark.ranks(2, backend=EVERYWHERE)
@PARTITIONS
@pytest.mark.parametrize("stepped", [False, True], ids=["before the first step", "after a step"])
def test_what_is_written_to_the_state_is_kept(rank: int, partition: str, stepped: bool) -> None:
    model = nn.ModuleList([nn.Linear(8, 8) for _ in range(5)])
    params = list(model.parameters())
    sharded = ZeroRedundancyOptimizer(params, optim.SGD, lr=0.1, momentum=0.9, partition=cutting(partition))
    first, second = (params[shard.tensor] for shard in sharded.plan.of_rank(rank)[:2])
    untouched = params[sharded.plan.of_rank(rank)[2].tensor]
    if stepped:
        set_gradients(params, 0)
        sharded.step()
    seen = sharded.state
    sharded.state[first]["epoch"] = 1
    sharded.state[second] = {"epoch": 2}
    assert sharded.state.get(first, {}).get("epoch") == 1
    assert seen[second] == {"epoch": 2}
    assert sharded.state.setdefault(second, {"epoch": 3}) == {"epoch": 2}
    assert (untouched in sharded.state) == stepped
    # As frameworks do to bring all state to another device.
    for param, entries in sharded.state.items():
        sharded.state[param] = {key: copy.deepcopy(value) for key, value in entries.items()}
    kept = copy.deepcopy(dict(sharded.state.items()))
    # Of other ranks' parameters there are placeholders.
    listed = len(params) if stepped else len(sharded.optim.state)
    assert len(kept) == len(sharded.state) == len(copy.deepcopy(sharded.state)) == listed
    for _ in range(2):
        set_gradients(params, 1)
        sharded.step()
    assert (sharded.state[first]["epoch"], sharded.state[second]["epoch"]) == (1, 2)
    assert sharded.state.pop(second)["epoch"] == 2
    assert second not in sharded.state
    sharded.consolidate_state_dict()
    with pytest.raises(KeyError):
        del sharded.state[second]
    sharded.state.clear()
    assert not sharded.optim.state


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_nothing_to_train_on_a_group_without_a_backend_for_the_cpu(rank: int) -> None:
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
@PARTITIONS
def test_convolutions_of_one_pixel_stay_in_channels_last(partition: str) -> None:
    def convolutions() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Conv2d(8, 16, 1), nn.Conv2d(16, 8, 3), nn.Conv2d(8, 1, 3), nn.Conv2d(1, 8, 3))
        return layers.to(memory_format=torch.channels_last)

    pair = twins(convolutions)
    # Of the many strides that are right for one pixel, those that torch itself gives to images.
    strides = [param.stride() for param in pair[1].parameters()]
    assert strides[0] == (8, 1, 8, 8)
    sharded = ZeroRedundancyOptimizer(
        pair[0].parameters(), optim.Adam, partition=cutting(partition), parameters_as_bucket_view=True
    )
    assert [param.stride() for param in pair[0].parameters()] == strides
    run_steps(pair, (sharded, optim.Adam(pair[1].parameters())), range(3))
    assert [param.stride() for param in pair[0].parameters()] == strides


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_training_warns_of_nothing() -> None:
    pair = twins()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sharded = ZeroRedundancyOptimizer(pair[0].parameters(), optim.AdamW, parameters_as_bucket_view=True)
        set_gradients(pair[0].parameters(), 0)
        sharded.step()
        sharded.consolidate_state_dict()


@pytest.mark.ranks(4, backend=EVERYWHERE)
def test_named_groups_of_which_a_rank_owns_nothing() -> None:
    def groups(module: nn.Module) -> list[dict[str, Any]]:
        named = list(module.named_parameters())
        return [{"params": named[:1], "lr": 0.1}, {"params": named[1:]}]

    pair = twins(lambda: nn.Linear(5, 3))
    sharded = ZeroRedundancyOptimizer(groups(pair[0]), optim.AdamW)
    plain = optim.AdamW(groups(pair[1]))
    assert [group["param_names"] for group in sharded.param_groups] == [["weight"], ["bias"]]
    run_steps(pair, (sharded, plain), range(3))


@pytest.mark.by_default("2-whole-params | 2-split-views")
@pytest.mark.ranks(2, backend=EVERYWHERE)
@VIEWS
@pytest.mark.parametrize("partition", ["whole", "split"])
def test_two_parameters_that_exchange_their_data(as_bucket_view: bool, partition: str) -> None:
    pair = twins(lambda: nn.Sequential(*[nn.Linear(40, 40) for _ in range(4)]))
    sharded = ZeroRedundancyOptimizer(
        pair[0].parameters(), optim.Adam, parameters_as_bucket_view=as_bucket_view, partition=cutting(partition)
    )
    plain = optim.Adam(pair[1].parameters())
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
def test_weights_that_are_exchanged_with_an_average_and_back() -> None:
    pair = twins()
    # With bucket views the tensors that were the weights are the buffers' memory.
    sharded = ZeroRedundancyOptimizer(pair[0].parameters(), optim.Adam)
    plain = optim.Adam(pair[1].parameters())
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


@pytest.mark.ranks(2, backend=EVERYWHERE)
@VIEWS
def test_a_group_without_parameters_can_be_added(as_bucket_view: bool) -> None:
    pair = twins()
    sharded = ZeroRedundancyOptimizer(pair[0].parameters(), optim.Adam, parameters_as_bucket_view=as_bucket_view)
    plain = optim.Adam(pair[1].parameters())
    extra = [nn.Parameter(torch.ones(5)) for _ in pair]
    for step in range(4):
        for module, optimizer, late in zip(pair, (sharded, plain), extra, strict=True):
            if step == 1:
                optimizer.add_param_group({"params": [], "lr": 0.5})
            if step == 2:
                optimizer.add_param_group({"params": [late], "lr": 0.25})
            set_gradients([*module.parameters(), late], step)
            optimizer.step()
        assert_bitwise_equal(*pair, f"after step {step}")
    assert torch.equal(*extra)
    sharded.consolidate_state_dict(to=0)
    if sharded.rank == 0:
        assert_same_state(sharded.state_dict(), plain.state_dict())
