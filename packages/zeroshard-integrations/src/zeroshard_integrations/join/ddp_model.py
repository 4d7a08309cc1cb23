"""Follows the DDP model of a Join context on a rank with data, and shadows its calls on a rank without data.

A rank without data takes part in each backward: it reduces buckets of zeros while the others reduce their gradients.
If they add to reduced gradients and average over all ranks, its buckets hold these reduced gradients instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # not an explicit export
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from zeroshard.join import receive_value, send_value
from zeroshard_comm import Coordinator, agreed
from zeroshard_core import is_dense

from zeroshard_integrations import _torch_private
from zeroshard_integrations.ddp import call_after_ddp


class DDPModel:
    """Follows one model on one rank. Only the context uses it.

    It calls ``begin_backward`` before the first gradient of a backward that reduces; the result is the number of ranks
    that still have data, by which gradients are divided if ``divides_by_running`` is set.
    """

    def __init__(
        self, ddp: DistributedDataParallel, begin_backward: Callable[[DDPModel], int], *, divides_by_running: bool
    ) -> None:
        self._ddp, self._begin_backward, self._divides_by_running = ddp, begin_backward, divides_by_running
        self.in_backward = self._reduces = self._has_run = False
        # Gradients from before the block may not have been reduced.
        self._has_unreduced = any(param.grad is not None for param in ddp.module.parameters())
        self._trained: list[nn.Parameter] = []
        self._handle: RemovableHandle | None = None
        self._watch_parameters()

    def detach(self) -> None:
        """Remove everything that the context has added to the model."""
        if self._handle is not None:
            self._handle.remove()
        if self._divides_by_running:
            _torch_private.divide_by(self._ddp, None)

    def exchange_gradients(self, coordinator: Coordinator, running: Sequence[int], joined: Sequence[int]) -> None:
        """Send ranks without data the gradients to which a backward adds, or the final gradients. Collective."""
        params, rank = list(self._ddp.module.parameters()), coordinator.ranks.rank
        with agreed(coordinator, "a backward inside Join"):
            if rank in running:
                self._check_reduced()
        if rank in joined:
            for param, grad in zip(params, receive_value(coordinator, running[0]), strict=True):
                param.grad = None if grad is None else grad.to(param.device)
        elif rank == running[0]:
            grads = [None if param.grad is None else param.grad.detach() for param in params]
            for peer in joined:
                send_value(coordinator, peer, grads)

    def check_forward(self) -> None:
        """Raise a RuntimeError if the backward of the forward that begins now will not reduce gradients."""
        if torch.is_grad_enabled() and not self._ddp.require_backward_grad_sync:
            raise RuntimeError(
                "no_sync() is not supported inside Join: let every backward reduce, which adds up to the same "
                "gradients, or accumulate outside of the block"
            )

    def begin_forward(self) -> None:
        """Prepare for the backward of the forward that begins now."""
        self._watch_parameters()
        self.in_backward, self._reduces = False, True

    def _watch_parameters(self) -> None:
        """Watch the parameters that are trainable now and that DDP does not ignore."""
        named, ignored = self._ddp.module.named_parameters(), self._ddp.parameters_to_ignore
        trained = [param for name, param in named if param.requires_grad and name not in ignored]
        if [*map(id, trained)] == [*map(id, self._trained)]:
            return
        if self._handle is not None:
            self._handle.remove()
        self._trained = trained
        self._handle = register_multi_grad_hook(trained, self._first_gradient, mode="any") if trained else None

    def _first_gradient(self, _: torch.Tensor) -> None:
        # Reentrant checkpoints run backwards inside of it, and `torch.autograd.grad` calls hooks of parameters, too.
        if self.in_backward or not any(map(_is_added_to, self._trained)):
            return
        self._has_run = self.in_backward = True
        call_after_ddp(self._end_backward)
        # DDP reduces one backward for all forwards before it.
        reduces, self._reduces = self._reduces, False
        if reduces:
            running = self._begin_backward(self)
            if self._divides_by_running:
                _torch_private.divide_by(self._ddp, running)
        self._has_unreduced = not reduces

    def _end_backward(self) -> None:
        self.in_backward = False

    def _check_reduced(self) -> None:
        grads = [param.grad for param in self._ddp.module.parameters() if param.grad is not None]
        if self._has_unreduced and not all(map(_is_zero, grads)):
            raise RuntimeError(
                "a rank has run out of data, but another has gradients that no backward inside Join has reduced, so "
                "the gradients of the first one are unknown: call zero_grad() before the block, and backward() once "
                "for each forward"
            )

    def shadow_error(self) -> ValueError | None:
        """Return an error if this rank cannot shadow calls, because DDP has not seen enough of the model; else None."""
        ddp, found = self._ddp, ""
        has_rebuilt = _torch_private.has_rebuilt_buckets(ddp)
        if ddp.static_graph and not has_rebuilt and not self._has_run:
            found = "needs one batch to record a static graph: give every rank a batch, or leave static_graph out"
        if self._reduces and not has_rebuilt and not ddp.find_unused_parameters:
            found = "waits for the backward of its first forward: leave the loop before both, or after the backward"
        tables = [item for item in ddp.module.named_modules() if isinstance(item[1], (nn.Embedding, nn.EmbeddingBag))]
        sparse = [f"{name}.weight".lstrip(".") for name, table in tables if table.sparse and table.weight.requires_grad]
        if sparse and not ((has_rebuilt or ddp.find_unused_parameters) and _has_buckets(ddp)):
            found = f"needs two batches to record the sparse gradients of {sparse[0]!r}: give every rank two"
        return ValueError(f"this rank has run out of data, and DistributedDataParallel {found}") if found else None

    def shadow_forward(self, *, with_grad: bool) -> None:
        """Make a forward of the other ranks, without data. Collective."""
        _torch_private.prepare_forward(self._ddp, with_grad=with_grad)
        self._ddp.require_forward_param_sync = with_grad

    def shadow_backward(self) -> None:
        """Reduce gradients as in a backward of the other ranks, and drop this rank's ``.grad``. Collective."""
        ddp = self._ddp
        buckets = _torch_private.buckets_of_zeros(ddp.reducer)
        # Reduced gradients are equal on all ranks, so their mean over all ranks, and only that, is unchanged.
        for bucket in [] if self._divides_by_running else buckets:
            _fill_bucket(bucket, ddp.process_group.size())
        works = [_torch_private.run_comm_hook(ddp.reducer, bucket) for bucket in buckets]
        if ddp.find_unused_parameters:
            # A parameter that no rank uses keeps its gradient.
            counts = _torch_private.local_used_map(ddp.reducer).zero_()
            works.append(dist.all_reduce(counts, group=ddp.process_group, async_op=True))
        for work in works:
            work.wait()
        ddp.zero_grad()
        _torch_private.push_all_rebuilt_params(ddp.reducer)


