"""Loops that train with Muon and AdamW in one sharded optimizer: as a plain optimizer for each does in one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.combinations import each_of
from support.ddp_training import HOOKS, assert_close, register
from support.training import EVERYWHERE, assert_bitwise_equal, assert_same_state, twins
from support.two_classes import language_model, parted, separate, sharded, small_gpt, step_all
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from zeroshard import AveragedParameters, split_state_dict
from zeroshard.plan import layout
from zeroshard_integrations.join import Join
from zeroshard_testing import assert_replicas_equal

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")
LOOPS = ("none", *HOOKS)
"""No communication hook, and those of zeroshard_integrations.ddp; all but the first two step during backward."""


EVERY_LOOP = pytest.mark.parametrize("hook", LOOPS)
EVERY_PARTITION = pytest.mark.parametrize("partition", ["whole", "level"])
STEPS = pytest.mark.parametrize("steps", [12, pytest.param(50, marks=pytest.mark.exhaustive)])
MAX_NORM = 0.5
RATES: list[Callable[[int], float]] = [lambda step: 0.97**step, lambda step: 1 / (1 + step), lambda step: 1.0]


@pytest.fixture(autouse=True)
def _small_tensors_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "SMALLEST_PART", 512)


class PreciseMuon(optim.Optimizer):
    """Orthogonalises in the gradient's dtype, and not in bfloat16: what was a rounding of a gradient remains one."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in (each for each in group["params"] if each.grad is not None):
                momentum = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
                update = momentum.lerp_(param.grad, 1 - group["momentum"])
                update = update / update.norm()
                for _ in range(5):
                    update = 1.5 * update - 0.5 * update @ update.T @ update
                param.sub_(update, alpha=group["lr"])


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of a rank, and those after each; one of three batches, so that the loss can fall."""
    generator = torch.Generator().manual_seed(10 * (step % 3) + rank)
    text = torch.randint(256, (2, 9), generator=generator, device="cpu").to(torch.get_default_device())
    return text[:, :-1], text[:, 1:]


class Sides:
    """A small GPT under DDP with one sharded optimizer, and the same in one process with a plain one for each class."""

    def __init__(
        self,
        hook: str = "none",
        partition: str = "whole",
        *,
        matrices: type[optim.Optimizer] = optim.Muon,
        dtype: torch.dtype = torch.float32,
        compiles: bool = False,
        **settings: Any,
    ) -> None:
        self.hook, self.world_size = hook, dist.get_world_size()
        self.model, self.reference = (each.to(dtype) for each in twins(small_gpt))
        # The other backends compute otherwise, and buckets may be no smaller than that with a compiler.
        made, bucket_cap = (torch.compile(self.model, backend="eager"), 1) if compiles else (self.model, 0.01)
        self.ddp = DistributedDataParallel(made, bucket_cap_mb=bucket_cap)
        self.optimizer = sharded(
            self.model, matrices, overlap_with_ddp=hook in HOOKS[1:], partition=partition, **settings
        )
        self.plain = separate(self.reference, matrices)
        if hook != "none":
            register(hook, self.ddp, self.optimizer)
        assert self.optimizer.plan.is_cut(len(parted(self.model)[0])) == (partition == "level")

    @property
    def optimizers(self) -> list[optim.Optimizer]:
        return [self.optimizer, *self.plain]

    def begin(self, step: int) -> None:
        """Drop gradients, and write the momentum of a warm-up."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for optimizer in (self.optimizer, self.plain[0]):
            optimizer.param_groups[0]["momentum"] = 0.85 + 0.1 * min(1.0, step / 10)

    def backward(self, step: int, *, replicated: bool = False) -> float:
        """Compute the gradients of this rank's batch, and in the reference those of the batches of all ranks."""
        loss = self.ddp(*batch(step, 0 if replicated else dist.get_rank()))
        loss.backward()
        ranks = 1 if replicated else self.world_size
        for rank in range(ranks):
            (self.reference(*batch(step, rank)) / ranks).backward()
        return float(loss.detach())

    def clip(self) -> float:
        """Clip the norm of all gradients, and return what it was."""
        norms = [nn.utils.clip_grad_norm_(each.parameters(), MAX_NORM) for each in (self.ddp, self.reference)]
        return float(norms[0])

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def iterate(self, step: int) -> None:
        self.begin(step)
        self.backward(step)
        self.step()

    def schedule(self) -> list[lr_scheduler.LambdaLR]:
        """Make a scheduler for each optimizer, with one function for each of its groups."""
        every = zip(self.optimizers, (RATES, RATES[:1], RATES[1:]), strict=True)
        return [lr_scheduler.LambdaLR(optimizer, rates) for optimizer, rates in every]

    def check(self, when: str, *, exact: bool = True) -> None:
        assert_replicas_equal(self.model.parameters())
        if exact:
            assert_bitwise_equal(self.model, self.reference, when)
        else:
            assert_close(self.model, self.reference, 1e-12, when)


