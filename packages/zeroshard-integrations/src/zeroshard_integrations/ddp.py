"""Communication hooks by which DistributedDataParallel and a sharded optimizer send no more bytes than plain DDP.

An unsharded step sends every gradient once and gets it back reduced. With :func:`reduce_to_owner_hook` each gradient
is sent only to its owner, and the owner's new parameters come back instead: as many bytes. With the hooks that step
during backward, which have torch's names and signatures, buckets are updated and shared while earlier layers still
compute.
"""

# No `from __future__ import annotations`: DDP compares the hooks' annotations with the types themselves.
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch exports it unseen
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future, collect_all
from torch.nn.parallel import DistributedDataParallel
from zeroshard import Bucket, GradExchange, StepMode, ZeroRedundancyOptimizer
from zeroshard.join import JoinState

from zeroshard_integrations._torch_private import comm_hooks, disable_dynamo, has_rebuilt_buckets, queue_callback

__all__ = [
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "reduce_to_owner_hook",
    "register_reduce_to_owner",
]

Hook = Callable[[Any, GradBucket], Future[torch.Tensor]]


def reduce_to_owner_hook(state: ZeroRedundancyOptimizer, bucket: GradBucket) -> Future[torch.Tensor]:
    """Send each gradient to the rank that owns it, while backward computes.

    Register it by :func:`register_reduce_to_owner`. Then train as usual; ``optimizer.step()`` updates this rank's
    shards and broadcasts the new values. Before that, ``.grad`` of every parameter is a
    :class:`zeroshard.GradPlaceholder`: it cannot be read, but its 2-norm can, and its owner multiplies or clamps it. So
    torch's ``clip_grad_norm_``, ``clip_grad_value_`` and ``GradScaler`` work as usual; what they do must be done on
    every rank.

    Gradients are averaged over the ranks, as DDP does. ``no_sync()`` accumulates on each rank and sends nothing;
    several backwards before a step add up.

    ``ddp.register_comm_hook(optimizer, reduce_to_owner_hook)`` works too, with fewer checks; gradients then cannot be
    kept over the second forward of a model with ``gradient_as_bucket_view=True``, in which DDP rebuilds its buckets.

    Args:
        state: the optimizer; it has all parameters that DDP reduces, and the same ranks.
        bucket: of DDP.

    Returns:
        A future that holds the bucket's buffer.

    Raises:
        ValueError: if the optimizer does not have a parameter of the bucket, or gradients cannot be sent in buckets.
        DisagreementError: if ranks have other buckets.
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
    optimizers = _optimizers_in(state)
    _check_sharded(optimizers)
    return _receive([optimizer.follow_backward(StepMode.IN_STEP) for optimizer in optimizers], bucket)


class _Several(tuple[ZeroRedundancyOptimizer, ...]):
    """The state of a hook that serves several optimizers: each takes every bucket, with its own parameters alone."""


def _optimizers_in(state: Any) -> tuple[Any, ...]:  # noqa: ANN401 - of any hook
    return state if isinstance(state, _Several) else (state,)


def _check_sharded(optimizers: Sequence[Any]) -> None:
    """Check that each is a sharded optimizer, or a wrapper that forwards to one."""
    for each in optimizers:
        if not hasattr(each, "follow_backward"):
            raise TypeError(
                f"reduce_to_owner_hook takes a zeroshard.ZeroRedundancyOptimizer, and register_reduce_to_owner one or "
                f"a sequence of them, and not a {type(each).__name__}"
            )


def register_reduce_to_owner(
    ddp: DistributedDataParallel,
    optimizer: ZeroRedundancyOptimizer | Sequence[ZeroRedundancyOptimizer],
    *,
    norms: bool | Sequence[float] = True,
) -> None:
    """Register :func:`reduce_to_owner_hook`, with its conditions checked at once.

    Args:
        ddp: the model.
        optimizer: has all parameters that DDP reduces, and the same ranks. Several optimizers have them together, each
            its own: in the same order on every rank. They may step at different times, but not inside Join.
        norms: which norms of all gradients every rank learns at the end of each backward: True for norms of order 2,
            ``(2, math.inf)`` for the largest magnitudes too. With False torch's ``clip_grad_norm_`` and ``GradScaler``
            are refused; the optimizer's own ``clip_grad_norm_``, which takes every order, is not. A ``GradScaler``
            finds infinities by the norm: with order 2 alone it also skips a step whose norm overflows the gradient's
            dtype (above 1.8e19 in float32), though all values are finite.

    Raises:
        TypeError: if it is no sharded optimizer.
        ValueError: if no optimizer has a parameter, or two have, if one has other ranks, or was built with
            ``overlap_with_ddp=True``, if DDP has ``mixed_precision``, or if ``norms`` is anything else.
    """
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    _check_sharded(optimizers)
    names = _check_model(ddp, optimizers)
    exchanges = [each.follow_backward(StepMode.IN_STEP, names, norms=norms) for each in optimizers]
    ddp.register_comm_hook(optimizers[0] if len(optimizers) == 1 else _Several(optimizers), reduce_to_owner_hook)
    _register_model(ddp, exchanges)


def hook_with_zero_step(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,  # noqa: ARG001 - torch's signature; the optimizer's partition decides who owns what
) -> Hook:
    """Return a hook that steps the optimizer during backward, after the last bucket.

    All reductions are on their way before the first shard is stepped, so that they can use the whole network. Then it
    steps as ``step()`` does. Backward returns when parameters are up to date. All iterations train, from the first
    one on.

    Args:
        hook: reduces the gradients: ``allreduce_hook``, which is replaced by sending gradients to their owners, or
            another one that averages a bucket on all ranks, such as a compressing one.
        ddp: the model.
        zero: its optimizer, built with ``overlap_with_ddp=True``, with all parameters that DDP reduces, over the same
            ranks. ``step()`` may stay in the training loop, or not; it takes no closure.
        shard_buckets: accepted for compatibility, without effect: the optimizer's ``partition`` decides who owns what.

    Returns:
        The hook to register, with the state that ``hook`` needs: ``ddp.register_comm_hook(state, ...)``.

    Raises:
        ValueError: if the optimizer was built without ``overlap_with_ddp=True``, lacks a parameter, or has other ranks.
    """
    return _stepping(hook, ddp, zero, StepMode.AFTER_BACKWARD)


def hook_with_zero_step_interleaved(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,  # noqa: ARG001 - as above
) -> Hook:
    """Return a hook that steps each bucket during backward, as soon as it is reduced.

    As :func:`hook_with_zero_step`, but reductions, steps and parameters of different buckets are under way at the same
    time. Useful if the network is slower than backward.

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
    return _stepping(hook, ddp, zero, StepMode.PER_BUCKET)


