"""Training with sharded gradients, and the training in one process to which it is equal."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from support.ddp_training import assert_close
from support.sharded_model import Named, Plain, Rank, in_turn, local_first, twice
from support.training import assert_bitwise_equal, cutting
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_
from zeroshard import GradientSharding, ZeroRedundancyOptimizer, shard_gradients

SMALL_MB = 0.001
"""A bucket_mb with which each model has at least three buckets."""

MAX_NORM = 0.05

ADAM: dict[str, Any] = {"lr": 0.02, "eps": 1e-3}
"""An eps that is larger than the gradients whose terms cancel, in which the order of a sum is seen."""

BACKWARDS: dict[str, tuple[Callable[[Rank], None], bool]] = {
    "twice": (twice, False),
    "local first": (local_first, True),
    "in turn": (in_turn, False),
}
"""The backwards of an iteration of a model that says nothing about them, and whether sums are exact at two ranks."""


def matrices(params: Named) -> tuple[Named, Named]:
    """Return the matrices, and the rest."""
    return [item for item in params if item[1].ndim == 2], [item for item in params if item[1].ndim != 2]


@contextlib.contextmanager
def broadcasting(model: nn.Module, sent: list[list[torch.Tensor]], *, is_source: bool) -> Iterator[None]:
    """Append buffers before each forward to ``sent``, or set buffers to what was appended."""
    values = iter(sent)

    def before(*_: object) -> None:
        if is_source:
            sent.append([buffer.clone() for buffer in model.buffers()])
            return
        for buffer, value in zip(model.buffers(), next(values), strict=True):
            buffer.copy_(value)

    if not list(model.buffers()):
        yield
        return
    handle = model.register_forward_pre_hook(before)
    yield
    handle.remove()


class Training:
    """A model whose gradients are sharded, and its reference in one process, in float64.

    Args:
        kind: the model.
        partition: ``"whole"``, ``"split"`` or ``"level"``; the last has two classes of optimizers, one for matrices.
        backwards: one of `BACKWARDS`, for models with one backward; empty for one.
        clip: ``""``, or who clips: ``"torch"`` or the ``"optimizer"``.
        views: ``parameters_as_bucket_view`` of the optimizer.
        group: the process group.
        arguments: of `shard_gradients`.
    """

    def __init__(
        self,
        kind: type[Plain],
        partition: str = "split",
        *,
        backwards: str = "",
        clip: str = "",
        views: bool = False,
        group: dist.ProcessGroup | None = None,
        **arguments: Any,
    ) -> None:
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.kind, self.number = kind, 0
        self.clip = "optimizer" if clip and not kind.ends_itself else clip
        self.backward, is_exact = kind.backward, kind.is_exact
        if backwards and kind.backward is Plain.backward:
            make, adds_exactly = BACKWARDS[backwards]
            self.backward, is_exact = lambda _, on: make(on), is_exact and adds_exactly
        self.is_exact = is_exact and not clip and self.world <= 2
        torch.manual_seed(3)
        self.model = kind().double()
        self.plain = copy.deepcopy(self.model)
        self.model.begin()
        self.plain.begin()
        if self.rank:
            # The first broadcast undoes it.
            for tensor in [*self.model.parameters(), *self.model.buffers()]:
                tensor.data.add_(1)
        settings: dict[str, Any] = {
            "partition": cutting(partition), "process_group": group, "parameters_as_bucket_view": views
        }  # fmt: skip
        ours, theirs = self._optimized(self.model), self._optimized(self.plain)
        self.references: list[optim.Optimizer] = []
        if partition == "level":
            (whole, rest), (plain_whole, plain_rest) = matrices(ours), matrices(theirs)
            # Muon computes in bfloat16, in which another order of a sum is seen at once.
            second = optim.Muon if self.is_exact else optim.Adafactor
            # Without an eps, Adafactor takes that of the first tensor's dtype for all others.
            given: dict[str, Any] = {"lr": 0.02, "eps": 1e-7 if self.is_exact else (1e-12, 1e-3)}
            groups = [{"params": whole, "optimizer_class": second, **given}]
            if rest:
                groups.insert(0, {"params": rest})
                self.references.append(optim.AdamW(plain_rest, **ADAM))
            self.optimizer = ZeroRedundancyOptimizer(groups, optim.AdamW, **ADAM, **settings)
            self.references.append(second(plain_whole, **given))
        else:
            self.optimizer = ZeroRedundancyOptimizer(ours, optim.AdamW, **ADAM, **settings)
            self.references.append(optim.AdamW(theirs, **ADAM))
        self.sharding: GradientSharding = shard_gradients(self.model, self.optimizer, **arguments)
        self.call, self.plain_call = self.model.called(), self.plain.called()

    def _optimized(self, model: Plain) -> Named:
        return [item for item in model.named_parameters() if item[1].requires_grad or model.optimizes_all]

    @contextlib.contextmanager
    def _silent(self) -> Iterator[None]:
        """Call no_sync(), and see that nothing is sent in the block."""
        before = self.optimizer.traffic.total()
        with self.sharding.no_sync():
            yield
        assert self.optimizer.traffic.total() == before

    def iterate(self) -> None:
        """Make an iteration of both, and compare them."""
        norms = self.iterate_sharded(), self.iterate_plain()
        if self.clip:
            torch.testing.assert_close(norms[0], norms[1], rtol=self.kind.bound, atol=0.0)
        self.check(f"after iteration {self.number}")
        self.number += 1

    def on_this_rank(self) -> Rank:
        """Return the next iteration of this rank."""
        return Rank(self.model, self.call, self.rank, self.number, self._silent)

    def _run(self, model: Plain, on: Rank) -> None:
        model.rank, model.number = on.rank, on.number
        self.backward(model, on)

    def iterate_sharded(self) -> torch.Tensor | None:
        self.model.prepare(self.number, lambda params: self.optimizer.add_param_group({"params": params, "lr": 0.01}))
        self._run(self.model, self.on_this_rank())
        norm = None
        if self.clip == "torch":
            norm = clip_grad_norm_(self.model.parameters(), MAX_NORM)
        elif self.clip == "optimizer":
            norm = self.optimizer.clip_grad_norm_(MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self.kind.zeroes)
        return norm

    def iterate_plain(self) -> torch.Tensor | None:
        """Compute the gradients of each rank, and make a step with their mean."""
        model = self.plain
        model.prepare(self.number, lambda params: self.references[0].add_param_group({"params": params, "lr": 0.01}))
        params = list(model.parameters())
        before = [None if param.grad is None else param.grad.clone() for param in params]
        buffers = [value.clone() for value in model.buffers()]
        of_rank_0 = buffers
        grads: list[list[torch.Tensor | None]] = []
        broadcast: list[list[torch.Tensor]] = []
        for rank in range(self.world):
            self._set_buffers(buffers)
            for param in params:
                param.grad = None
            with broadcasting(model, broadcast, is_source=rank == 0):
                self._run(model, Rank(model, self.plain_call, rank, self.number))
            grads.append([param.grad for param in params])
            if rank == 0:
                of_rank_0 = [value.clone() for value in model.buffers()]
        self._set_buffers(of_rank_0)
        for param, start, *of_ranks in zip(params, before, *grads, strict=True):
            found = [grad / self.world for grad in of_ranks if grad is not None]
            param.grad = sum(found[1:], found[0]) if found else start
        norm = clip_grad_norm_(params, MAX_NORM) if self.clip else None
        for optimizer in self.references:
            optimizer.step()
        for param in params:
            param.grad = torch.zeros_like(param) if self.kind.zeroes and param.grad is not None else None
        return norm

    def _set_buffers(self, values: list[torch.Tensor]) -> None:
        for buffer, value in zip(self.plain.buffers(), values, strict=True):
            buffer.copy_(value)

    def check(self, when: str) -> None:
        """Compare all parameters, and on rank 0 the buffers."""
        when = f"{when} of {self.kind.__name__}"
        if self.is_exact:
            assert_bitwise_equal(self.model, self.plain, when)
        else:
            assert_close(self.model, self.plain, self.kind.bound, when)
        if self.rank == 0:
            for ours, theirs in zip(self.model.buffers(), self.plain.buffers(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
