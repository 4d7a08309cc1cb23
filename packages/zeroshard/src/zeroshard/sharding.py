"""Shards the gradients of a plain module over the ranks (ZeRO stage 2), in place of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zeroshard._torch_private import is_ignored_by_ddp
from zeroshard.grads.model_hooks import ModelHooks
from zeroshard.grads.placeholder import GradPlaceholder
from zeroshard.grads.sharded import ShardedGradients
from zeroshard.optimizer import ZeroRedundancyOptimizer
from zeroshard.sharding_join import ShardingJoin


class GradientSharding:
    """Controls the sharded gradients of one model; :func:`shard_gradients` makes it. Training goes on if you drop it.

    ``.grad`` of a parameter is a :class:`GradPlaceholder` after backward, see there.
    """

    def __init__(self, optimizer: ZeroRedundancyOptimizer, source: ShardedGradients, hooks: ModelHooks) -> None:
        self._optimizer, self._source, self._hooks = optimizer, source, hooks

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank, unreduced, in backwards in the block. A rank then has all gradients.

        The next backward outside of the block reduces the sums. A backward outside of any block reduces its gradients
        at once, and adds them to what is there: that takes 1/N of the memory, and more communication.
        """
        before, self._source.accumulates = self._source.accumulates, True
        try:
            yield
        finally:
            self._source.accumulates = before

    @contextmanager
    def join(
        self, *, divide_by_initial_world_size: bool = True, throw_on_early_termination: bool = False
    ) -> Iterator[None]:
        """Train on as many batches as each rank has, in the block. Collective.

        A rank that leaves its loop sends gradients of zero, and takes part in norms, clipping and steps, until all
        ranks have. Every backward, step and clip, and every forward that broadcasts buffers, takes two small exchanges.
        At the end all ranks have the parameters and buffers of the last one.

        Args:
            divide_by_initial_world_size: whether gradients are averaged over all ranks, or over those that still have
                data.
            throw_on_early_termination: raise an error on every rank as soon as one has run out of data.

        Raises:
            DisagreementError: if ranks that still have data make different calls; on every rank.
            PeerLostError: if a rank is gone.
            RuntimeError: if a rank leaves with gradients that no backward has reduced; the optimizer is in another
                block; or a rank has run out of data, and ``throw_on_early_termination`` is set, or another calls what
                needs all ranks, such as ``load_state_dict()``.
            Exception: an error of another rank in the block.
        """
        engine = self._optimizer._engine
        joined = ShardingJoin(engine.coordinator, self._source, self._hooks, engine.join)
        with joined.block(divides_by_running=not divide_by_initial_world_size, throws=throw_on_early_termination):
            yield

    def remove(self) -> None:
        """Remove all hooks from the model, and its reduced gradients. Call it on every rank; it sends nothing.

        Raises:
            RuntimeError: if gradients wait for a step, which are dropped, or an exception has left the last backward.
                The hooks are removed all the same.
        """
        try:
            self._source.close_interrupted()
            if waiting := self._source.table.waiting():
                raise RuntimeError(
                    f"the gradient of {waiting} waits for step(), and remove() has dropped it: call step() or "
                    f"zero_grad() before remove()"
                )
        finally:
            self._hooks.remove()
            for param in self._source.params:
                if isinstance(param.grad, GradPlaceholder):
                    param.grad = None
            self._source.release()
            self._optimizer._engine.drop_source(self._source)


