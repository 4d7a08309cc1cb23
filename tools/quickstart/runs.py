"""One model and its optimizers as a rank trains them, and what can be measured of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from byte_gpt import ByteGPT, Shape
from choices import assignment_of, groups_of, plain_optimizers
from job import Job
from torch.nn.parallel import DistributedDataParallel
from zeroshard import Planner, ZeroRedundancyOptimizer, split_state_dict
from zeroshard_integrations.ddp import register_reduce_to_owner


@dataclass(frozen=True, slots=True)
class Iteration:
    """One step: the loss of this rank (nats per byte), and seconds in all and in ``optimizer.step()``."""

    loss: torch.Tensor
    seconds: float
    update_seconds: float


class Run:
    """A model under DDP and its optimizers; only :meth:`iterate` and :meth:`load` change them.

    Args:
        job: what to build.
        sharded: whether the optimizer's state is sharded.
    """

    def __init__(self, job: Job, *, sharded: bool) -> None:
        self.model = ByteGPT(Shape(context=job.context), job.seed)
        groups = groups_of(self.model, job.optimizer, job.lr)
        self._assignment = assignment_of(groups)
        self.zero: ZeroRedundancyOptimizer | None = None
        self.optimizers: list[torch.optim.Optimizer]
        partition: Any = job.partition if sharded else "whole"
        kinds = [
            {"params": group.params, "optimizer_class": group.optimizer_class, "optimizer_defaults": group.arguments}
            for group in groups
        ]
        planner = Planner(kinds, groups[-1].optimizer_class)
        self._predicted = planner.predict(dist.get_world_size(), partition, reduces_to_owner=sharded)
        if sharded:
            self.zero = ZeroRedundancyOptimizer(
                kinds,
                groups[-1].optimizer_class,
                parameters_as_bucket_view=job.bucket_views,
                partition=partition,
            )
            self.optimizers = [self.zero]
        else:
            self.optimizers = plain_optimizers(groups)
        self._ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        if self.zero is not None:
            register_reduce_to_owner(self._ddp, self.zero)

    def iterate(self, inputs: torch.Tensor, targets: torch.Tensor) -> Iteration:
        """Train one step on this rank's share of the batch. Collective."""
        # Ranks start together, so that no run is charged for what a rank did before it.
        dist.barrier()
        started = time.perf_counter()
        self.model.zero_grad()
        loss = self._ddp(inputs, targets)
        loss.backward()
        updating = time.perf_counter()
        for optimizer in self.optimizers:
            optimizer.step()
        ended = time.perf_counter()
        return Iteration(loss.detach(), ended - started, ended - updating)

    def flat(self) -> torch.Tensor:
        """Return a copy of all parameters, 1-D."""
        return torch.cat([param.detach().reshape(-1) for param in self.model.parameters()])

    def state_bytes(self) -> int:
        """Return the bytes of optimizer state that this rank holds."""
        return sum(
            value.numel() * value.element_size()
            for optimizer in (self.optimizers if self.zero is None else self.zero.local_optimizers)
            for entries in optimizer.state.values()
            for value in entries.values()
            if isinstance(value, torch.Tensor)
        )

    def bytes_sent(self) -> int:
        """Return the bytes of gradients and parameters that the optimizer of this rank has sent so far."""
        if self.zero is None:
            return 0
        return sum(self.zero.traffic.of(kind).bytes_sent for kind in ("reduce", "broadcast"))

    def predicted_bytes(self) -> int:
        """Return the bytes that this rank is predicted to send per step; unsharded, by a ring all-reduce alone."""
        rank = dist.get_rank()
        return self._predicted.sent_in_backward[rank] + (self._predicted.sent_in_step[rank] if self.zero else 0)

    def predicted_state_bytes(self) -> int:
        """Return the bytes of optimizer state that this rank is predicted to hold."""
        return self._predicted.ranks[dist.get_rank()].state

    def save(self, file: str) -> None:
        """Save the model and the consolidated state of all its param groups from rank 0. Collective."""
        assert self.zero is not None
        self.zero.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            torch.save({"model": self.model.state_dict(), "optimizer": self.zero.state_dict()}, file)
        dist.barrier()

    def load(self, file: str) -> None:
        """Take over model and optimizer state from a file of :meth:`save`. Collective."""
        found = torch.load(file, map_location="cpu", weights_only=True)
        self.model.load_state_dict(found["model"])
        if self.zero is not None:
            self.zero.load_state_dict(found["optimizer"])
            return
        for optimizer, part in zip(
            self.optimizers, split_state_dict(found["optimizer"], self._assignment), strict=True
        ):
            optimizer.load_state_dict(part)


def global_mean(loss: torch.Tensor) -> float:
    """Average a loss over all ranks. Collective."""
    mean = loss.clone()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def largest_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest absolute difference of two tensors; NaN if either holds one."""
    return float((ours - theirs).abs().max())
