"""The sharded optimizer: a drop-in for ``torch.distributed.optim.ZeroRedundancyOptimizer``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from zeroshard_comm import RankGroup
from zeroshard_core import Cost, Strategy, numel

from zeroshard.known_to_torch import register
from zeroshard.local.optimizer import Closure, sync_groups
from zeroshard.optimizer_interface import OptimizerInterface
from zeroshard.plan.eligibility import Coupled, OptimizerFactory, check_shardable
from zeroshard.plan.groups import ParamGroup, read_group, read_groups
from zeroshard.plan.layout import Objects, Policy
from zeroshard.sharded_optimizer import ShardedOptimizer
from zeroshard.state.listing import StateDict
from zeroshard.state.names import Keys, check_keys, key_by_index, key_by_name


class ZeroRedundancyOptimizer(OptimizerInterface, Optimizer, Joinable):  # type: ignore[misc] # torch annotates `state` narrowly
    r"""Wrap an optimizer class and keep only this rank's share of its state (ZeRO stage 1).

    Every rank holds all parameters, and the optimizer state of those that it owns. :meth:`step` updates these with the
    given optimizer class and brings the new values to all ranks. It expects gradients that are equal on all ranks, as
    DistributedDataParallel leaves them; results are then those of the unsharded optimizer.

    All ranks of the group must construct it, and call the methods marked as collective, in the same order. Bad input on
    one rank, and differences between ranks, are errors on every rank, raised before anything is changed.

    The algorithm is stage 1 of `ZeRO <https://arxiv.org/abs/1910.02054>`_.

    Args:
        params: tensors, ``(name, tensor)`` pairs, or dicts of param groups, in the same order on every rank.
        optimizer_class: the class of the local optimizer, or a ``functools.partial`` of it.
        process_group: the ranks that share the work; the default group if None.
        parameters_as_bucket_view: pack parameters into flat buffers, so that a step sends few large messages without
            copying. ``param.data`` then points into a buffer.
        overlap_with_ddp: whether a communication hook of ``zeroshard_integrations.ddp`` steps it during backward.
        partition: ``"whole"`` (each tensor has one owner), ``"split"`` (large tensors are cut evenly; elementwise
            optimizers only), ``"hybrid"`` (whole, except tensors larger than a fair share; elementwise only), or a
            function of your own, see :data:`zeroshard_core.Strategy`.
        cost: what a tensor weighs when tensors are dealt out; its number of elements by default.
        elementwise: declares that ``optimizer_class`` is elementwise, if zeroshard does not know it.
        objects: ``"leave out"`` omits state entries that are not tensors, numbers, strings, lists or dicts from
            checkpoints; by default the step that adds one raises.
        coupled: ``"allow"`` accepts an optimizer class that couples tensors; each rank then sees only its own tensors.
        master_weights: step float32 copies of float16 and bfloat16 parameters; entry ``"master_param"`` of the state.
        **defaults: arguments of ``optimizer_class``.

    Attributes:
        process_group, parameters_as_bucket_view: as given, or the default group.
        world_size, rank: of the group.
        global_rank: this rank in the default group.
        initialized: whether the constructor has finished.

    Raises:
        TypeError, ValueError: for invalid arguments.
        DisagreementError: if ranks differ in tensors, order, shapes, dtypes, trainability, hyperparameters or settings.

    Example:
        >>> import tempfile, torch, torch.distributed as dist
        >>> from zeroshard import ZeroRedundancyOptimizer
        >>> store = dist.FileStore(tempfile.mkstemp()[1], 1)
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> model = torch.nn.Linear(4, 4)
        >>> optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.consolidate_state_dict()
        >>> sorted(optimizer.state_dict()["state"])
        [0, 1]
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        params: Any,  # noqa: ANN401 - checked by read_groups, as torch's own annotation is wider than what it takes
        optimizer_class: OptimizerFactory,
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        partition: Literal["whole", "split", "hybrid"] | Strategy = "whole",
        cost: Cost = numel,
        elementwise: bool = False,
        objects: Objects = "refuse",
        coupled: Coupled = "refuse",
        master_weights: bool = False,
        **defaults: Any,  # noqa: ANN401 - arguments of any optimizer class
    ) -> None:
        self.initialized, self._overlap_with_ddp = False, overlap_with_ddp
        register(ZeroRedundancyOptimizer)
        ranks = RankGroup.of(process_group)
        self.process_group, self.world_size = ranks.group, ranks.world_size
        self.rank, self.global_rank = ranks.rank, ranks.global_rank
        self.parameters_as_bucket_view = views = parameters_as_bucket_view
        policy = Policy(
            partition, cost, optimizer_class, elementwise, views, ranks.world_size, objects, coupled, master_weights
        )

        def read() -> list[ParamGroup]:
            check_shardable(optimizer_class)
            Optimizer.__init__(self, read_groups(params), dict(defaults))
            Joinable.__init__(self)
            return self.param_groups

        self._sharded = ShardedOptimizer(ranks, policy, defaults, read)
        sync_groups(self.optim.param_groups, self.param_groups)
        self.defaults = self.optim.defaults  # as the class fills them in: schedulers look values up there
        self.initialized = True

    def step(self, closure: Closure | None = None, **kwargs: Any) -> Any:  # noqa: ANN401 - what the inner step takes and returns
        """Update this rank's shards and bring the new values to all ranks. Collective.

        Parameters may have been frozen, unfrozen or rebound since the last step, or converted while they had no state.

        Args:
            closure: re-evaluates the model and returns the loss. Pass one on every rank or on none, unchecked.
                It must not unfreeze or convert parameters.
            **kwargs: passed to the local optimizer's step.

        Returns:
            What the local optimizer's step returned, e.g. the closure's loss; None without a closure.

        Raises:
            DisagreementError, PeerLostError: if ranks differ in their parameters, or one is gone.
            RuntimeError: if a hook steps during backward, and there was not exactly one such backward since the last
                step(), or hyperparameters or gradients have changed since; then until a state is loaded. With any hook,
                if parameters were unfrozen since a backward. After Ctrl-C in a collective call: build a new optimizer.
            Exception: an error of any rank, on every rank, but errors of step hooks only where they occur. Replicas are
                equal then, except parameters that a rank has converted.
        """
        return self._sharded.step(closure, kwargs)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients of all parameters so that their norm is at most ``max_norm``. Collective with a hook.

        Like :func:`torch.nn.utils.clip_grad_norm_` over the parameters of all groups, even when a communication hook
        leaves each rank only the gradients that it owns. Without a hook it does not communicate.

        Args:
            max_norm: the largest norm that is not scaled down.
            norm_type: the p of the p-norm; ``inf`` for the largest magnitude.
            error_if_nonfinite: whether a norm that is infinite or NaN is an error.

        Returns:
            The norm before clipping, as a 0-dim tensor (on the CPU with a hook).

        Raises:
            ValueError: if a communication hook steps during backward, so that there is nothing left to clip.
            RuntimeError: if the norm is not finite, and ``error_if_nonfinite`` is True.
            DisagreementError, PeerLostError: if ranks pass different arguments, or one is gone.
        """
        return self._sharded.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register a hook that is called before each step, as in torch. Its errors are raised only where they occur.

        Args:
            hook: called with the optimizer, and the positional and keyword arguments of its step; may return new ones.
        """
        if self._overlap_with_ddp:
            raise ValueError(
                "this optimizer is stepped during backward by its communication hook, and a step pre-hook would be "
                "called after the step; use reduce_to_owner_hook"
            )
        return super().register_step_pre_hook(hook)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, and choose their owners; others keep theirs. Collective.

        Args:
            param_group: a dict with ``"params"`` and hyperparameters; not modified.

        Raises:
            TypeError, ValueError: if it is not such a dict, or a parameter is in a group already.
            RuntimeError: with a hook, between a backward that reduces and its step().
            DisagreementError: if ranks add different groups; none does then.
        """
        register = super().add_param_group
        if self.initialized:
            self._sharded.add_param_group(lambda: register(read_group(param_group)))
        else:
            register(param_group)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring the state of all shards to the CPU memory of one rank, for :meth:`state_dict`. Collective.

        It is kept until the next step, load or new group; until then the other ranks list only placeholders.

        Args:
            to: the group rank that receives, an integer of any kind. Other ranks need no more memory than before.

        Raises:
            ValueError: if there is no such rank.
            StateMapError: if an entry of the state can be neither joined nor moved without pickle, or only some owners
                of a cut tensor have it, for example after a first step that failed on the others.
            DisagreementError, PeerLostError: if ranks pass different targets, or one is gone.
        """
        self._sharded.consolidate(to)

    def init_state(self) -> None:
        """Make the state of all trainable parameters if there is none on any rank. Collective.

        The state is that of a plain optimizer after a step with zero gradients and learning rate 0, which
        ``torch.distributed.checkpoint`` makes to learn which entries there are. No parameter, gradient or
        hyperparameter is changed, and no hook is called. If there is state, nothing happens.

        Raises:
            DisagreementError, PeerLostError: if ranks differ in their parameters, or one is gone.
            Exception: an error of any rank's step, on every rank.
        """
        self._sharded.init_state()

    def state_dict(self, *, keys: Keys = "indices") -> StateDict:
        """Return the state of the optimizer as this rank has it. Not collective, at any time.

        Args:
            keys: ``"names"`` for the names of the parameters in place of their indices.

        Returns:
            ``{"state": {index: entries}, "param_groups": [...]}``, in the form of the unsharded optimizer. If the state
            was consolidated to this rank since the last step, all of it, on the CPU. Otherwise this rank's own values
            (not copies), and placeholders for other ranks' values; or only placeholders if the state was consolidated
            to another rank. A placeholder is a tensor with a shape, a dtype and a device, which raises when read.

        Raises:
            ValueError: if ``keys`` is ``"names"``, and the optimizer was built from parameters without names.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = self._sharded.list_state()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return key_by_name(state_dict, self.param_groups) if check_keys(keys) == "names" else state_dict

    def load_state_dict(self, state_dict: StateDict, *, from_rank: int | None = None, keys: Keys = "indices") -> None:
        """Load a checkpoint: every rank takes what it owns. Collective.

        Args:
            state_dict: of the whole state, the same on every rank: from the plain optimizer, torch's
                ZeroRedundancyOptimizer, or this class at any world size; or what :meth:`state_dict` has returned on
                this rank, with the same plan. An empty one on every rank, without ``from_rank``, changes nothing; one
                with an empty ``"state"`` clears the state. It is not modified, and its tensors are not kept.
            from_rank: the group rank whose state dict all ranks load; it sends each rank its part. The other ranks pass
                an empty one.
            keys: ``"names"`` if its keys are names of parameters, which may be in another order then.

        Raises:
            TypeError, ValueError: if groups, parameters or entries do not fit this optimizer.
            DisagreementError: if ranks pass checkpoints that differ in structure or hyperparameters, or their
                models differ.
            Exception: any other error of a rank. In every case the optimizer is unchanged on every rank.
        """

        def read() -> StateDict:
            given = state_dict.copy() if isinstance(state_dict, dict) else state_dict
            for pre_hook in self._optimizer_load_state_dict_pre_hooks.values() if state_dict else ():
                changed = pre_hook(self, given)
                given = given if changed is None else changed
            return key_by_index(given, self.param_groups) if check_keys(keys) == "names" and given else given

        if self._sharded.load(read, from_rank):
            for post_hook in self._optimizer_load_state_dict_post_hooks.values():
                post_hook(self)
