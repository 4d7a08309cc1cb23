"""DDP with the communication hooks trains as DDP with the plain optimizer does, from the first iteration on."""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
import copy
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ddp_by_collectives import STEPPING
from support.ddp_models import Branches, Counting, TwoKinds
from support.ddp_training import HOOKS, Twins, train, wrapped
from support.training import DENSE_OPTIMIZERS, EVERYWHERE, small_model
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from zeroshard_comm import transport

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")
EVERY_HOOK = pytest.mark.parametrize("hook", HOOKS)
STEPPING_HOOKS = pytest.mark.parametrize("hook", HOOKS[1:])
"""Iterations after which parameters are compared: around DDP's rebuild of its buckets, and after many."""


@pytest.mark.by_default(
    "2-views-whole-reduce_to_owner_hook | 2-views-whole-hook_with_zero_step_interleaved | "
    "3-copies-split-hook_with_zero_step"
)
@pytest.mark.ranks(2, 3, 4, backend=EVERYWHERE)
@EVERY_HOOK
@pytest.mark.parametrize("partition", ["whole", "split"])
@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
def test_parity(hook: str, partition: str, views: bool) -> None:
    train(Twins(hook, partition=partition, ddp={"gradient_as_bucket_view": views}))


@pytest.mark.by_default(
    "2-whole-reduce_to_owner_hook | 2-whole-hook_with_zero_step_interleaved | 3-split-hook_with_zero_step"
)
@pytest.mark.ranks(2, 3, backend=EVERYWHERE)
@EVERY_HOOK
@pytest.mark.parametrize("partition", ["whole", "split"])
def test_gradients_of_a_small_model_are_added_up_without_a_thread(
    hook: str, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "WORTH_OVERLAPPING", 1 << 40)
    twins = Twins(hook, model=Branches, partition=partition, ddp={"find_unused_parameters": True})
    train(twins, lambda ddp, inputs: ddp(inputs, 1).square().mean(), last=6)
    assert not twins.optimizer.follow_backward(STEPPING[hook]).buckets.transport.uses_thread


@pytest.mark.by_default(
    "2-whole-reduce_to_owner_hook | 2-whole-hook_with_zero_step_interleaved | 3-split-hook_with_zero_step"
)
@pytest.mark.ranks(2, 3, backend=EVERYWHERE)
@EVERY_HOOK
@pytest.mark.parametrize("partition", ["whole", "split"])
def test_parameters_in_flat_buffers(hook: str, partition: str) -> None:
    train(Twins(hook, partition=partition, parameters_as_bucket_view=True), last=5)


@pytest.mark.by_default("2-step()-hook_with_zero_step | 2-hooks alone-hook_with_zero_step_interleaved")
@pytest.mark.ranks(2, backend=EVERYWHERE)
@STEPPING_HOOKS
@pytest.mark.parametrize("steps", [True, False], ids=["step()", "hooks alone"])
def test_state_is_empty_on_no_rank_after_a_step(rank: int, hook: str, steps: bool) -> None:
    twins = Twins(hook, model=lambda: nn.Linear(40, 30, bias=False))
    assert not twins.optimizer.state
    twins.backward(twins.ddp, 0)
    if steps:
        twins.optimizer.step()
    assert list(twins.optimizer.state) == list(twins.ddp.parameters())
    assert bool(twins.optimizer.optim.state) == (rank == 0)


@pytest.mark.by_default("1-reduce_to_owner_hook | 1-hook_with_zero_step_interleaved | 5-hook_with_zero_step")
@pytest.mark.ranks(1, 5, backend=EVERYWHERE)
@EVERY_HOOK
def test_one_rank_and_more_ranks_than_tensors(hook: str) -> None:
    train(Twins(hook, model=lambda: nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 2))), last=4)


