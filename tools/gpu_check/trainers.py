"""Builds trainers: DDP with the plain or torch's optimizer, zeroshard with its hooks, or with sharded gradients."""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from gpu_check.models import CUDA, DEVICE, build
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from zeroshard import ZeroRedundancyOptimizer, shard_gradients
from zeroshard_integrations.ddp import hook_with_zero_step, hook_with_zero_step_interleaved, register_reduce_to_owner

DDP, TORCH = "DDP", "torch's class"
WHOLE, SPLIT = "whole", "split"
_STEPPING: dict[str, Callable[..., Any]] = {
    "hook_with_zero_step": hook_with_zero_step,
    "hook_with_zero_step_interleaved": hook_with_zero_step_interleaved,
}
HOOKS = [WHOLE, SPLIT, *(f"{partition}, {hook}" for hook in _STEPPING for partition in (WHOLE, SPLIT))]
"""Partition and hook of zeroshard; `reduce_to_owner_hook` if none is named."""
SHARDED = SHARDED_WHOLE, SHARDED_SPLIT = [f"{partition}, sharded gradients" for partition in (WHOLE, SPLIT)]
"""Partition of zeroshard, without DDP."""

FP32, BF16 = torch.float32, torch.bfloat16
# Adam divides small gradients by their own size, so roundings of two correct runs grow. SGD compares better.
COMPARABLE: dict[str, Any] = {"kind": SGD, "lr": 0.1, "momentum": 0.9}


@dataclass(frozen=True)
class Trainer:
    """A model, under DDP unless its gradients are sharded, and its optimizer."""

    model: nn.Module
    optimizer: Any

    def backward(self, ids: torch.Tensor, dtype: torch.dtype = FP32) -> None:
        """Run forward and backward, under autocast unless `dtype` is float32."""
        with torch.autocast(DEVICE.type, BF16, enabled=dtype == BF16):
            loss = self.model(ids)
        loss.backward()

    def iterate(self, ids: torch.Tensor, dtype: torch.dtype = FP32) -> None:
        """Train on one batch."""
        self.optimizer.zero_grad()
        self.backward(ids, dtype)
        self.optimizer.step()

    def flat(self) -> torch.Tensor:
        """Return a copy of all parameters as one vector."""
        return torch.cat([param.detach().flatten() for param in self.model.parameters()])


def partition_of(name: str) -> Literal["whole", "split"]:
    """Return the partition of a trainer; "whole", as torch's class has it, without zeroshard."""
    return "split" if name.startswith(SPLIT) else "whole"


def steps_in_backward(name: str) -> bool:
    """Return True if a hook of zeroshard steps during backward, so the loop has no gradients to clip or to unscale."""
    return name.partition(", ")[2] in _STEPPING


def trainer(name: str, size: str, kind: type[Optimizer] = AdamW, **settings: Any) -> Trainer:  # noqa: ANN401 - of any optimizer
    """Build a trainer by its name: `DDP`, `TORCH`, or one of `HOOKS` or `SHARDED`."""
    settings = {"lr": 1e-4, "fused": True, **settings}
    partition = partition_of(name)
    if name in SHARDED:
        model = build(size)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, partition=partition, **settings)
        shard_gradients(model, optimizer)
        return Trainer(model, optimizer)
    ddp = DistributedDataParallel(build(size), gradient_as_bucket_view=True)
    params = ddp.parameters()
    is_fake = dist.get_backend() == "fake"
    if name in (DDP, TORCH):
        if is_fake:
            ddp.register_comm_hook(None, _all_reduce_without_data)
        if name == DDP:
            return Trainer(ddp, kind(params, **settings))
        return Trainer(ddp, TorchZero(params, kind, parameters_as_bucket_view=True, **settings))
    _, _, hook = name.partition(", ")
    optimizer = ZeroRedundancyOptimizer(params, kind, partition=partition, overlap_with_ddp=bool(hook), **settings)
    if hook:
        inner = _all_reduce_without_data if is_fake else allreduce_hook
        ddp.register_comm_hook(None, _STEPPING[hook](inner, ddp, optimizer))
    else:
        register_reduce_to_owner(ddp, optimizer)
    return Trainer(ddp, optimizer)


def _all_reduce_without_data(_: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce as DDP does without a hook, which the fake backend does not support, because its work has no future."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    dist.all_reduce(buffer, async_op=True)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[DEVICE] if CUDA else [])
    done.set_result(buffer)
    return done
