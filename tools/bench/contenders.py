"""Who trains: ways to train one model on all ranks with Adam, each built around a model of its own."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import zeroshard
from bench.workloads import Batch, Workload
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam
from zeroshard_integrations import ddp as hooks

LEARNING_RATE = 1e-4
"""Small enough that rounding does not grow into a difference."""
Partition = Literal["whole", "split"]
Loss = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Trainer:
    """A model with what trains it; ``traffic`` has the optimizer's own counts of what it sends."""

    model: nn.Module
    forward: Loss
    zero_grad: Callable[[], object]
    backward: Callable[[torch.Tensor], object]
    step: Callable[[], object]
    traffic: Any = None

    def iterate(self, batch: Batch) -> None:
        """Train on one batch. Collective."""
        self.zero_grad()
        self.backward(self.forward(*batch))
        self.step()


def _adam(work: Workload) -> dict[str, Any]:
    return {"lr": LEARNING_RATE, "fused": work.fused or None}


def _ddp(work: Workload) -> Trainer:
    model = work.build()
    return _trainer(model, _wrapped(model), Adam(model.parameters(), **_adam(work)))


def _torch_zero(work: Workload, *, views: bool) -> Trainer:
    model = work.build()
    wrapped = _wrapped(model)
    optimizer = TorchZero(wrapped.parameters(), Adam, parameters_as_bucket_view=views, **_adam(work))
    return _trainer(model, wrapped, optimizer)


def _fairscale(work: Workload, *, sharded_ddp: bool) -> Trainer:
    # The modules have no types, and are rarely installed.
    oss = importlib.import_module("fairscale.optim.oss").OSS
    model = work.build()
    optimizer = oss(params=model.parameters(), optim=Adam, **_adam(work))
    if not sharded_ddp:
        return _trainer(model, _wrapped(model), optimizer)
    wrapped = importlib.import_module("fairscale.nn.data_parallel").ShardedDataParallel(model, optimizer)
    # Its own: gradients lie in its buffers, which the optimizer does not know.
    return Trainer(model, wrapped, wrapped.zero_grad, torch.Tensor.backward, optimizer.step)


def _fsdp2(work: Workload) -> Trainer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = work.build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    units = [part for part in model.modules() if isinstance(part, work.units)]
    for part in (*units, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=False)
    return _trainer(model, model, Adam(model.parameters(), **_adam(work)))


def _deepspeed(work: Workload, *, stage: int) -> Trainer:
    # It asks for what its own launcher sets.
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    model = work.build()
    settings: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    settings |= {"zero_allow_untested_optimizer": True, "zero_optimization": {"stage": stage}}
    engine, *_ = importlib.import_module("deepspeed").initialize(
        model=model, optimizer=Adam(model.parameters(), **_adam(work)), config=settings, dist_init_required=False
    )
    return Trainer(model, engine, engine.zero_grad, engine.backward, engine.step)


def _ours(work: Workload, *, partition: Partition, views: bool = True, **hook: bool) -> Trainer:
    model = work.build()
    wrapped = _wrapped(model)
    optimizer = zeroshard.ZeroRedundancyOptimizer(
        wrapped.parameters(), Adam, parameters_as_bucket_view=views, partition=partition, **_adam(work)
    )
    if hook and hasattr(hooks, "register_reduce_to_owner"):
        hooks.register_reduce_to_owner(wrapped, optimizer, **({} if hook["norms"] else hook))
    elif hook:
        # Older checkouts have no other way.
        wrapped.register_comm_hook(optimizer, hooks.reduce_to_owner_hook)
    return _trainer(model, wrapped, optimizer, getattr(optimizer, "traffic", None))


def _clipped(work: Workload, *, partition: Partition) -> Trainer:
    made = _ours(work, partition=partition, norms=True)

    def step() -> None:
        # Gradients are scaled by 1, so that parameters equal the others'.
        nn.utils.clip_grad_norm_(made.model.parameters(), math.inf)
        made.step()

    return replace(made, step=step)


def _sharded(work: Workload, *, partition: Partition) -> Trainer:
    model = work.build()
    optimizer = zeroshard.ZeroRedundancyOptimizer(model.named_parameters(), Adam, partition=partition, **_adam(work))
    zeroshard.shard_gradients(model, optimizer)
    return _trainer(model, model, optimizer, optimizer.traffic)


def _wrapped(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def _trainer(model: nn.Module, forward: Loss, optimizer: Any, traffic: Any = None) -> Trainer:  # noqa: ANN401 - of any package
    return Trainer(model, forward, optimizer.zero_grad, torch.Tensor.backward, optimizer.step, traffic)


_WAYS: dict[str, Callable[..., Trainer]] = {
    "step": _ours,
    "copies": partial(_ours, views=False),
    "hook": partial(_ours, norms=True),
    "unnormed": partial(_ours, norms=False),
    "clipped": _clipped,
    "sharded": _sharded,
}

CONTENDERS: dict[str, Callable[[Workload], Trainer]] = {
    "ddp": _ddp,
    "torch-zero": partial(_torch_zero, views=False),
    "torch-zero-views": partial(_torch_zero, views=True),
    "fairscale-oss": partial(_fairscale, sharded_ddp=False),
    "fairscale-sddp": partial(_fairscale, sharded_ddp=True),
    "fsdp2": _fsdp2,
    "deepspeed-1": partial(_deepspeed, stage=1),
    "deepspeed-2": partial(_deepspeed, stage=2),
    **{f"{way}-{part}": partial(build, partition=part) for way, build in _WAYS.items() for part in ("whole", "split")},
}
"""What builds the trainer of a workload, on all ranks; docs/benchmarks.md says in words what each is."""