def train(sides: Sides, steps: int, *, exact: bool = True, replicated: bool = False) -> None:
    schedulers, norms = sides.schedule(), list[float]()
    for step in range(steps):
        sides.begin(step)
        sides.backward(step, replicated=replicated)
        if sides.hook in LOOPS[:2]:
            norms.append(sides.clip())
        sides.step()
        for scheduler in schedulers:
            scheduler.step()
        sides.check(f"after step {step}", exact=exact)
    assert not norms or max(norms) > MAX_NORM


@pytest.mark.exhaustive_at(3, 4)
@pytest.mark.ranks(2, 3, 4, backend=EVERYWHERE)
@each_of("hook", LOOPS, partition=["whole", "level"])
@STEPS
def test_each_rank_has_batches_of_its_own(hook: str, partition: str, steps: int, world_size: int) -> None:
    # A sum of two gradients has no order. Of three it has, and the norm of a cut tensor is taken in parts: such
    # roundings Muon in bfloat16 makes large.
    exact = world_size == 2 and (hook, partition) != ("reduce_to_owner_hook", "level")
    matrices = optim.Muon if exact else PreciseMuon
    train(Sides(hook, partition, matrices=matrices, dtype=torch.float64), steps, exact=exact)


@pytest.mark.exhaustive
@pytest.mark.ranks(4, backend=EVERYWHERE)
@EVERY_LOOP
def test_all_ranks_have_the_same_batches(hook: str) -> None:
    # A quarter is exact, and so is the sum of four equal ones, in any order.
    train(Sides(hook, dtype=torch.float64), 50, replicated=True)


@pytest.mark.exhaustive_at(3, 4)
@pytest.mark.ranks(2, 3, 4, backend=EVERYWHERE)
@each_of("hook", LOOPS, partition=["whole", "level"], dtype=[torch.float32, torch.bfloat16])
@STEPS
def test_replicas_are_equal_in_other_dtypes(hook: str, partition: str, steps: int, dtype: torch.dtype) -> None:
    sides = Sides(hook, partition, dtype=dtype, master_weights=dtype == torch.bfloat16)
    for group in sides.optimizer.param_groups:
        group["lr"] = 0.01
    losses = []
    for step in range(steps):
        sides.begin(step)
        losses.append(sides.backward(step))
        if hook in LOOPS[:2]:
            nn.utils.clip_grad_norm_(sides.ddp.parameters(), MAX_NORM)
        sides.optimizer.step()
        assert_replicas_equal(sides.model.parameters())
    assert losses[-1] < losses[0]


SCHEDULERS: dict[str, Callable[[optim.Optimizer, slice], Any]] = {
    "LambdaLR": lambda optimizer, groups: lr_scheduler.LambdaLR(optimizer, RATES[groups]),
    "CosineAnnealingLR": lambda optimizer, groups: lr_scheduler.CosineAnnealingLR(optimizer, 4),
    "OneCycleLR": lambda optimizer, groups: lr_scheduler.OneCycleLR(
        optimizer, [0.02, 0.6, 0.04][groups], total_steps=6, cycle_momentum=False
    ),
    "SequentialLR": lambda optimizer, groups: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.LambdaLR(optimizer, RATES[groups])],
        milestones=[2],
    ),
    "ReduceLROnPlateau": lambda optimizer, groups: lr_scheduler.ReduceLROnPlateau(
        optimizer, patience=0, min_lr=[0.001, 0.1, 0.01][groups]
    ),
}


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_set_the_rates_of_each_group(name: str, rank: int) -> None:
    model, reference = twins(language_model)
    optimizer, plain = sharded(model), separate(reference)
    groups = zip([optimizer, *plain], (slice(3), slice(1), slice(1, 3)), strict=True)
    schedulers = [SCHEDULERS[name](each, part) for each, part in groups]
    rates = []
    for step in range(5):
        step_all(model, [optimizer], step)
        step_all(reference, plain, step)
        for scheduler in schedulers:
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        rates.append([group["lr"] for group in optimizer.param_groups])
        assert rates[-1] == [group["lr"] for each in plain for group in each.param_groups]
        assert_bitwise_equal(model, reference, f"after step {step}")
    assert len({tuple(each) for each in rates}) > 2
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        for part, each in zip(split_state_dict(optimizer.state_dict(), [0, 1, 1]), plain, strict=True):
            assert_same_state(part, each.state_dict())


