"""Communication hooks for DistributedDataParallel and a sharded optimizer, with the communication volume of plain DDP.

Plain DDP sends every gradient once and receives it reduced. :func:`reduce_to_owner_hook` sends each gradient only to
its owner, and receives the owner's new parameters instead, which is the same number of bytes. The hooks that step
during backward have torch's names and signatures. The interleaved one updates buckets while earlier layers compute.
"""

# No `from __future__ import annotations`: DDP compares the hooks' annotations with the types themselves.
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # not an explicit export
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from zeroshard import Bucket, GradExchange, StepMode, ZeroRedundancyOptimizer

from zeroshard_integrations import _torch_private

__all__ = [
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "reduce_to_owner_hook",
    "register_reduce_to_owner",
]

Hook = Callable[[Any, GradBucket], Future[torch.Tensor]]
ONE_OPTIMIZER = "use one optimizer with a class per param group, or leave the hook out, or wrap one model per optimizer"
_IN_JOIN = (
    "the model is in torch's Join and has a communication hook of zeroshard, which ranks without data cannot run. "
    "With uneven data leave the hook out, and use zeroshard_integrations.join.Join([ddp, optimizer])"
)


def reduce_to_owner_hook(state: ZeroRedundancyOptimizer, bucket: GradBucket) -> Future[torch.Tensor]:
    """Send each gradient to the rank that owns it, while backward computes.

    Register it with :func:`register_reduce_to_owner`. Then train as usual; ``optimizer.step()`` updates this rank's
    shards and broadcasts the new values. Until then, ``.grad`` of every parameter is a
    :class:`zeroshard.GradPlaceholder`: you cannot read its values, but you can take its 2-norm, multiply it or clamp
    it. So torch's ``clip_grad_norm_``, ``clip_grad_value_`` and ``GradScaler`` work as usual; call them on every rank.

    Gradients are averaged over the ranks. To accumulate gradients over several backwards, run all but the last under
    ``no_sync()``, which sends nothing: a gradient that was reduced cannot be added to.

    ``ddp.register_comm_hook(optimizer, reduce_to_owner_hook)`` works too, with fewer checks. In this case, do not keep
    gradients during the second forward of a model with ``gradient_as_bucket_view=True``: DDP rebuilds its buckets then.

    Args:
        state: the optimizer, with all parameters that DDP reduces, over the same ranks.
        bucket: a bucket of DDP.

    Returns:
        A future that holds the bucket's buffer.

    Raises:
        ValueError: if the optimizer does not have a parameter of the bucket, or gradients cannot be sent in buckets.
        DisagreementError: if the buckets of ranks differ.
        PeerLostError: if a rank is gone.

    Example:
        >>> import os, tempfile, torch
        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> from zeroshard import ZeroRedundancyOptimizer
        >>> from zeroshard_integrations.ddp import register_reduce_to_owner
        >>> store = dist.FileStore(tempfile.mkstemp()[1], 1)
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> ddp = DistributedDataParallel(torch.nn.Linear(4, 4), gradient_as_bucket_view=True)
        >>> optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3)
        >>> register_reduce_to_owner(ddp, optimizer)
        >>> ddp(torch.ones(1, 4)).sum().backward()
        >>> norm = optimizer.clip_grad_norm_(1.0)
        >>> optimizer.step()
        >>> dist.destroy_process_group()
    """
    _check_sharded(state)
    return _begin_bucket(state.follow_backward(StepMode.IN_STEP), bucket)


