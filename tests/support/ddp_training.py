"""Two models that see the same batches: one trained by DDP with a hook of ours, one by DDP and the plain optimizer."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.combinations import each_of
from support.training import assert_bitwise_equal, cutting, small_model
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from zeroshard import StepMode, ZeroRedundancyOptimizer
from zeroshard_integrations.ddp import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    register_reduce_to_owner,
)
from zeroshard_testing import assert_replicas_equal

HOOKS = ("reduce_to_owner_hook", "hook_with_zero_step", "hook_with_zero_step_interleaved")


def each_hook_with(names: str, *values: Any) -> pytest.MarkDecorator:
    """Parametrize by hooks, each with one value of other parameters; two values are for those that step in backward."""
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    both = zip(HOOKS[-len(rows) :], rows, strict=True)
    cases = [pytest.param(hook, *row, id="-".join([hook, *map(_id, names.split(", "), row)])) for hook, row in both]
    return pytest.mark.parametrize(f"hook, {names}", cases)


def _id(name: str, value: object) -> str:
    if isinstance(value, bool):
        return name if value else f"not {name}"
    return getattr(value, "__name__", str(value))


EVERY_HOOK = pytest.mark.parametrize("hook", HOOKS)
STEPPING_HOOKS = pytest.mark.parametrize("hook", HOOKS[1:])
PARTITIONS = pytest.mark.parametrize("partition", ["whole", "split"])
HOOKS_AND_PARTITIONS = each_of("hook", HOOKS, partition=["whole", "split"])
VIEWS = pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
"""gradient_as_bucket_view of DDP."""
WHERE = pytest.mark.parametrize("where", ["on all ranks", "on rank 1"])

MANY_BUCKETS = 0.05
"""bucket_cap_mb that cuts small_model() in float64 into several buckets."""


def steps_in_backward(hook: str) -> bool:
    return hook in HOOKS[1:]


def register(
    hook: str,
    ddp: DistributedDataParallel,
    optimizer: ZeroRedundancyOptimizer,
    inner: Callable[..., Any] = allreduce_hook,
    inner_state: object = None,
) -> None:
    if hook == "reduce_to_owner_hook":
        register_reduce_to_owner(ddp, optimizer)
    elif hook == "hook_with_zero_step":
        ddp.register_comm_hook(inner_state, hook_with_zero_step(inner, ddp, optimizer))
    else:
        ddp.register_comm_hook(inner_state, hook_with_zero_step_interleaved(inner, ddp, optimizer))


def with_hook(
    hook: str,
    ddp: DistributedDataParallel,
    kind: type[optim.Optimizer] = optim.SGD,
    *,
    partition: Any = "whole",
    inner: Callable[..., Any] = allreduce_hook,
    **settings: Any,
) -> ZeroRedundancyOptimizer:
    """Build the sharded optimizer of a model in DDP, and register a hook."""
    optimizer = ZeroRedundancyOptimizer(
        ddp.module.named_parameters(),
        kind,
        process_group=ddp.process_group,
        partition=cutting(partition),
        overlap_with_ddp=steps_in_backward(hook),
        **{"lr": 0.1, **settings},
    )
    register(hook, ddp, optimizer, inner)
    return optimizer


class Twins:
    """A sharded training and its reference, in float64.

    At 1 and 2 ranks they must agree bitwise, for a sum of two terms has no order. At more ranks DDP's all-reduce adds
    in another order: then the norm of the difference over the norm must stay below 1e-12, a few thousand roundings.
    """

    def __init__(
        self,
        hook: str = HOOKS[0],
        *,
        model: Callable[[], nn.Module] = small_model,
        optimizer: type[optim.Optimizer] = optim.AdamW,
        settings: Mapping[str, Any] | None = None,
        groups: Callable[[nn.Module], Any] = lambda module: list(module.parameters()),
        partition: str = "whole",
        ddp: Mapping[str, Any] | None = None,
        inner: Callable[..., Any] = allreduce_hook,
        inner_state: Callable[[], object] = lambda: None,
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        exact: bool = True,
        norms: bool = True,
    ) -> None:
        arguments = {"gradient_as_bucket_view": True, "bucket_cap_mb": MANY_BUCKETS, **(ddp or {})}
        keywords = {"lr": 1e-2, **(settings or {})}
        made = model().double()
        self.exact = exact and dist.get_world_size(process_group) <= 2
        self.ddp = DistributedDataParallel(made, process_group=process_group, **arguments)
        self.optimizer = ZeroRedundancyOptimizer(
            groups(made),
            optimizer,
            process_group=process_group,
            partition=cutting(partition),
            overlap_with_ddp=steps_in_backward(hook),
            parameters_as_bucket_view=parameters_as_bucket_view,
            **keywords,
        )
        if norms is not True:
            self.optimizer.follow_backward(StepMode.IN_STEP, norms=norms)
        self.register(hook, inner, inner_state())
        twin = copy.deepcopy(made)
        self.plain_ddp = DistributedDataParallel(twin, process_group=process_group, **arguments)
        if inner is not allreduce_hook:
            self.plain_ddp.register_comm_hook(inner_state(), inner)
        self.plain = optimizer(groups(twin), **keywords)
        self.group = process_group
        self.hook = hook

    def register(self, hook: str, inner: Callable[..., Any], inner_state: object) -> None:
        register(hook, self.ddp, self.optimizer, inner, inner_state)

    @property
    def sides(self) -> tuple[tuple[DistributedDataParallel, optim.Optimizer], ...]:
        return (self.ddp, self.optimizer), (self.plain_ddp, self.plain)

    def iterate(self, seed: int, loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None) -> None:
        """One iteration of each: zero_grad, forward, backward, step."""
        for ddp, optimizer in self.sides:
            optimizer.zero_grad()
            self.backward(ddp, seed, loss)
            optimizer.step()

    def backward(
        self, ddp: nn.Module, seed: int, loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        made = loss(ddp, batch(seed)) if loss is not None else ddp(batch(seed)).square().mean()
        made.backward()

    def check(self, when: str) -> None:
        ours, theirs = self.ddp.module, self.plain_ddp.module
        if self.exact:
            assert_bitwise_equal(ours, theirs, when)
        else:
            assert_close(ours, theirs, 1e-12, when)
        assert_replicas_equal(ours.parameters(), group=self.group)


def train(twins: Twins, loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None, last: int = 20) -> None:
    """Train from iteration 1 to the last one, and compare around DDP's rebuild of its buckets, and at the end."""
    for number in range(1, last + 1):
        twins.iterate(number, loss)
        if number <= 3 or number == last:
            twins.check(f"after iteration {number}")


def batch(seed: int) -> torch.Tensor:
    """Inputs of small_model() that differ on every rank, float64, (8, 40), on the default device."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    made = torch.randn(8, 40, generator=generator, dtype=torch.float64, device="cpu")
    return made.to(torch.get_default_device())


def not_freed(references: Sequence[weakref.ref[Any]]) -> list[object]:
    """Collect garbage, and return what is still there: after a while, for the harness may be looking at it just now."""
    until = time.monotonic() + 10
    while True:
        gc.collect()
        left = [found for found in (reference() for reference in references) if found is not None]
        if not left or time.monotonic() > until:
            return left
        del left
        time.sleep(0.02)


def assert_close(ours: nn.Module, theirs: nn.Module, bound: float, when: str) -> None:
    off = torch.stack([(a - b).norm() for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)]).norm()
    size = torch.stack([b.norm() for b in theirs.parameters()]).norm()
    assert off <= bound * size, f"parameters differ by {float(off / size):.3g} {when}"