@pytest.mark.exhaustive_at(3)
@pytest.mark.ranks(2, 3, backend=EVERYWHERE)
@each_of("group", range(3), partition=["whole", "level"], hook=LOOPS[:2])
def test_an_infinity_in_one_group_on_one_rank_skips_the_step_of_all(
    rank: int, world_size: int, hook: str, partition: str, group: int
) -> None:
    sides = Sides(hook, partition)
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=2.0**10, growth_interval=2)
    overflows = False
    param = sides.optimizer.param_groups[group]["params"][-1]
    param.register_hook(lambda grad: grad * math.inf if overflows else grad)
    scales = []
    for step in range(6):
        overflows, before = step == 2 and rank == 1, copy.deepcopy(sides.model)
        sides.begin(step)
        for each in range(world_size):
            (sides.reference(*batch(step, each)) / world_size).backward()
        scaler.scale(sides.ddp(*batch(step, rank))).backward()
        scaler.step(sides.optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if step == 2:
            assert_bitwise_equal(sides.model, before, "after a step that was skipped")
        else:
            for plain in sides.plain:
                plain.step()
        assert_replicas_equal(sides.model.parameters())
        if world_size == 2:
            assert_bitwise_equal(sides.model, sides.reference, f"after step {step}")
    assert scales == [2.0**power for power in (10, 11, 10, 10, 11, 11)]


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize(
    ("hook", "partition", "group"),
    [
        ("none", "whole", 0),
        ("reduce_to_owner_hook", "whole", 1),
        ("reduce_to_owner_hook", "whole", 2),
        # The norm of a cut tensor is taken in parts, and its last bits may differ: the tensors of group 0 are whole.
        ("none", "level", 0),
    ],
)
def test_the_gradients_of_one_group_are_clipped(hook: str, partition: str, group: int) -> None:
    sides = Sides(hook, partition)
    theirs = [each for plain in sides.plain for each in plain.param_groups]
    for step in range(4):
        sides.begin(step)
        sides.backward(step)
        norms = [
            nn.utils.clip_grad_norm_(groups[group]["params"], 0.01) for groups in (sides.optimizer.param_groups, theirs)
        ]
        assert norms[0] == norms[1] > 0.01
        sides.step()
        sides.check(f"after step {step}")


@pytest.mark.ranks(2, backend="gloo")
@EVERY_PARTITION
def test_inputs_may_be_uneven(rank: int, partition: str) -> None:
    sides, lengths = Sides("none", partition), [5, 2]
    with Join([sides.ddp, sides.optimizer]):
        for step in range(lengths[rank]):
            sides.begin(step)
            sides.ddp(*batch(step, rank)).backward()
            sides.optimizer.step()
    for step in range(max(lengths)):
        sides.begin(step)
        for each in range(2):
            if step < lengths[each]:
                (sides.reference(*batch(step, each)) / 2).backward()
        for plain in sides.plain:
            plain.step()
    sides.check("after the block")


# Compiling takes long where others compute too.
@pytest.mark.ranks(2, backend="gloo", timeout=240)
@pytest.mark.parametrize("hook", ["none", *[pytest.param(hook, marks=pytest.mark.exhaustive) for hook in HOOKS]])
def test_a_compiled_model_trains_as_without_sharding(hook: str) -> None:
    torch._dynamo.reset()
    sides = Sides(hook, "level", compiles=True)
    for step in range(4):
        sides.iterate(step)
        sides.check(f"after step {step}")


@pytest.mark.exhaustive_at(3)
@pytest.mark.ranks(2, 3, backend=EVERYWHERE)
@EVERY_LOOP
def test_averages_equal_those_of_one_process(hook: str, world_size: int) -> None:
    exact = world_size == 2
    sides = Sides(hook, "level", matrices=optim.Muon if exact else PreciseMuon, dtype=torch.float64)
    average = AveragedParameters(sides.optimizer, get_ema_multi_avg_fn(0.9))
    averaged = AveragedModel(sides.reference, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(4):
        sides.iterate(step)
        average.update()
        averaged.update_parameters(sides.reference)
        with average.applied():
            assert_replicas_equal(sides.model.parameters())
            if exact:
                assert_bitwise_equal(sides.model, averaged.module, f"averaged after step {step}")
            else:
                assert_close(sides.model, averaged.module, 1e-12, f"averaged after step {step}")
        sides.check(f"after step {step}", exact=exact)


@pytest.mark.ranks(2, backend=EVERYWHERE)
@each_of("hook", LOOPS, partition=["whole", "level"])
def test_a_group_of_a_third_class_is_added_under_a_hook(hook: str, partition: str) -> None:
    sides = Sides(hook, partition)
    sides.iterate(0)
    ours, theirs = (nn.Parameter(torch.ones(70, 3, device=torch.get_default_device())) for _ in range(2))
    # DDP does not reduce it: its gradient is equal on all ranks here.
    ours._ddp_ignored = True  # type: ignore[attr-defined]
    sgd = partial(optim.SGD, momentum=0.9)
    sides.optimizer.add_param_group({"params": [ours], "optimizer_class": sgd, "lr": 0.1})
    sides.plain.append(sgd([theirs], lr=0.1))
    assert [type(each) for each in sides.optimizer.local_optimizers] == [optim.Muon, optim.AdamW, optim.SGD]
    for step in range(1, 5):
        sides.begin(step)
        for param in (ours, theirs):
            param.grad = torch.full_like(param, step)
        sides.backward(step)
        sides.step()
        sides.check(f"after step {step}")
        assert torch.equal(ours, theirs)