def shard_gradients(
    model: nn.Module,
    optimizer: ZeroRedundancyOptimizer,
    *,
    bucket_mb: float = 25,
    broadcast_buffers: bool = True,
    norms: bool = True,
) -> GradientSharding:
    """Reduce gradients to their owners during backward, and keep this rank's parts alone (ZeRO stage 2). Collective.

    This takes the place of ``DistributedDataParallel(model)``: gradients are averaged over the ranks of the optimizer's
    process group, and the model itself stays what it is. A rank keeps 1/N of all gradients, and two buckets while
    backward runs. As with DistributedDataParallel, rank 0's parameters and buffers are sent to all ranks now, and its
    buffers before each forward with gradients.

    Several backwards before a step add up. Every rank makes the same number of backwards outside of
    :meth:`GradientSharding.no_sync`, and each of them computes a gradient of at least one parameter.

    Args:
        model: the module to call, on its device and in its dtype. Not in DistributedDataParallel or ``fully_shard``.
        optimizer: the optimizer of all parameters that are trained.
        bucket_mb: the size of a bucket in MiB. A larger parameter is a bucket of its own.
        broadcast_buffers: whether rank 0 sends its buffers before each forward with gradients.
        norms: whether ranks exchange the 2-norm of each gradient at the end of each backward, as for
            ``zeroshard_integrations.ddp.register_reduce_to_owner``.

    Returns:
        A handle with ``no_sync()``, ``join()`` and ``remove()``. You may drop it: the optimizer keeps what works.

    Raises:
        TypeError: if the model is no module or the optimizer is not sharded.
        ValueError: if the model is in DistributedDataParallel, if the model and the optimizer do not have the same
            trained parameters, if the optimizer steps during backward or shards gradients already, or if a parameter is
            complex or has sparse gradients.
        DisagreementError: if ranks differ in names, shapes or settings.
        PeerLostError: if a rank is gone.

    Example:
        >>> import os, tempfile, torch
        >>> import torch.distributed as dist
        >>> from zeroshard import ZeroRedundancyOptimizer, shard_gradients
        >>> store = dist.FileStore(tempfile.mkstemp()[1], 1)
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> model = torch.nn.Linear(4, 4)
        >>> optimizer = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-3)
        >>> sharding = shard_gradients(model, optimizer)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> dist.destroy_process_group()
    """
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        raise TypeError(f"shard_gradients() takes a zeroshard.ZeroRedundancyOptimizer, and not a {type(optimizer)}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard_gradients() takes a torch.nn.Module, and not a {type(model)}")
    engine = optimizer._engine
    names: dict[torch.Tensor, str] = {param: name for name, param in model.named_parameters()}

    def prepare() -> tuple[Sequence[int], Mapping[str, object]]:
        _check(model, names, optimizer)
        index_of = {param: index for index, param in enumerate(engine.local.params)}
        fixed = [(name, param) for param, name in names.items() if param not in index_of] + [*model.named_buffers()]
        texts = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in fixed]
        settings = {"broadcast_buffers": bool(broadcast_buffers), "frozen parameters and buffers": ", ".join(texts)}
        return [index_of[param] for param in reversed(names) if param in index_of], settings

    with engine.collective():
        source = engine.shard(names, prepare, bucket_mb=bucket_mb, norms=norms)
        ranks, guard = engine.coordinator.ranks, engine.guard
        hooks = ModelHooks(model, source, ranks, guard, broadcast_buffers=broadcast_buffers)
    source.model_hooks = hooks
    return GradientSharding(optimizer, source, hooks)


def _check(model: nn.Module, names: Mapping[torch.Tensor, str], optimizer: ZeroRedundancyOptimizer) -> None:
    """Raise a ValueError if the gradients of a model cannot be sharded for an optimizer."""
    engine = optimizer._engine
    if isinstance(model, DistributedDataParallel):
        raise ValueError("shard_gradients() takes the place of DistributedDataParallel: pass the module itself")
    if optimizer._overlap_with_ddp:
        raise ValueError(
            "the optimizer was built with overlap_with_ddp=True, to be stepped by a communication hook: build it "
            "without that"
        )
    if engine.exchange is not None:
        raise ValueError("gradients of this optimizer are reduced already, by a hook or an earlier shard_gradients()")
    own = {*engine.local.params}
    for param, name in names.items():
        if param.requires_grad and param not in own:
            raise ValueError(
                f"the optimizer does not have {name!r}, which is trained: give it all parameters, or freeze those that "
                f"are not to be trained; give experts, one per rank, a model and an optimizer of their own"
            )
        if param.is_complex():
            raise ValueError(f"{name!r} is complex, and its gradient cannot be sharded: use real parameters")
        if getattr(param, "grad_dtype", None) not in (None, param.dtype):
            raise ValueError(f"{name!r} is {param.dtype}, but its `grad_dtype` is not: its gradient cannot be sharded")
        if is_ignored_by_ddp(param):
            raise ValueError(
                f"{name!r} is ignored by DistributedDataParallel, but every rank would get rank 0's values of it here: "
                f"give experts a model and an optimizer of their own"
            )
    for index, tensor in enumerate(engine.local.params):
        if tensor not in names:
            raise ValueError(
                f"the model does not have {engine.layouts.layout.plan.tensors[index].name!r}, which the optimizer has: "
                f"pass the model that has all of its parameters"
            )
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided or 0 in buffer.stride():
            raise ValueError(f"the buffer {name!r} is sparse or expanded, and cannot be broadcast: use a dense copy")
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise ValueError(f"{name!r} has sparse gradients, which cannot be sharded: use sparse=False")