def optimizers_of_hooks(ddp: DistributedDataParallel) -> list[JoinState]:
    """Return the join states of the optimizers to which the communication hooks of a model hand its gradients."""
    states = [getattr(each, "join_state", None) for _, state in comm_hooks(ddp) for each in _optimizers_in(state)]
    states += [hook.join_state() for hook, _ in comm_hooks(ddp) if hasattr(hook, "join_state")]
    return [found for found in states if isinstance(found, JoinState)]


def _stepping(hook: Hook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, mode: StepMode) -> Hook:
    exchange = zero.follow_backward(mode, _check_model(ddp, [zero]))
    _register_model(ddp, [exchange])
    # DDP keeps the hook: a reference to the optimizer from there would be a cycle through C++.
    join_state, group = weakref.ref(zero.join_state), zero.process_group

    def step_in_backward(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:  # noqa: ANN401 - the inner hook's
        if join_state() is None:
            raise RuntimeError("the optimizer that this communication hook steps is gone: keep a reference to it")
        if hook is not allreduce_hook:
            return _receive([exchange], bucket, lambda: hook(state, bucket))
        if isinstance(state, dist.ProcessGroup):
            _check_same_ranks(state, group, "allreduce_hook was registered with a group of the ranks")
        return _receive([exchange], bucket)

    vars(step_in_backward)["join_state"] = join_state
    return step_in_backward


def _register_model(ddp: DistributedDataParallel, exchanges: Sequence[GradExchange]) -> None:
    """Let optimizers know their model, and when it may rebuild its buckets, which copies gradients: in its forwards."""
    for exchange in exchanges:
        exchange.join.models.add(ddp)
        exchange.uses_all = not (ddp.find_unused_parameters or ddp.static_graph)
    _set_in_forward(exchanges, None)
    # Functions: a copy of the model would copy the arguments of a partial.
    ddp.register_forward_pre_hook(lambda module, _: _set_in_forward(exchanges, module))
    ddp.register_forward_hook(lambda *_: _set_in_forward(exchanges, None), always_call=True)


@disable_dynamo
def _set_in_forward(exchanges: Sequence[GradExchange], ddp: DistributedDataParallel | None) -> None:
    """Tell optimizers which model is in a forward, or that none is."""
    for exchange in exchanges:
        exchange.set_in_forward(may_rebuild=ddp is not None and not has_rebuilt_buckets(ddp))


def _receive(
    exchanges: Sequence[GradExchange], bucket: GradBucket, reduce: Callable[[], Future[torch.Tensor]] | None = None
) -> Future[torch.Tensor]:
    if not isinstance(bucket, GradBucket):
        raise TypeError(
            "with torch._dynamo.config.optimize_ddp = 'python_reducer', DistributedDataParallel hands no buckets to "
            "communication hooks: use another value, such as 'ddp_optimizer'"
        )
    params = bucket.parameters()
    # Before another hook reduces it: compressing hooks replace the buffer.
    found = Bucket(
        index=bucket.index(),
        is_last=bucket.is_last(),
        buffer=bucket.buffer(),
        gradients=bucket.gradients(),
        params=params,
        present=tuple([param.grad is not None for param in params]),
        announced=bucket.index(),
    )
    parts = [found]
    if len(exchanges) > 1:
        # A parameter that no optimizer has goes to the first one, which raises an error for it on every rank.
        owner_of = [next((each for each in exchanges if each.has(param)), exchanges[0]) for param in params]
        parts = [found.only([owner is each for owner in owner_of]) for each in exchanges]
    done = []
    for exchange, part in zip(exchanges, parts, strict=True):
        done.append(exchange.begin(part, reduce))
        if exchange.is_own and found.is_last:
            _after_ddp(exchange.end)
        elif exchange.is_own and found.index == 0:
            _after_ddp(exchange.end_of_autograd)
    if found.is_last and not exchanges[0].is_own and exchanges[0].join.context is None:
        # This rank is in torch's Join of the model alone. The others have data, and raise in step().
        for each in exchanges:
            each.end()
        raise exchanges[0].join.left_out()
    if len(done) == 1:
        return done[0]
    # The future of collect_all() knows no devices.
    devices: list[int | str | torch.device] = [] if found.buffer.device.type == "cpu" else [found.buffer.device]
    of_all: Future[torch.Tensor] = Future(devices=devices)

    def finish(_: object) -> None:
        for each in done:
            each.wait()
        of_all.set_result(found.buffer)

    collect_all(done).then(finish)
    return of_all


def _after_ddp(call: Callable[[], None]) -> None:
    """Call something at the end of backward, after what DDP does there."""
    # DDP queues the callback that writes gradients after this one, and the callback queued by this one comes last.
    queue_callback(lambda: queue_callback(call))


def _check_same_ranks(group: dist.ProcessGroup, optimizers: dist.ProcessGroup, what: str) -> None:
    theirs, ours = dist.get_process_group_ranks(group), dist.get_process_group_ranks(optimizers)
    if theirs != ours:
        raise ValueError(
            f"{what} {theirs}, and the optimizer works on {ours}: give both the same process group; for post-local "
            f"SGD, leave the hook out, and register torch's post_localSGD_hook"
        )


def _check_model(
    ddp: DistributedDataParallel, optimizers: Sequence[ZeroRedundancyOptimizer]
) -> dict[torch.Tensor, str]:
    """Check that optimizers can take the buckets of a model, and return the names of its parameters."""
    if ddp.mixed_precision is not None:
        raise ValueError(
            "DistributedDataParallel(mixed_precision=...) has a communication hook of its own, and takes no other: "
            "use torch.autocast, or parameters in half precision with master_weights=True, instead; or register no "
            "hook of zeroshard"
        )
    known: set[torch.Tensor] = set()
    names = {param: name for name, param in ddp.module.named_parameters()}
    for optimizer in optimizers:
        _check_same_ranks(ddp.process_group, optimizer.process_group, "DistributedDataParallel works on the ranks")
        own = {param for group in optimizer.param_groups for param in group["params"]}
        for param in known & own:
            raise ValueError(f"two optimizers of one hook have the parameter {names.get(param, '')!r}: one may step it")
        known |= own
    for param, name in names.items():
        if param.requires_grad and param not in known and name not in ddp.parameters_to_ignore:
            raise ValueError(
                f"DistributedDataParallel reduces {name!r}, which the optimizer does not have: with a communication "
                f"hook of zeroshard, the optimizers given to register_reduce_to_owner must have all parameters. Give "
                f"them all, or freeze those that are not to be trained before DistributedDataParallel is built"
            )
    return names
