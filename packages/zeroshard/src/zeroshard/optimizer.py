"""The sharded optimizer: a drop-in for ``torch.distributed.optim.ZeroRedundancyOptimizer``."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from zeroshard_comm import RankGroup, Traffic
from zeroshard_core import Cost, Plan, Strategy, numel

from zeroshard._torch_private import disable_dynamo
from zeroshard.compatibility import TorchNames
from zeroshard.elementwise import OptimizerFactory, check_shardable
from zeroshard.layout import Policy
from zeroshard.local_optimizer import Closure, sync_groups
from zeroshard.overlap.backward import BackwardFollower
from zeroshard.overlap.scheduler import StepMode
from zeroshard.param_groups import ParamGroup, read_group, read_groups
from zeroshard.sharded_optimizer import ShardedOptimizer
from zeroshard.state.consolidate import StateDict


class ZeroRedundancyOptimizer(TorchNames, Optimizer, Joinable):
    r"""Wrap any optimizer class and keep only this rank's share of its state (ZeRO stage 1).

    Every rank holds all parameters, and the optimizer state of the elements that it owns. :meth:`step` updates those
    with the user's own optimizer class and then brings every rank the others' new values. It expects gradients that
    are equal on all ranks, as DistributedDataParallel leaves them; results are then those of the unsharded optimizer.

    Constructing, :meth:`step`, :meth:`add_param_group`, :meth:`consolidate_state_dict` and :meth:`load_state_dict` are
    collective: all ranks of the group call them in the same order. Bad input, a rank that differs or one that fails is
    an error on every rank, raised before anything is changed.

    The algorithm is stage 1 of `ZeRO <https://arxiv.org/abs/1910.02054>`_.

    Args:
        params: tensors, ``(name, tensor)`` pairs, or dicts of param groups, in the same order on every rank.
        optimizer_class: the class of the local optimizer, or a ``functools.partial`` of it.
        process_group: the ranks that share the work; the default group if None.
        parameters_as_bucket_view: pack parameters into flat buffers, so that a step sends few large messages without
            copying. ``param.data`` then points into a buffer, without gaps if it had some.
        overlap_with_ddp: that a communication hook steps this optimizer during backward, see
            ``zeroshard_integrations.ddp``.
        partition: ``"whole"`` (each tensor has one owner; right for every optimizer), ``"split"`` (large tensors are
            cut evenly; elementwise optimizers only), ``"hybrid"`` (whole, except tensors larger than a fair share;
            elementwise only), or a strategy of your own, see :func:`zeroshard_core.partition`.
        cost: what a tensor weighs when tensors are dealt out; its number of elements by default.
        elementwise: declares that ``optimizer_class`` is elementwise, where that is not known.
        **defaults: arguments of ``optimizer_class``.

    Attributes:
        process_group: as given, or the default group.
        world_size: number of ranks in the group.
        rank: this rank in the group.
        global_rank: this rank in the default group.
        parameters_as_bucket_view: as given.
        initialized: whether the constructor has finished.

    Raises:
        TypeError: for params that are a tensor, not iterable or mixed, or a partition or cost that is none.
        ValueError: for an empty list, a dict without ``"params"``, an optimizer or partition that cannot be.
        DisagreementError: if ranks differ in tensors, order, shapes, dtypes, trainability, hyperparameters or settings.

    Example:
        >>> import os, tempfile, torch
        >>> import torch.distributed as dist
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
        partition: str | Strategy = "whole",
        cost: Cost = numel,
        elementwise: bool = False,
        **defaults: Any,  # noqa: ANN401 - arguments of any optimizer class
    ) -> None:
        self.initialized = False
        ranks = RankGroup.of(process_group)
        self.process_group, self.world_size = ranks.group, ranks.world_size
        self.rank, self.global_rank = ranks.rank, ranks.global_rank
        self.parameters_as_bucket_view, self._overlap_with_ddp = parameters_as_bucket_view, overlap_with_ddp
        policy = Policy(partition, cost, optimizer_class, elementwise, parameters_as_bucket_view, ranks.world_size)

        def read() -> list[ParamGroup]:
            check_shardable(optimizer_class)
            Optimizer.__init__(self, read_groups(params), dict(defaults))
            Joinable.__init__(self)
            return self.param_groups

        # Weakly: an optimizer that is let go is to be freed at once, with its memory.
        self._sharded = ShardedOptimizer(ranks, policy, defaults, read, weakref.ref(self))
        sync_groups(self.optim.param_groups, self.param_groups)
        # What schedulers look up in `defaults` is what the inner class fills in.
        self.defaults = self.optim.defaults
        self.initialized = True

    @staticmethod
    def profile_hook_step(func: Any) -> Any:  # noqa: ANN401 - as torch's
        """Wrap :meth:`step` as torch does, such that torch.compile calls it as it is."""
        return disable_dynamo(Optimizer.profile_hook_step(func))

    @property
    def optim(self) -> Optimizer:
        """The local optimizer, over this rank's shards."""
        return self._sharded.sharding.local.optim

    @property
    def plan(self) -> Plan:
        """Who owns what."""
        return self._sharded.sharding.layout.plan

    @property
    def traffic(self) -> Traffic:
        """Bytes, calls and waiting so far."""
        return self._sharded.traffic

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """The flat buffers that parameters are views of, 1-D; none without ``parameters_as_bucket_view``.

        Between and after the parameters lie elements that belong to none, and whose values mean nothing.
        """
        return self._sharded.sharding.sync.buffers

    @property  # type: ignore[override] # torch's annotation is narrower than its use
    def state(self) -> MutableMapping[Any, Any]:
        """State of the parameters that this rank owns (or owns a part of): the local optimizer's own dicts, not copies.

        What is written here is written to the local optimizer. The state of a part has the shape of its rows.
        After a step it is empty on no rank: where this rank holds no state, one parameter has an empty dict.
        """
        if hasattr(self, "_sharded"):
            return self._sharded.state
        # While torch's own constructor runs.
        early: defaultdict[Any, Any] = self.__dict__.setdefault("_early_state", defaultdict(dict))
        return early

    @state.setter
    def state(self, value: MutableMapping[Any, Any]) -> None:
        if hasattr(self, "_sharded"):
            self._sharded.state = value

    def step(self, closure: Closure | None = None, **kwargs: Any) -> Any:  # noqa: ANN401 - what the inner step takes and returns
        """Update this rank's shards and bring every rank the new values of the others'. Collective.

        What was done to parameters since the last step is followed: frozen or unfrozen, converted, ``.data`` rebound.

        Args:
            closure: re-evaluates the model and returns the loss. It may not unfreeze or convert parameters. That every
                rank gives one, or none does, is not checked: a rank without steps its shards with the gradients that
                are there.
            **kwargs: passed to the local optimizer's step.

        Returns:
            What the local optimizer's step returned, e.g. the closure's loss; None without a closure.

        Raises:
            DisagreementError: if ranks differ in their parameters' trainability, dtypes or memory formats.
            PeerLostError: if a rank is gone.
            RuntimeError: if a communication hook has stepped during backward, and this call does not belong to exactly
                one such backward, or hyperparameters have changed since; until a state is loaded.
            Exception: what a rank met, or its local step or a hook before it raised, on every rank. After a Ctrl-C in
                these all may go on; after one elsewhere the next call says what to do.
            In all cases but a lost peer, replicas are equal afterwards, but for parameters that a rank has converted.
        """
        return self._sharded.step(closure, kwargs)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients of all parameters so that their norm is at most ``max_norm``. Collective.

        The norm is that of all gradients together, as if they were one vector, and the same on all ranks; also where
        each rank holds those alone that it owns. As :func:`torch.nn.utils.clip_grad_norm_` over the parameters of all
        groups.

        Args:
            max_norm: the largest norm that is left as it is.
            norm_type: the p of the p-norm; ``inf`` for the largest magnitude.
            error_if_nonfinite: whether a norm that is infinite or NaN is an error.

        Returns:
            The norm before, 0-dim.

        Raises:
            ValueError: if a communication hook steps during backward, so that there is nothing left to clip.
            RuntimeError: if the norm is not finite, and that is to be an error; on every rank.
            DisagreementError: if ranks want other norms.
            PeerLostError: if a rank is gone.
        """
        return self._sharded.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    @property
    def takes_buckets(self) -> bool:
        """Whether gradients come bucket by bucket, from a communication hook."""
        return self._sharded.follower is not None

    def follow_backward(self, mode: StepMode) -> BackwardFollower:
        """Take gradients bucket by bucket from now on: for communication hooks. Collective, the first time.

        Args:
            mode: when shards are stepped.

        Raises:
            ValueError: if gradients are taken in another way already, or parameters cannot be exchanged in buckets.
        """
        return self._sharded.follow_backward(mode)

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register a hook that is called before each step, as in torch; what it raises on one rank, every rank raises.

        It is reported by the step, so that no rank waits: hooks after one that raised are not called, and no shard of
        its rank is stepped. What hooks for all optimizers (``register_optimizer_step_pre_hook``) and hooks after the
        step raise is not reported: that rank alone raises it.

        Args:
            hook: called with the optimizer, the positional arguments of its step (itself first) and the keyword
                arguments; returns None, or a tuple of both, to be used instead.
        """
        if self._overlap_with_ddp:
            raise ValueError(
                "this optimizer is stepped during backward by its communication hook, and a step pre-hook would be "
                "called after the step; use reduce_to_owner_hook"
            )
        return super().register_step_pre_hook(_reporting(hook))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, dealt out on top of what the ranks own already. Collective, at any time.

        Args:
            param_group: a dict with ``"params"`` and hyperparameters; it is copied, not modified.

        Raises:
            TypeError: if it is no dict, or holds something that is no tensor.
            ValueError: if ``"params"`` is missing, or a parameter is in a group already.
            DisagreementError: if ranks add different groups. The optimizer is as before then, on every rank.
        """
        register = super().add_param_group
        if self.initialized:
            self._sharded.add_param_group(lambda: register(read_group(param_group)))
        else:
            register(param_group)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring the state of all shards to the CPU memory of one rank, for :meth:`state_dict`. Collective.

        Args:
            to: the group rank that receives, an integer of any kind. The others hold nothing more than before.

        Raises:
            ValueError: if there is no such rank.
            StateMapError: if an entry of the state can be neither joined nor moved without pickle, or only some owners
                of a cut tensor have it, as after a first step that failed on the others.
            DisagreementError: if ranks name different targets.
            PeerLostError: if a rank is gone.
            Exception: if the param groups are not those of the local optimizer, or a hyperparameter cannot be copied.
        """
        self._sharded.consolidate(to)

    def state_dict(self) -> StateDict:
        """Return the state that was last consolidated to this rank, in the form of the unsharded optimizer's.

        Returns:
            ``{"state": {index: entries}, "param_groups": [...]}``, tensors on the CPU, hyperparameters as they were
            when the state was consolidated. Fresh containers, the tensors shared between calls.

        Raises:
            RuntimeError: if nothing was consolidated to this rank.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = self._sharded.consolidated()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a whole checkpoint: every rank checks all of it, and takes what it owns. Collective.

        A model that was converted, frozen or unfrozen since the last step is followed first, as a step does.

        Args:
            state_dict: from the plain optimizer, torch's ZeroRedundancyOptimizer, or this class at any world size; the
                same on every rank. It is not modified, and its tensors are not kept.

        Raises:
            TypeError: if it is no optimizer state.
            ValueError: for another number of groups or parameters, or entries that are missing, extra or misshapen.
            DisagreementError: if ranks were handed checkpoints that differ in structure or hyperparameters, or their
                models differ.
            Exception: whatever else a rank meets. In every case the optimizer is as before, on every rank.
        """

        def read() -> StateDict:
            given = dict(state_dict) if isinstance(state_dict, Mapping) else state_dict
            for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
                given = pre_hook(self, given) or given
            return given

        self._sharded.load(read)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def join_hook(self, **kwargs: Any) -> JoinHook:  # noqa: ANN401 - shared by all joinables
        """Return the hook by which ``Join`` lets a rank without data take part in the others' steps.

        Training goes on as if such a rank contributed zero gradients; hyperparameters that the others change are
        brought along. With gradients that DistributedDataParallel reduces, its model comes first:
        ``Join([ddp, optimizer])``.

        Args:
            **kwargs: arguments for all joinables of the context. ``divide_by_initial_world_size=False`` averages
                gradients over the ranks that still have data, also with the hooks of ``zeroshard_integrations.ddp``.

        Raises:
            ValueError: if the optimizer comes before a model that has its parameters.
            RuntimeError: if the optimizer is in a context of ``zeroshard_integrations.join`` already.
        """
        return self._sharded.join_hook(divide_by_running=not kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """The device on which ``Join`` counts the ranks that still run: that of the first parameter."""
        return self._sharded.sharding.params[0].device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The process group of this optimizer."""
        return self.process_group


def _reporting(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook whose error the next step reports; without the optimizer, which its hooks would keep alive."""

    def reporting(optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]] | None:  # noqa: ANN401 - as torch's hooks
        sharded: ShardedOptimizer = optimizer._sharded
        if sharded.hook_failure is not None:
            return None
        try:
            changed = hook(optimizer, args, kwargs)
            if changed is not None and not (isinstance(changed, tuple) and len(changed) == 2):
                raise RuntimeError(
                    f"a step pre-hook must return None or a tuple of (new_args, new_kwargs), but got {changed}"
                )
        except BaseException as error:  # noqa: BLE001 - every rank must hear of it, whatever it is, Ctrl-C too
            sharded.hook_failure = error
            return None
        return changed

    return reporting