def _check_sharded(optimizer: object) -> None:
    """Raise a TypeError unless it is one sharded optimizer, or a wrapper that forwards to one."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, Sequence):
        raise TypeError(f"a hook expects one optimizer, but got {len(optimizer)} in a {kind}: {ONE_OPTIMIZER}")
    if not hasattr(optimizer, "follow_backward"):
        raise TypeError(f"reduce_to_owner_hook expects a zeroshard.ZeroRedundancyOptimizer, but got a {kind}")


def register_reduce_to_owner(
    ddp: DistributedDataParallel, optimizer: ZeroRedundancyOptimizer, *, norms: bool = True
) -> None:
    """Register :func:`reduce_to_owner_hook`, after a check that it can be used.

    Args:
        ddp: the model.
        optimizer: the optimizer of all parameters that DDP reduces, over the same ranks.
        norms: whether ranks exchange the 2-norm of each gradient at the end of each backward. If False, torch's
            ``clip_grad_norm_`` and ``GradScaler`` raise; the optimizer's own ``clip_grad_norm_`` works, with a norm
            of any order. A ``GradScaler`` finds infinities by the norm, so it also skips a step if a norm overflows the
            gradient's dtype (above 1.8e19 in float32), even if all values are finite.

    Raises:
        TypeError: if ``optimizer`` is not a sharded optimizer, or is a list.
        ValueError: if the optimizer lacks a parameter, has other ranks, was built with ``overlap_with_ddp=True``, or is
            in a Join block, if DDP has ``mixed_precision``, or if ``norms`` is not a bool.
        DisagreementError: if a parameter that DDP ignores differs between ranks.
    """
    _check_sharded(optimizer)
    _torch_private.mark_ignored(ddp)
    exchange = optimizer.follow_backward(StepMode.IN_STEP, _checked_names(ddp, optimizer), norms=norms)
    ddp.register_comm_hook(optimizer, reduce_to_owner_hook)
    _register_model(ddp, exchange)


def hook_with_zero_step(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,  # noqa: ARG001 - torch's signature; the optimizer's partition decides who owns what
) -> Hook:
    """Return a hook that steps the optimizer during backward, after the last bucket.

    The hook starts all reductions before it steps the first shard, so that they can use the whole network. Then it
    steps as ``step()`` does. Backward returns when parameters are up to date. The first iteration trains too.

    Args:
        hook: reduces the gradients. Pass ``allreduce_hook`` to send gradients to their owners instead of all-reducing
            them, or another hook that averages a bucket on all ranks, such as a compression hook.
        ddp: the model.
        zero: its optimizer, built with ``overlap_with_ddp=True``, with all parameters that DDP reduces, over the same
            ranks. The training loop may call ``step()``, which then takes no closure, or leave it out.
        shard_buckets: accepted for compatibility, without effect: the optimizer's ``partition`` decides who owns what.

    Returns:
        The hook to register, with the state that ``hook`` needs: ``ddp.register_comm_hook(state, ...)``.

    Raises:
        ValueError: if the optimizer was built without ``overlap_with_ddp=True``, lacks a parameter, or has other ranks.
        DisagreementError: if a parameter that DDP ignores differs between ranks.
    """
    return _stepping_hook(hook, ddp, zero, StepMode.AFTER_BACKWARD)


def hook_with_zero_step_interleaved(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,  # noqa: ARG001 - as above
) -> Hook:
    """Return a hook that steps each bucket during backward, as soon as it is reduced.

    Unlike :func:`hook_with_zero_step`, it reduces, steps and broadcasts different buckets at the same time. Use it if
    the network is slower than backward.

    Args:
        hook: reduces the gradients, see :func:`hook_with_zero_step`.
        ddp: the model.
        zero: its optimizer, as for :func:`hook_with_zero_step`.
        shard_buckets: accepted for compatibility, without effect.

    Returns:
        The hook to register, with the state that ``hook`` needs.

    Raises:
        ValueError: as :func:`hook_with_zero_step`.
    """
    return _stepping_hook(hook, ddp, zero, StepMode.PER_BUCKET)


def _stepping_hook(hook: Hook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, mode: StepMode) -> Hook:
    _check_sharded(zero)
    _torch_private.mark_ignored(ddp)
    exchange = zero.follow_backward(mode, _checked_names(ddp, zero))
    _register_model(ddp, exchange)
    # DDP keeps the hook, so a reference from it to the optimizer would be a cycle through C++. `join_state` belongs to
    # the optimizer, and not to a wrapper that may be gone.
    join_state, group = weakref.ref(zero.join_state), zero.process_group

    def step_in_backward(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:  # noqa: ANN401 - the inner hook's
        if join_state() is None:
            raise RuntimeError("the optimizer that this communication hook steps is gone: keep a reference to it")
        if hook is not allreduce_hook:
            return _begin_bucket(exchange, bucket, lambda: hook(state, bucket))
        if isinstance(state, dist.ProcessGroup):
            _check_same_ranks(state, group, "allreduce_hook was registered with a group of the ranks")
        return _begin_bucket(exchange, bucket)

    return step_in_backward


def _register_model(ddp: DistributedDataParallel, exchange: GradExchange) -> None:
    """Tell the exchange about the forwards of its model, in which DDP may rebuild its buckets and copy gradients."""
    exchange.uses_all = not (ddp.find_unused_parameters or ddp.static_graph)
    # Not partials, because a copy of the model would copy their arguments.
    ddp.register_forward_pre_hook(lambda module, _: _begin_forward(exchange, module))
    ddp.register_forward_hook(lambda module, *_: _end_forward(exchange, module), always_call=True)


@_torch_private.disable_dynamo
def _begin_forward(exchange: GradExchange, ddp: DistributedDataParallel) -> None:
    if _torch_private.has_rebuilt_buckets(ddp):
        return
    exchange.hide_for_rebuild()

    def end_forward(*_: object) -> None:
        handle.remove()
        exchange.show_after_rebuild()

    # DDP rebuilds before it calls the module, whose own code must see the gradients.
    handle = ddp.module.register_forward_pre_hook(end_forward, prepend=True)


@_torch_private.disable_dynamo
def _end_forward(exchange: GradExchange, ddp: DistributedDataParallel) -> None:
    exchange.show_after_rebuild()
    # Raise only after the forward: a rank without data waits for it, and for the backward if that reduces.
    if _torch_private.join_config(ddp).enable and ddp.require_backward_grad_sync:
        raise RuntimeError(_IN_JOIN)


def _begin_bucket(
    exchange: GradExchange, bucket: GradBucket, reduce: Callable[[], Future[torch.Tensor]] | None = None
) -> Future[torch.Tensor]:
    if not isinstance(bucket, GradBucket):
        raise TypeError(
            "with torch._dynamo.config.optimize_ddp = 'python_reducer', DistributedDataParallel passes no buckets to "
            "communication hooks: use another value, such as 'ddp_optimizer'"
        )
    if _torch_private.graph_task_id() == -1:
        # Outside of a backward: torch's Join calls the hook on a rank that has run out of data.
        raise RuntimeError(_IN_JOIN)
    params = bucket.parameters()
    # Read it before another hook reduces it, because compression hooks replace the buffer.
    found = Bucket(
        index=bucket.index(),
        is_last=bucket.is_last(),
        buffer=bucket.buffer(),
        gradients=bucket.gradients(),
        params=params,
        present=tuple([param.grad is not None for param in params]),
        announced=bucket.index(),
    )
    done = exchange.begin(found, reduce)
    if found.is_last:
        call_after_ddp(exchange.end)
    elif found.index == 0:
        call_after_ddp(exchange.end_of_autograd)
    return done


def call_after_ddp(call: Callable[[], None]) -> None:
    """Call a function at the end of backward, after DDP's own callbacks."""
    # DDP queues the callback that writes gradients after this one, and the callback queued by this one comes last.
    _torch_private.queue_callback(lambda: _torch_private.queue_callback(call))


