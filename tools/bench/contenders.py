"""Who trains: ways to train one model on all ranks with Adam, each built around a model of its own."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import zeroshard
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam
from workloads import Batch, Workload
from zeroshard_comm import Traffic
from zeroshard_integrations.ddp import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    register_reduce_to_owner,
)

DDP = "ddp"
TORCH_ZERO = ("torch-zero", "torch-zero-views")


@dataclass(frozen=True)
class Trainer:
    """A model with what trains it.

    Attributes:
        model: holds the parameters, and gives the loss of a batch where nothing is wrapped around it.
        forward: gives the loss of a batch.
        zero_grad: forgets the gradients.
        backward: takes the loss.
        step: updates the parameters.
        traffic: the optimizer's own counts, where it has them.
    """

    model: nn.Module
    forward: Callable[..., torch.Tensor]
    zero_grad: Callable[[], object]
    backward: Callable[[torch.Tensor], object]
    step: Callable[[], object]
    traffic: Traffic | None = None

    def iterate(self, batch: Batch) -> None:
        """Train on one batch. Collective."""
        self.zero_grad()
        self.backward(self.forward(*batch))
        self.step()


@dataclass(frozen=True)
class Contender:
    """A way to train.

    Attributes:
        what: in words.
        build: makes the trainer of a workload. Collective.
        needs: module that must be installed for it.
    """

    what: str
    build: Callable[[Workload], Trainer]
    needs: str = field(default="torch")

    @property
    def is_installed(self) -> bool:
        """Whether what it needs is installed."""
        return importlib.util.find_spec(self.needs) is not None


def _ddp(work: Workload) -> Trainer:
    model = work.build()
    wrapped = _wrapped(model)
    return _trainer(model, wrapped, Adam(wrapped.parameters(), lr=work.lr, fused=True))


def _torch_zero(work: Workload, *, views: bool) -> Trainer:
    model = work.build()
    wrapped = _wrapped(model)
    optimizer = TorchZero(
        wrapped.parameters(), optimizer_class=Adam, parameters_as_bucket_view=views, lr=work.lr, fused=True
    )
    return _trainer(model, wrapped, optimizer)


def _fairscale(work: Workload, *, sharded_ddp: bool) -> Trainer:
    # The modules have no types, and are rarely installed.
    oss = importlib.import_module("fairscale.optim.oss").OSS
    model = work.build()
    if sharded_ddp:
        optimizer = oss(params=model.parameters(), optim=Adam, lr=work.lr, fused=True)
        wrapped = importlib.import_module("fairscale.nn.data_parallel").ShardedDataParallel(model, optimizer)
        # Its own: gradients lie in its buffers, which the optimizer does not know.
        return Trainer(model, wrapped, wrapped.zero_grad, torch.Tensor.backward, optimizer.step)
    wrapped = _wrapped(model)
    optimizer = oss(params=wrapped.parameters(), optim=Adam, lr=work.lr, fused=True)
    return _trainer(model, wrapped, optimizer)


def _fsdp2(work: Workload) -> Trainer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = work.build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*work.units(model), model):
        fully_shard(part, mesh=mesh, reshard_after_forward=False)
    return _trainer(model, model, Adam(model.parameters(), lr=work.lr, fused=True))


def _deepspeed(work: Workload, *, stage: int) -> Trainer:
    # It asks for what its own launcher sets.
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    deepspeed = importlib.import_module("deepspeed")
    model = work.build()
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    optimizer = Adam(model.parameters(), lr=work.lr, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    return Trainer(model, engine, engine.zero_grad, engine.backward, engine.step)


def _ours(
    work: Workload,
    *,
    partition: Literal["whole", "split"],
    register: Callable[..., None] | None,
    overlaps: bool = False,
) -> Trainer:
    model = work.build()
    wrapped = _wrapped(model)
    optimizer = zeroshard.ZeroRedundancyOptimizer(
        wrapped.parameters(),
        Adam,
        parameters_as_bucket_view=True,
        overlap_with_ddp=overlaps,
        partition=partition,
        lr=work.lr,
        fused=True,
    )
    if register is not None:
        register(wrapped, optimizer)
    return _trainer(model, wrapped, optimizer, optimizer.traffic)


def _sharded(work: Workload, *, partition: Literal["whole", "split"]) -> Trainer:
    model = work.build()
    optimizer = zeroshard.ZeroRedundancyOptimizer(
        model.named_parameters(), Adam, partition=partition, lr=work.lr, fused=True
    )
    zeroshard.shard_gradients(model, optimizer)
    return _trainer(model, model, optimizer, optimizer.traffic)


def _step_in_hook(
    wrapped: DistributedDataParallel,
    optimizer: zeroshard.ZeroRedundancyOptimizer,
    *,
    maker: Callable[..., Callable[[Any, GradBucket], Any]],
) -> None:
    wrapped.register_comm_hook(None, maker(allreduce_hook, wrapped, optimizer))


def _wrapped(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def _trainer(
    model: nn.Module,
    forward: Callable[..., torch.Tensor],
    optimizer: Any,  # noqa: ANN401 - those of other packages have no types
    traffic: Traffic | None = None,
) -> Trainer:
    return Trainer(model, forward, optimizer.zero_grad, torch.Tensor.backward, optimizer.step, traffic)


_WAYS: dict[str, tuple[str, Callable[..., None] | None]] = {
    "step": ("step() after DDP's all-reduce", None),
    "owner": ("gradients reduced to their owners, then step()", register_reduce_to_owner),
    "overlap": (
        "stepped in the hook, after all buckets",
        partial(_step_in_hook, maker=hook_with_zero_step),
    ),
    "interleaved": (
        "stepped in the hook of each bucket",
        partial(_step_in_hook, maker=hook_with_zero_step_interleaved),
    ),
}

CONTENDERS: dict[str, Contender] = {
    DDP: Contender("DDP and Adam, nothing sharded", _ddp),
    "torch-zero": Contender("DDP and torch's ZeroRedundancyOptimizer", partial(_torch_zero, views=False)),
    "torch-zero-views": Contender("the same with bucket views", partial(_torch_zero, views=True)),
    "fairscale-oss": Contender("DDP and fairscale's OSS", partial(_fairscale, sharded_ddp=False), needs="fairscale"),
    "fairscale-sddp": Contender(
        "fairscale's ShardedDataParallel and OSS", partial(_fairscale, sharded_ddp=True), needs="fairscale"
    ),
    "fsdp2": Contender("fully_shard, parameters kept from forward to backward", _fsdp2),
    "deepspeed-1": Contender("DeepSpeed, stage 1", partial(_deepspeed, stage=1), needs="deepspeed"),
    "deepspeed-2": Contender("DeepSpeed, stage 2", partial(_deepspeed, stage=2), needs="deepspeed"),
    **{
        f"{way}-{partition}": Contender(
            f"zeroshard, {partition}: {what}",
            partial(_ours, partition=partition, register=register, overlaps=way in ("overlap", "interleaved")),
        )
        for way, (what, register) in _WAYS.items()
        for partition in ("whole", "split")
    },
    **{
        f"sharded-{partition}": Contender(
            f"zeroshard, {partition}: gradients sharded by shard_gradients(), then step()",
            partial(_sharded, partition=partition),
        )
        for partition in ("whole", "split")
    },
}
OURS = tuple(name for name in CONTENDERS if name.split("-")[0] in (*_WAYS, "sharded"))
