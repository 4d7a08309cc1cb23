"""Loops that train with Muon and AdamW in one sharded optimizer: as a plain optimizer for each does in one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ddp_training import HOOKS, assert_close, register
from support.training import EVERYWHERE, assert_bitwise_equal, assert_same_state, set_gradients, twins
from support.two_classes import groups_of, language_model, parted, separate, sharded, small_gpt, step_all
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from zeroshard import AveragedParameters, ZeroRedundancyOptimizer, split_state_dict
from zeroshard.plan import layout
from zeroshard_core import level
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


@pytest.mark.by_default(
    "2-12-whole-none | 2-12-whole-hook_with_zero_step | 2-12-level-reduce_to_owner_hook | "
    "2-12-level-hook_with_zero_step_interleaved"
)
@pytest.mark.ranks(2, 3, 4, backend=EVERYWHERE)
@EVERY_LOOP
@EVERY_PARTITION
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


@pytest.mark.by_default(
    "2-torch.float32-12-whole-none | 2-torch.float32-12-whole-hook_with_zero_step | "
    "3-torch.bfloat16-12-level-reduce_to_owner_hook | 3-torch.bfloat16-12-level-hook_with_zero_step_interleaved"
)
@pytest.mark.ranks(2, 3, 4, backend=EVERYWHERE)
@EVERY_LOOP
@EVERY_PARTITION
@STEPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
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


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.by_default("3-consolidated-whole | 3-nested-level | 3-flat-whole")
@pytest.mark.ranks(3, backend=EVERYWHERE)
@EVERY_PARTITION
@pytest.mark.parametrize("way", ["consolidated", "nested", "flat"])
def test_saved_at_three_ranks_and_resumed_at_two_and_by_separate_optimizers(
    rank: int, partition: str, way: str, ranks_tmp_path: Path
) -> None:
    path, options = ranks_tmp_path / "saved", StateDictOptions(flatten_optimizer_state_dict=way == "flat")
    two, one = dist.new_group([0, 1]), dist.new_group([0])
    model, reference = twins(small_gpt)
    optimizer, plain = sharded(model, partition=partition), separate(reference)

    def steps(of: nn.Module, optimizers: list[Any], begin: int) -> None:
        for step in range(begin, begin + 3):
            optimizers[0].param_groups[0]["momentum"] = 0.85 + 0.02 * step
            step_all(of, optimizers, step)

    steps(model, [optimizer], 0)
    steps(reference, plain, 0)
    if way == "consolidated":
        optimizer.consolidate_state_dict(to=2)
        if rank == 2:
            torch.save(optimizer.state_dict(), path)
    else:
        dcp.save(get_optimizer_state_dict(model, optimizer, options=options), checkpoint_id=path)
    dist.barrier()

    def resume(of: nn.Module, optimizers: list[Any], group: dist.ProcessGroup) -> None:
        if way != "consolidated":
            found = get_optimizer_state_dict(of, optimizers, options=options)
            dcp.load(found, checkpoint_id=path, process_group=group)
            set_optimizer_state_dict(of, optimizers, found, options=options)
            return
        state_dict = torch.load(path, weights_only=True)
        parts = [state_dict] if len(optimizers) == 1 else split_state_dict(state_dict, [0, 1, 1])
        for each, part in zip(optimizers, parts, strict=True):
            each.load_state_dict(part)

    resumed, alone = (copy.deepcopy(model) for _ in range(2))
    steps(reference, plain, 3)
    if rank < 2:
        smaller = sharded(resumed, process_group=two, partition=partition)
        resume(resumed, [smaller], two)
        steps(resumed, [smaller], 3)
        assert_bitwise_equal(resumed, reference, "resumed at two ranks")
        smaller.consolidate_state_dict(to=0)
    if rank == 0:
        for part, each in zip(split_state_dict(smaller.state_dict(), [0, 1, 1]), plain, strict=True):
            assert_same_state(part, each.state_dict())
        others = separate(alone)
        resume(alone, others, one)
        steps(alone, others, 3)
        assert_bitwise_equal(alone, reference, "resumed by separate optimizers")


# ---------------------------------------------------------------------- around step()

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
def test_schedulers(name: str, rank: int) -> None:
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


@pytest.mark.by_default("2-0-whole-none | 2-2-whole-none | 3-1-level-reduce_to_owner_hook")
@pytest.mark.ranks(2, 3, backend=EVERYWHERE)
@pytest.mark.parametrize("hook", LOOPS[:2])
@EVERY_PARTITION
@pytest.mark.parametrize("group", range(3))
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


@pytest.mark.by_default(
    "2-none-whole-0 | 2-reduce_to_owner_hook-whole-1 | 2-reduce_to_owner_hook-whole-2 | 2-none-level-0"
)
@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize(
    ("hook", "partition", "group"),
    [
        *[(hook, "whole", group) for hook in LOOPS[:2] for group in range(3)],
        # The norm of a cut tensor is taken in parts: its last bits may differ.
        *[(hook, "level", 0) for hook in LOOPS[:2]],
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
def test_uneven_inputs(rank: int, partition: str) -> None:
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
@pytest.mark.by_default("2-none")
@pytest.mark.ranks(2, backend="gloo", timeout=240)
@pytest.mark.parametrize("hook", ["none", *[pytest.param(hook, marks=pytest.mark.exhaustive) for hook in HOOKS]])
def test_a_compiled_model(hook: str) -> None:
    torch._dynamo.reset()
    sides = Sides(hook, "level", compiles=True)
    for step in range(4):
        sides.iterate(step)
        sides.check(f"after step {step}")


@pytest.mark.by_default("2-none | 2-reduce_to_owner_hook | 2-hook_with_zero_step | 2-hook_with_zero_step_interleaved")
@pytest.mark.ranks(2, 3, backend=EVERYWHERE)
@EVERY_LOOP
def test_averages(hook: str, world_size: int) -> None:
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


@pytest.mark.by_default(
    "2-whole-none | 2-whole-hook_with_zero_step | 2-level-reduce_to_owner_hook | "
    "2-level-hook_with_zero_step_interleaved"
)
@pytest.mark.ranks(2, backend=EVERYWHERE)
@EVERY_LOOP
@EVERY_PARTITION
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


# ---------------------------------------------------------------------- bad input


def absent(*arguments: Any, **keywords: Any) -> optim.Optimizer:
    """As a class whose module one rank has not got."""
    raise ImportError("no module named 'muon_kernels'")


def matrices(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size, 8)) for size in sizes]


BAD_GROUPS: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    "tensors that its class cannot take": (
        lambda: {"params": [nn.Parameter(torch.ones(3))], "optimizer_class": optim.Muon},
        ValueError,
        "Muon only supports 2D parameters",
    ),
    "a class that cannot be imported": (
        lambda: {"params": matrices(4), "optimizer_class": absent},
        ImportError,
        "no module named 'muon_kernels'",
    ),
    "an instance": (
        lambda: {"params": matrices(4), "optimizer_class": optim.SGD(matrices(4))},
        TypeError,
        "must be an optimizer class, but got SGD",
    ),
    "an unknown cost": (
        lambda: {"params": matrices(4), "cost": "newton_schulz"},
        TypeError,
        "`cost` of a param group must be a function .* but is 'newton_schulz'",
    ),
    "a cost that is no number": (
        lambda: {"params": matrices(4), "optimizer_class": optim.Muon, "cost": lambda spec: "heavy"},
        TypeError,
        "should be a number, but is 'heavy'",
    ),
    "a dict of costs without the tensor": (
        lambda: {"params": matrices(4), "optimizer_class": optim.Muon, "cost": {}},
        ValueError,
        "the dict of costs has no tensor",
    ),
    "arguments that its class does not take": (
        lambda: {"params": matrices(4), "optimizer_class": optim.Muon, "optimizer_defaults": {"betas": (0, 0)}},
        TypeError,
        "unexpected keyword argument 'betas'",
    ),
}
BAD = [
    (name, where)
    for name in BAD_GROUPS
    for where in ("on all ranks", "on rank 1")
    # Its owner finds out. If that is rank 0, it finds that it has another class itself.
    if (name, where) != ("tensors that its class cannot take", "on rank 1")
]


@pytest.mark.by_default(
    "2-whole-tensors that its class cannot take-on all ranks | 2-whole-an instance-on all ranks | "
    "2-whole-a cost that is no number-on all ranks | "
    "2-whole-arguments that its class does not take-on all ranks | "
    "2-level-a class that cannot be imported-on rank 1 | 2-level-an unknown cost-on rank 1 | "
    "2-level-a dict of costs without the tensor-on rank 1"
)
@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize(("name", "where"), BAD)
@EVERY_PARTITION
def test_a_group_that_cannot_be_used(rank: int, where: str, name: str, partition: str) -> None:
    make, error, words = BAD_GROUPS[name]

    def bad() -> dict[str, Any]:
        made = make()
        return made if where == "on all ranks" or rank == 1 else {"params": made["params"], "lr": 0.1}

    model, reference = twins(language_model)
    with pytest.raises(error, match=words) as caught:
        ZeroRedundancyOptimizer([*groups_of(model), bad()], optim.AdamW, partition=partition)
    assert where == "on all ranks" or "rank 1: " in str(caught.value)
    optimizer, plain = sharded(model, partition=partition), separate(reference)
    plan, groups = optimizer.plan, copy.deepcopy(optimizer.param_groups)
    for step in range(3):
        with pytest.raises(error, match=words):
            optimizer.add_param_group(bad())
        assert (optimizer.plan, optimizer.group_assignment) == (plan, [0, 1, 1])
        assert [group.keys() for group in optimizer.param_groups] == [group.keys() for group in groups]
        step_all(model, [optimizer], step)
        step_all(reference, plain, step)
        assert_bitwise_equal(model, reference, f"after step {step}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_the_order_of_classes_differs_between_ranks(rank: int) -> None:
    model, reference = twins(language_model)
    hidden, outer, rest = parted(model)
    classes = [optim.Muon, optim.AdamW, optim.SGD]
    swapped = classes if rank == 0 else [classes[1], classes[0], classes[2]]
    made = [
        {"params": params, "optimizer_class": each, "lr": 0.1, "weight_decay": 0.0}
        for params, each in zip((hidden, outer, rest), swapped, strict=True)
    ]
    with pytest.raises(RuntimeError, match=r"'Muon, AdamW, SGD' on rank 0 and 'AdamW, Muon, SGD' on rank 1"):
        ZeroRedundancyOptimizer(made, optim.AdamW)
    optimizer, plain = sharded(model), separate(reference)
    for step in range(3):
        with pytest.raises(RuntimeError, match=r"Muon.* on rank 0 and .*SGD.* on rank 1"):
            optimizer.add_param_group({"params": matrices(4), "optimizer_class": classes[2 * rank]})
        assert optimizer.group_assignment == [0, 1, 1]
        step_all(model, [optimizer], step)
        step_all(reference, plain, step)
        assert_bitwise_equal(model, reference, f"after step {step}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_cap_that_nothing_can_meet(rank: int) -> None:
    # Of 15 rows, some rank holds 8: more than the mean, which AdamW's state for a scale is part of.
    made = matrices(5, 5, 2, 2, 1)
    scale = nn.Parameter(torch.ones(()))
    groups = [{"params": made, "optimizer_class": optim.Muon}, {"params": [scale]}]
    with pytest.raises(ValueError, match=r"tensors that stay whole put .* use level\(state_cap=1.041\) or more"):
        ZeroRedundancyOptimizer(groups, optim.AdamW, partition=level(state_cap=1.0))
    with pytest.raises(ValueError, match=r"rank 1: tensors that stay whole put .* use level\(state_cap=1.041\)"):
        ZeroRedundancyOptimizer(groups, optim.AdamW, partition=level(state_cap=1.0 if rank else 1.041))
    optimizer = ZeroRedundancyOptimizer(groups, optim.AdamW, partition=level(state_cap=1.041))
    set_gradients([*made, scale], 0)
    optimizer.step()
    assert_replicas_equal([*made, scale])
