"""A model in DistributedDataParallel inside a Join context, on a rank with data and on one without.

The backward of a rank without data is DDP's own: buckets of zeros, reduced as the others reduce theirs; or of gradients
that were reduced before, to which the others add.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch exports it unseen
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from zeroshard import GradExchange, GradPlaceholder
from zeroshard_core import is_dense

from zeroshard_integrations import _torch_private
from zeroshard_integrations.ddp import _set_in_forward, optimizers_of_hooks


class DDPModel:
    """One model of a context, on one rank; only the context uses it.

    Attributes:
        takes_buckets: whether a communication hook hands gradients to an optimizer; only their owners have them.
        divides_by_running: whether DDP averages gradients over the ranks that still have data.
        begins: called with the model before the first gradient of a backward that reduces; set by the context.
        in_backward: whether a backward has begun on this rank that has not come to its end.
        watches_all: whether to follow, from the next forward on, when all gradients of a backward are there.
        has_all: whether they are.
        in_window: whether backwards under ``no_sync()`` have come that none has reduced.
        is_known: whether the gradients are the same on every rank, or in a window, were zero at its begin.
    """

    begins: Callable[[DDPModel], None]

    def __init__(self, ddp: DistributedDataParallel, *, takes_buckets: bool, divides_by_running: bool) -> None:
        self.ddp, self.takes_buckets, self.divides_by_running = ddp, takes_buckets, divides_by_running
        self.in_backward, self.has_all, self.watches_all, self.in_window = False, True, False, False
        self._reduces = self._has_run = False
        self._watched: tuple[bool, list[int]] = False, []
        self._trained: list[torch.Tensor] = []
        self._handles: list[RemovableHandle] = []
        self._watch()
        # Those from before the block may not have been reduced.
        self.is_known = not self._grads()
        self._works: list[Any] = []

    def leave(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()
        if self.divides_by_running:
            _torch_private.divide_by(self.ddp, None)

    def forward(self, *, reduces: bool) -> None:
        """Take note of a forward with gradients; ``reduces`` tells whether its backward reduces them."""
        self._watch()
        self.in_backward = False
        # What a forward has prepared stays so until a backward has reduced.
        self._reduces = self._reduces or reduces

    def _watch(self) -> None:
        """Watch the parameters that are trained now, and that DDP was not told to ignore."""
        named, ignored = self.ddp.module.named_parameters(), self.ddp.parameters_to_ignore
        trained = [param for name, param in named if param.requires_grad and name not in ignored]
        known = (self.watches_all, [*map(id, trained)])
        if known == self._watched:
            return
        self._watched = known
        for handle in self._handles:
            handle.remove()
        self._trained, self._handles = trained, []
        if trained:
            self._handles.append(register_multi_grad_hook(trained, self._first_gradient, mode="any"))
        if trained and self.watches_all:
            self._handles.append(register_multi_grad_hook(trained, self._last_gradient, mode="all"))

    def _first_gradient(self, _: torch.Tensor) -> None:
        # Reentrant checkpoints run backwards inside of it, and `torch.autograd.grad` calls hooks of parameters, too.
        if self.in_backward or not any(map(_is_added_to, self._trained)):
            return
        self._has_run = self.in_backward = True
        # After DDP's own callbacks, and the callbacks of communication hooks, which follow them.
        queue = _torch_private.queue_callback
        queue(lambda: queue(lambda: queue(self._ends)))
        if not self._reduces:
            self.look(is_local=True)
            return
        self._reduces, self.has_all = False, False
        self.begins(self)
        self.is_known, self.in_window = True, False

    def _last_gradient(self, _: Sequence[torch.Tensor | None]) -> None:
        self.has_all = True

    def _ends(self) -> None:
        self.in_backward, self.has_all = False, True

    def look(self, *, is_local: bool) -> None:
        """Find out to which gradients a backward adds, one under ``no_sync()`` if ``is_local``."""
        if self.in_window and self.is_known:
            return
        accumulators = [exchange.gradients for exchange in self._followers]
        if any(each.is_replaced(param) for each in accumulators for param in self.ddp.module.parameters()):
            # DDP has just rebuilt its buckets, and each owner has put its own parts into them.
            self.is_known = False
        elif is_local or not self.is_known:
            self.is_known = all(map(self._is_zero, self._grads()))
        self.in_window = is_local

    def _grads(self) -> list[torch.Tensor]:
        return [param.grad for param in self.ddp.module.parameters() if param.grad is not None]

    def _is_zero(self, grad: torch.Tensor) -> bool:
        if isinstance(grad, GradPlaceholder):
            return grad.is_zero()
        values = grad if grad.layout is torch.strided else grad.coalesce().values()
        return not bool(values.any())

    @property
    def _followers(self) -> list[GradExchange]:
        optimizers = optimizers_of_hooks(self.ddp)
        return [optimizer.exchange for optimizer in optimizers if optimizer.exchange is not None]

    def error(self) -> Exception | None:
        """Return why this rank cannot take part, if it cannot: in a window, or DDP has not seen enough of the model."""
        ddp, found = self.ddp, ""
        if self.in_window and not all(map(self._is_zero, self._grads())):
            return ValueError(
                "this rank has run out of data in a window of no_sync(), and others go on: a window must end with a "
                "backward that reduces, on every rank; give every rank whole windows, or zero_grad() the rest"
            )
        if ddp.static_graph and not _torch_private.has_rebuilt_buckets(ddp) and not self._has_run:
            found = "learns a static_graph in the first batch: give every rank one, or leave static_graph out"
        if self._reduces and not _torch_private.has_rebuilt_buckets(ddp) and not ddp.find_unused_parameters:
            found = "waits for the backward of its first forward: leave the loop before that, or after the backward"
        tables = [item for item in ddp.module.named_modules() if isinstance(item[1], (nn.Embedding, nn.EmbeddingBag))]
        sparse = [f"{name}.weight".lstrip(".") for name, table in tables if table.sparse and table.weight.requires_grad]
        try:
            buckets = _torch_private.buckets_of_zeros(ddp.reducer) if sparse else []
        except RuntimeError:
            buckets = []
        if sparse and not (buckets and (_torch_private.has_rebuilt_buckets(ddp) or ddp.find_unused_parameters)):
            found = f"learns in two batches of the sparse gradients of {sparse[0]!r}: give every rank two"
        return ValueError(f"this rank has run out of data, and DistributedDataParallel {found}") if found else None

    def gradients_to_send(self) -> list[Any]:
        """Return the gradients for ranks without data, or whether they exist, if only their owners have them."""
        tell: Callable[[torch.Tensor], Any] = (lambda g: not self._is_zero(g)) if self.takes_buckets else torch.detach
        return [None if param.grad is None else tell(param.grad) for param in self.ddp.module.parameters()]

    def set_gradients(self, values: Sequence[Any]) -> None:
        """Take :meth:`gradients_to_send` of a rank that has data."""
        for param, value in zip(self.ddp.module.parameters(), values, strict=True):
            if value is None or not self.takes_buckets:
                param.grad = None if value is None else value.to(param.device)
            elif not value and param.grad is not None:
                param.grad.zero_()

    def shadow_forward(self, *, reduces: bool, with_grad: bool) -> None:
        """Do what DDP does in a forward, without data. Collective."""
        _set_in_forward(self._followers, self.ddp)
        _torch_private.prepare_forward(self.ddp, with_grad=with_grad)
        _set_in_forward(self._followers, None)
        self.ddp.require_forward_param_sync = reduces

    def shadow_backward(self) -> None:
        """Begin to take part in a reduction of gradients, with what is in ``.grad``. Collective."""
        ddp = self.ddp
        # With a communication hook, it is the hook that divides.
        share = 1 if _torch_private.has_comm_hook(ddp) else ddp.process_group.size()
        buckets = _torch_private.buckets_of_zeros(ddp.reducer)
        # What was reduced is the same on all ranks, and adds up to itself only where all count.
        holds = not self.takes_buckets and (_torch_private.has_comm_hook(ddp) or not self.divides_by_running)
        for bucket in buckets if holds else ():
            _fill(bucket, share)
        self._works = [_torch_private.run_comm_hook(ddp.reducer, bucket) for bucket in buckets]
        if ddp.find_unused_parameters:
            # What nobody uses keeps the gradient that it has.
            counts = _torch_private.local_used_map(ddp.reducer).zero_()
            self._works.append(dist.all_reduce(counts, group=ddp.process_group, async_op=True))
        if not self.takes_buckets:
            ddp.zero_grad()
        _torch_private.push_all_rebuilt_params(ddp.reducer)

    def end_backward(self) -> None:
        """Wait for the reduction that :meth:`shadow_backward` began; a no-op if there is none."""
        while self._works:
            self._works.pop(0).wait()


def _is_added_to(param: torch.Tensor) -> bool:
    """Whether autograd is about to add to the gradient of a parameter."""
    try:
        return _torch_private.will_execute(get_gradient_edge(param).node)
    except RuntimeError:
        # Not for a parameter to which `torch.autograd.grad` differentiates.
        return False


def _fill(bucket: GradBucket, share: int) -> None:
    """Put gradients into a bucket of zeros, divided by ``share``."""
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