def _check_same_ranks(group: dist.ProcessGroup, optimizers: dist.ProcessGroup, what: str) -> None:
    theirs, ours = dist.get_process_group_ranks(group), dist.get_process_group_ranks(optimizers)
    if theirs != ours:
        raise ValueError(
            f"{what} {theirs}, and the optimizer works on {ours}: give both the same process group; for post-local "
            f"SGD, leave the hook out, and register torch's post_localSGD_hook"
        )


def _checked_names(ddp: DistributedDataParallel, optimizer: ZeroRedundancyOptimizer) -> dict[torch.Tensor, str]:
    """Return the names of a model's parameters; raise a ValueError if the optimizer cannot use the model's buckets."""
    if ddp.mixed_precision is not None:
        raise ValueError(
            "DistributedDataParallel(mixed_precision=...) has its own communication hook, and allows only one: "
            "use torch.autocast, or parameters in half precision with master_weights=True"
        )
    if _torch_private.has_comm_hook(ddp):
        raise ValueError(
            "this DistributedDataParallel already has a communication hook, and allows only one: leave one of them "
            "out, or wrap the model again"
        )
    _check_same_ranks(ddp.process_group, optimizer.process_group, "DistributedDataParallel works on the ranks")
    own = {param for group in optimizer.param_groups for param in group["params"]}
    names = {param: name for name, param in ddp.module.named_parameters()}
    for param, name in names.items():
        if param.requires_grad and param not in own and name not in ddp.parameters_to_ignore:
            raise ValueError(
                f"DistributedDataParallel reduces {name!r}, which the optimizer does not have: pass it all parameters, "
                f"or freeze parameters that you do not train before you build DistributedDataParallel"
            )
    return names
