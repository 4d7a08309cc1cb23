"""Follows the forwards and backwards of a plain module with hooks, for sharded gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from operator import is_
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from zeroshard_comm import RankGroup, peer_lost

from zeroshard._torch_private import broadcast_coalesced, disable_dynamo, in_autograd, is_in_ddp, keep_versions
from zeroshard.grads.sharded import ShardedGradients
from zeroshard.guard import Guard

T = TypeVar("T")
_BROADCAST_BYTES = 8 * 1024 * 1024
"""The size of one broadcast of buffers and parameters in bytes. torch copies two at a time."""


class ModelHooks:
    """Registers the hooks of a model, and calls a source of gradients from them.

    The model has only weak references to this object. The constructor is collective.
    """

    def __init__(
        self, model: nn.Module, source: ShardedGradients, ranks: RankGroup, guard: Guard, *, broadcast_buffers: bool
    ) -> None:
        self._source = weakref.ref(source)
        self._ranks, self._guard = ranks, guard
        self._broadcasts_buffers = self._must_broadcast = broadcast_buffers
        modules = [*model.modules()]
        self._param_dicts = [module._parameters for module in modules if module._parameters]
        self._buffer_dicts = [module._buffers for module in modules if module._buffers]
        self._params = [*self._members(self._param_dicts)]
        self._forms = self._forms_now()
        self._hooked: set[torch.Tensor] = set()
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(_Hook(weakref.WeakMethod(self.before_forward))),
        ]
        self._hook_params()
        self.broadcast_all(0)

    @staticmethod
    def _members(dicts: list[dict[str, Any]]) -> Iterator[torch.Tensor]:
        return (member for of_module in dicts for member in of_module.values() if member is not None)

    def _forms_now(self) -> list[tuple[torch.dtype, torch.device]]:
        return [(param.dtype, param.device) for param in self._params]

    def _hook_params(self) -> None:
        """Register a hook on each trained parameter of the optimizer that has none."""
        for tensor, param in enumerate(_alive(self._source).params):
            if param.requires_grad and param not in self._hooked:
                self._hooked.add(param)
                arrived = partial(_arrived, self._source, tensor)
                self._handles.append(param.register_post_accumulate_grad_hook(arrived))

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def broadcast_buffers(self, source: int) -> None:
        """Send one rank's buffers to all ranks. Collective."""
        self._broadcast([*self._members(self._buffer_dicts)], source)

    def broadcast_all(self, source: int) -> None:
        """Send one rank's parameters and buffers to all ranks. Collective."""
        self._broadcast([*self._params, *self._members(self._buffer_dicts)], source)

    def _broadcast(self, tensors: list[torch.Tensor], source: int) -> None:
        if not tensors or self._ranks.world_size == 1:
            return
        try:
            with keep_versions(tensors):
                detached = [tensor.detach() for tensor in tensors]
                broadcast_coalesced(self._ranks.group, detached, _BROADCAST_BYTES, source)
        except RuntimeError as failure:
            lost = peer_lost(failure, None, self._ranks.rank, "forward()")
            self._guard.mark_broken(lost)
            raise lost from failure

    @disable_dynamo
    def before_forward(self, *_: object) -> None:
        """Check the model, free what the last step used, and broadcast buffers if this forward has gradients."""
        if in_autograd():
            # An activation checkpoint recomputes this forward.
            return
        source = _alive(self._source)
        source.close_interrupted()
        if is_in_ddp():
            raise RuntimeError(
                "DistributedDataParallel calls this model, but shard_gradients() shards its gradients: use only one"
            )
        if not torch.is_grad_enabled():
            return
        self._guard.check_broken()
        source.release()
        if self._are_params_replaced():
            return
        self._hook_params()
        if self._must_broadcast:
            self.broadcast_buffers(source.announce_forward() if source.announce_forward is not None else 0)
        self._must_broadcast = self._broadcasts_buffers and not source.accumulates

    def _are_params_replaced(self) -> bool:
        """Return True if functional_call() has put other tensors in place of parameters; raise if the model changed."""
        now = [*self._members(self._param_dicts)]
        if len(now) != len(self._params) or not all(map(is_, now, self._params)):
            if not all(isinstance(param, nn.Parameter) for param in now):
                return True
            raise RuntimeError(
                "parameters of the model were replaced after shard_gradients(), for example by "
                "load_state_dict(assign=True): load and convert the model before you build the optimizer"
            )
        if self._forms_now() != self._forms:
            raise RuntimeError(
                "the model was moved or converted after shard_gradients(): do that before you build the optimizer"
            )
        return False


class _Hook:
    """Calls a method of the hooks of one model. In copies and pickles of the model, the hook does nothing."""

    def __init__(self, method: weakref.WeakMethod[Callable[..., None]]) -> None:
        self._method = method

    def __call__(self, *arguments: object) -> None:
        _alive(self._method)(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        # A function of the standard library that takes any arguments and returns None.
        return getattr, (nullcontext(), "__exit__")


def _alive(reference: Callable[[], T | None]) -> T:
    found = reference()
    if found is None:
        raise RuntimeError(
            "the optimizer that shards the gradients of this model is gone: keep a reference to it, or call remove()"
        )
    return found


def _arrived(source: weakref.ref[ShardedGradients], tensor: int, _: torch.Tensor) -> None:
    _alive(source).arrive(tensor)
