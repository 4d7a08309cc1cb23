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
    """Controls the sharded gradients of one model; :func:`shard_gradients` returns it. You need not keep it.

    After backward, ``.grad`` of a parameter is a :class:`GradPlaceholder`.
    """

    def __init__(self, optimizer: ZeroRedundancyOptimizer, source: ShardedGradients, hooks: ModelHooks) -> None:
        self._optimizer, self._source, self._hooks = optimizer, source, hooks

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank in the block, without reducing them. Each rank then holds all gradients.

        The next backward outside of the block reduces the sums. Without this block, each backward reduces its gradients
        and adds them to the parts that this rank holds, which takes 1/N of the memory but more communication.
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
        """Let ranks train on different numbers of batches in the block. Collective.

        A rank that has left its loop sends zero gradients, and takes part in norms, clipping and steps, until all ranks
        have left theirs. Each backward, step and clip, and each forward that broadcasts buffers, adds two small
        exchanges. At the end all ranks have the parameters and buffers of the rank that left last.

        Args:
            divide_by_initial_world_size: if True, average gradients over all ranks; if False, over the ranks that still
                have data.
            throw_on_early_termination: raise an error on every rank as soon as one rank has run out of data.

        Raises:
            DisagreementError: if ranks that still have data make different calls; on every rank.
            PeerLostError: if a rank is gone.
            RuntimeError: if a rank leaves its loop with gradients that no backward has reduced; if the optimizer is in
                another block; or if a rank has run out of data, and ``throw_on_early_termination`` is True or another
                rank calls a method that needs all ranks, such as ``load_state_dict()``.
            Exception: an error of another rank in the block.
        """
        engine = self._optimizer._engine
        joined = ShardingJoin(engine.coordinator, self._source, self._hooks, engine.join)
        with joined.block(divides_by_running=not divide_by_initial_world_size, throws=throw_on_early_termination):
            yield

    def remove(self) -> None:
        """Remove all hooks and reduced gradients from the model. Call it on every rank; it does not communicate.

        Raises:
            RuntimeError: if it has dropped gradients that waited for a step, or if an exception interrupted the last
                backward. The hooks are removed in both cases.
        """
        try:
            self._source.close_interrupted()
            if waiting := self._source.table.waiting():
                raise RuntimeError(
                    f"the gradient of {waiting} waited for step(), and remove() has dropped it: call step() or "
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
    """Reduce gradients to their owners during backward, and keep only this rank's parts (ZeRO stage 2). Collective.

    Use this in place of ``DistributedDataParallel(model)``. It averages gradients over the ranks of the optimizer's
    process group, and does not wrap the model. A rank keeps 1/N of all gradients, and two buckets while backward runs.
    Like DistributedDataParallel, it broadcasts rank 0's parameters and buffers now, and rank 0's buffers before each
    forward with gradients enabled.

    Several backwards before a step add up. Every rank must make the same number of backwards outside of
    :meth:`GradientSharding.no_sync`, and each of them must compute a gradient of at least one parameter.

    Args:
        model: the module to call, on its device and in its dtype, without DistributedDataParallel or ``fully_shard``.
        optimizer: the optimizer of all trainable parameters of the model.
        bucket_mb: the size of a bucket in MiB. A parameter of at least half that size gets its own bucket.
        broadcast_buffers: whether rank 0 broadcasts its buffers before each forward with gradients enabled.
        norms: whether ranks exchange the 2-norm of each gradient at the end of each backward, as for
            ``zeroshard_integrations.ddp.register_reduce_to_owner``.

    Returns:
        A handle with ``no_sync()``, ``join()`` and ``remove()``. You need not keep it; the optimizer keeps the hooks.

    Raises:
        TypeError: if the model is not a module or the optimizer is not sharded.
        ValueError: if the model is in DistributedDataParallel, if the model and the optimizer do not have the same
            trainable parameters, if the optimizer steps during backward or already shards gradients, or if a parameter
            is complex or has sparse gradients.
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
        raise TypeError(f"shard_gradients() expects a zeroshard.ZeroRedundancyOptimizer, but got {type(optimizer)}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard_gradients() expects a torch.nn.Module, but got {type(model)}")
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
            "the optimizer was built with overlap_with_ddp=True, so a communication hook must step it: build it "
            "without overlap_with_ddp"
        )
    if engine.exchange is not None:
        raise ValueError("gradients of this optimizer are reduced already, by a hook or an earlier shard_gradients()")
    own = {*engine.local.params}
    for param, name in names.items():
        if param.requires_grad and param not in own:
            raise ValueError(
                f"the optimizer does not have {name!r}, which is trainable: pass all trainable parameters to the "
                f"optimizer, or freeze the others; experts (one per rank) need their own model and optimizer"
            )
        if param.is_complex():
            raise ValueError(f"{name!r} is complex, so its gradient cannot be sharded: use real parameters")
        if getattr(param, "grad_dtype", None) not in (None, param.dtype):
            raise ValueError(f"{name!r} is {param.dtype}, but its `grad_dtype` is not: its gradient cannot be sharded")
        if is_ignored_by_ddp(param):
            raise ValueError(
                f"DistributedDataParallel would ignore {name!r}, but here every rank would get rank 0's values of it: "
                f"experts need their own model and optimizer"
            )
    for index, tensor in enumerate(engine.local.params):
        if tensor not in names:
            raise ValueError(
                f"the model does not have {engine.layouts.layout.plan.tensors[index].name!r}, which the optimizer has: "
                f"pass the model that has all parameters of the optimizer"
            )
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided or 0 in buffer.stride():
            raise ValueError(f"the buffer {name!r} is sparse or expanded, and cannot be broadcast: use a dense copy")
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise ValueError(f"{name!r} has sparse gradients, which cannot be sharded: use sparse=False")