def _is_zero(grad: torch.Tensor) -> bool:
    values = grad if grad.layout is torch.strided else grad.coalesce().values()
    return not bool(values.any())


def _is_added_to(param: torch.Tensor) -> bool:
    """Return True if autograd is about to add to the gradient of a parameter."""
    try:
        return _torch_private.will_execute(get_gradient_edge(param).node)
    except RuntimeError:
        # It raises for a parameter with respect to which `torch.autograd.grad` differentiates.
        return False


def _has_buckets(ddp: DistributedDataParallel) -> bool:
    """Return True if DDP can make buckets of zeros, which it cannot before the first sparse gradients."""
    try:
        return bool(_torch_private.buckets_of_zeros(ddp.reducer))
    except RuntimeError:
        return False


def _fill_bucket(bucket: GradBucket, share: int) -> None:
    """Copy gradients, divided by ``share``, into a bucket of zeros."""
    buffer, params = bucket.buffer(), bucket.parameters()
    if buffer.layout is not torch.strided:
        if params[0].grad is not None:
            bucket.set_buffer(params[0].grad / share)
        return
    for param, view in zip(params, bucket.gradients(), strict=True):
        if param.grad is not None:
            stride = param.stride() if is_dense(param) else view.stride()
            place = buffer.as_strided(param.shape, stride, int(view.storage_offset()))
            torch.div(param.grad, share, out=place)