@pytest.mark.by_default(
    "2-reduce_to_owner_hook-ASGD | 2-hook_with_zero_step-Adadelta | "
    "2-hook_with_zero_step_interleaved-Adafactor | 2-reduce_to_owner_hook-Adagrad | 2-hook_with_zero_step-Adam | "
    "2-hook_with_zero_step_interleaved-Adam-amsgrad | 2-reduce_to_owner_hook-AdamW | "
    "2-hook_with_zero_step-AdamW-foreach | 2-hook_with_zero_step_interleaved-AdamW-fused | "
    "2-reduce_to_owner_hook-Adamax | 2-hook_with_zero_step-NAdam | 2-hook_with_zero_step_interleaved-RAdam | "
    "2-reduce_to_owner_hook-RMSprop | 2-hook_with_zero_step-Rprop | 2-hook_with_zero_step_interleaved-SGD | "
    "2-reduce_to_owner_hook-SGD-momentum"
)
@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize(
    ("hook", "name"),
    [
        # By default each under one of the hooks.
        pytest.param(hook, name, marks=[] if hook == HOOKS[number % 3] else [pytest.mark.exhaustive])
        for number, name in enumerate(DENSE_OPTIMIZERS)
        for hook in HOOKS
    ],
)
def test_every_optimizer(hook: str, name: str) -> None:
    optimizer, settings = DENSE_OPTIMIZERS[name]
    train(Twins(hook, optimizer=optimizer, settings=settings), last=4)


@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
def test_an_optimizer_that_looks_at_whole_matrices(hook: str) -> None:
    def matrices() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(40, 64, bias=False), nn.Linear(64, 7, bias=False), nn.Linear(7, 3, bias=False))

    train(Twins(hook, model=matrices, optimizer=optim.Muon), last=4)


class Wrapping(optim.Optimizer):
    """Steps another optimizer over the same param groups, as Lookahead and SAM do, and counts in itself."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.base = optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.base.param_groups = self.param_groups
        self.steps = [0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps[0] += 1
        if self.steps[0] % 2:
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.grad = param.grad * 1.5
        self.base.step()


@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
def test_an_optimizer_that_wraps_another(hook: str) -> None:
    train(Twins(hook, optimizer=Wrapping), last=6)


@pytest.mark.by_default(
    "2-whole-reduce_to_owner_hook | 2-whole-hook_with_zero_step_interleaved | 2-split-hook_with_zero_step"
)
@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
@pytest.mark.parametrize("partition", ["whole", "split"])
def test_an_optimizer_that_counts_in_its_param_groups(hook: str, partition: str) -> None:
    counting = type("Counting", (Counting,), {"elementwise": True})
    twins = Twins(hook, optimizer=counting, partition=partition)
    train(twins, last=6)
    assert [group["k"] for group in twins.optimizer.param_groups] == [6]


def bfloat16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's own hook, which DDP refuses on gloo by its name."""
    return bf16_compress_hook(state, bucket)


@pytest.mark.by_default(
    "2-fp16-hook_with_zero_step | 2-wrapper-hook_with_zero_step | 3-bf16-hook_with_zero_step_interleaved"
)
@pytest.mark.ranks(2, 3, backend=EVERYWHERE)
@STEPPING_HOOKS
@pytest.mark.parametrize("inner", [fp16_compress_hook, bfloat16, wrapped], ids=["fp16", "bf16", "wrapper"])
def test_compressing_hooks(hook: str, inner: Any) -> None:
    # What a hook reduces, it reduces for both; the order of sums is its own.
    twins = Twins(hook, inner=inner)
    twins.exact = True
    train(twins, last=5)


@pytest.mark.ranks(2, backend=EVERYWHERE)
@STEPPING_HOOKS
def test_power_sgd(hook: str) -> None:
    def state() -> object:
        return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)

    # One bucket: with several of them, its callbacks issue collectives in any order, and gloo aborts, without us too.
    one = {"bucket_cap_mb": 25}
    train(Twins(hook, inner=powerSGD_hook.powerSGD_hook, inner_state=state, exact=False, ddp=one), last=8)


@pytest.mark.ranks(2, backend=EVERYWHERE)
@STEPPING_HOOKS
def test_a_hook_that_returns_another_tensor(hook: str) -> None:
    def doubled(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        total = bucket.buffer().clone()
        return dist.all_reduce(total, async_op=True).get_future().then(lambda done: done.value()[0] * 2)

    train(Twins(hook, inner=doubled), last=4)


@pytest.mark.by_default(
    "2-whole-reduce_to_owner_hook | 2-whole-hook_with_zero_step_interleaved | 3-split-hook_with_zero_step"
)
@pytest.mark.ranks(2, 3, 4, backend=EVERYWHERE)
@EVERY_HOOK
@pytest.mark.parametrize("partition", ["whole", "split"])
def test_groups_and_schedulers(hook: str, partition: str) -> None:
    def groups(model: nn.Module) -> Any:
        params = list(model.parameters())
        return [
            {"params": params[:2], "lr": 0.02},
            {"params": params[2:5], "weight_decay": 0.3},
            {"params": params[5:]},
        ]

    twins = Twins(hook, groups=groups, partition=partition)
    schedulers = [optim.lr_scheduler.ExponentialLR(side[1], 0.5) for side in twins.sides]
    cycles = [optim.lr_scheduler.OneCycleLR(side[1], 0.1, total_steps=20) for side in twins.sides]
    for number in range(1, 7):
        twins.iterate(number)
        for scheduler in schedulers if number % 2 else cycles:
            scheduler.step()
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@STEPPING_HOOKS
def test_step_may_be_left_out(hook: str) -> None:
    twins = Twins(hook)
    for number in range(1, 5):
        twins.ddp.zero_grad()
        twins.backward(twins.ddp, number)
        twins.plain.zero_grad()
        twins.backward(twins.plain_ddp, number)
        twins.plain.step()
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(4, backend=EVERYWHERE)
@EVERY_HOOK
def test_subgroups(rank: int, hook: str) -> None:
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    train(Twins(hook, process_group=halves[rank % 2]), last=4)


@pytest.mark.by_default(
    "2-views-whole-reduce_to_owner_hook | 2-views-whole-hook_with_zero_step_interleaved | "
    "3-copies-split-hook_with_zero_step"
)
@pytest.mark.ranks(2, 3, 4, backend=EVERYWHERE)
@EVERY_HOOK
@pytest.mark.parametrize("partition", ["whole", "split"])
@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
def test_parameters_that_some_or_all_ranks_do_not_use(rank: int, hook: str, partition: str, views: bool) -> None:
    # Momentum and weight decay would move what has no gradient on any rank.
    twins = Twins(
        hook,
        model=Branches,
        optimizer=optim.SGD,
        settings={"momentum": 0.9, "weight_decay": 0.1},
        partition=partition,
        ddp={"find_unused_parameters": True, "gradient_as_bucket_view": views},
    )
    for number in range(1, 9):
        # In turn: all ranks the same branch, then different ones.
        chosen = number % 3 if number % 2 else (number + rank) % 3
        twins.iterate(number, lambda ddp, inputs, chosen=chosen: ddp(inputs, chosen).square().mean())
        twins.check(f"after iteration {number}")


@pytest.mark.by_default(
    "2-views-reduce_to_owner_hook | 2-views-hook_with_zero_step_interleaved | 2-copies-hook_with_zero_step"
)
@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
def test_static_graph(hook: str, views: bool) -> None:
    train(Twins(hook, ddp={"static_graph": True, "gradient_as_bucket_view": views}), last=6)
    # Not all parameters take part.
    twins = Twins(hook, model=Branches, ddp={"static_graph": True, "gradient_as_bucket_view": views})
    train(twins, lambda ddp, inputs: ddp(inputs, 1).square().mean(), last=6)


@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
def test_frozen_parameters_and_a_group_added_later(hook: str) -> None:
    def model() -> nn.Module:
        made = small_model()
        for param in made[0].parameters():
            param.requires_grad_(False)
        return made

    train(Twins(hook, model=model), last=4)

    twins = Twins(hook, groups=lambda module: list(module.parameters()))
    train(twins, last=2)
    extra = [nn.Parameter(torch.ones(70, 3, dtype=torch.float64)) for _ in twins.sides]
    for param, (_, optimizer) in zip(extra, twins.sides, strict=True):
        param._ddp_ignored = True
        optimizer.add_param_group({"params": [param], "lr": 0.5})
    for number in range(3, 6):
        # DDP does not reduce the gradient of a parameter that it was told to ignore; it is equal on all ranks here.
        for param, (ddp, optimizer) in zip(extra, twins.sides, strict=True):
            optimizer.zero_grad()
            param.grad = torch.full_like(param, float(number))
            twins.backward(ddp, number)
            optimizer.step()
        twins.check(f"after iteration {number}")
        assert torch.equal(extra[0], extra[1])


@pytest.mark.by_default(
    "2-whole-reduce_to_owner_hook | 2-whole-hook_with_zero_step_interleaved | 2-split-hook_with_zero_step"
)
@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
@pytest.mark.parametrize("partition", ["whole", "split"])
def test_checkpoints(rank: int, hook: str, partition: str) -> None:
    twins = Twins(hook, partition=partition)
    train(twins, last=2)
    twins.optimizer.consolidate_state_dict(to=0)
    saved = [twins.optimizer.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(saved, src=0)
    theirs = copy.deepcopy(twins.plain.state_dict())
    # So that it matters whether a state is loaded.
    twins.iterate(20)
    # Into the plain optimizer, and from the plain optimizer into ours.
    twins.plain.load_state_dict(saved[0])
    twins.optimizer.load_state_dict(theirs)
    for number in range(3, 6):
        twins.iterate(number)
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
def test_nan_spreads_as_without_sharding(hook: str) -> None:
    twins = Twins(hook)
    train(twins, last=2)
    twins.iterate(3, lambda ddp, inputs: ddp(inputs * (float("nan") if dist.get_rank() else 1.0)).square().mean())
    twins.check("after the NaN")
    assert all(param.isnan().any() for param in twins.ddp.parameters())


@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
def test_model_converted_between_steps(hook: str) -> None:
    twins = Twins(hook)
    train(twins, last=2)
    for param in twins.ddp.parameters():
        param.data = param.data.clone()
    for number in range(3, 6):
        twins.iterate(number)
        twins.check(f"after iteration {number}")


@pytest.mark.by_default(
    "2-before the forward-reduce_to_owner_hook | 2-before the backward-hook_with_zero_step | "
    "2-after the backward-hook_with_zero_step_interleaved"
)
@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
@pytest.mark.parametrize("when", ["before the forward", "before the backward", "after the backward"])
def test_data_that_is_rebound_and_copied_back_into_flat_buffers(hook: str, when: str) -> None:
    twins = Twins(hook, parameters_as_bucket_view=True)
    train(twins, last=2)

    def rebind(ddp: nn.Module, now: str) -> None:
        if when == now:
            for param in ddp.parameters():
                param.data = param.data * 0.5

    def loss(ddp: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        rebind(ddp, "before the forward")
        found = ddp(inputs).square().mean()
        # The graph has saved what the parameters had, and their gradients are those of it.
        rebind(ddp, "before the backward")
        return found

    for number in range(3, 6):
        for ddp, optimizer in twins.sides:
            optimizer.zero_grad()
            twins.backward(ddp, number, loss)
            if hook == "reduce_to_owner_hook":
                rebind(ddp, "after the backward")
            optimizer.step()
        twins.check(f"after iteration {number}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
def test_bytes_sent_are_those_of_ddp(hook: str, world_size: int) -> None:
    twins = Twins(hook, model=lambda: nn.Sequential(*(nn.Linear(200, 200) for _ in range(6))), ddp={"bucket_cap_mb": 1})
    loss = lambda ddp, inputs: ddp(inputs.repeat(1, 5)).square().mean()  # noqa: E731 - one for both
    for number in range(1, 4):
        twins.iterate(number, loss)
    before = twins.optimizer.traffic.total().bytes_sent
    twins.iterate(4, loss)
    sent = twins.optimizer.traffic.total().bytes_sent - before
    parameters = sum(param.nbytes for param in twins.ddp.parameters())
    everyone = torch.tensor([sent])
    dist.all_reduce(everyone)
    # On top of the tensors: notes and statuses.
    assert 2 * parameters * (world_size - 1) <= everyone.item() <= 1.01 * 2 * parameters * (world_size - 1)


@pytest.mark.by_default(
    "2-True-reduce_to_owner_hook | 2-True-hook_with_zero_step_interleaved | 2-False-hook_with_zero_step"
)
@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_HOOK
@pytest.mark.parametrize("static", [True, False])
def test_buckets_of_two_dtypes(hook: str, static: bool) -> None:
    # In the first backward of a static graph DDP announces every bucket as the first, and none as the last.
    train(Twins(hook, model=TwoKinds, ddp={"static_graph": static}), last=6)


@pytest.mark.ranks(1, backend="gloo")
@pytest.mark.parametrize("hook", HOOKS[1:])
def test_a_hook_whose_optimizer_is_gone_says_so(hook: str) -> None:
    twins = Twins(hook)
    twins.iterate(0)
    twins.optimizer.zero_grad()
    del twins.optimizer
    gc.collect()
    with pytest.raises(RuntimeError, match="is gone: keep a reference to it"):
        twins.backward(twins.ddp, 1)
