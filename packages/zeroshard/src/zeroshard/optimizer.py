"""The sharded optimizer: a drop-in for ``torch.distributed.optim.ZeroRedundancyOptimizer``."""

from __future__ import annotations

import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from zeroshard_comm import RankGroup, Traffic
from zeroshard_core import Cost, Plan, Strategy, numel

from zeroshard._torch_private import JoinConfig, join_config, set_join_config
from zeroshard.attendance import Call
from zeroshard.backward import BackwardFollower
from zeroshard.clipping import clip_over_ranks
from zeroshard.consolidation import StateDict, consolidate
from zeroshard.elementwise import OptimizerFactory, check_shardable
from zeroshard.engine import Engine
from zeroshard.join_hook import OptimizerJoinHook
from zeroshard.join_partners import partners_in_torch, refuse_before_model
from zeroshard.layout import Policy
from zeroshard.loading import Expectations, checked, digest_of, install, local_state, what_differs
from zeroshard.local import Closure, sync_groups
from zeroshard.param_groups import ParamGroup, read_group, read_groups
from zeroshard.pipeline import Pipeline, Stepping
from zeroshard.stateview import StateView
from zeroshard.uneven import UnevenInputs


class ZeroRedundancyOptimizer(Optimizer, Joinable):
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
        optim: the local optimizer.
        process_group: as given, or the default group.
        world_size: number of ranks in the group.
        rank: this rank in the group.
        global_rank: this rank in the default group.
        parameters_as_bucket_view: as given.
        initialized: whether the constructor has finished.
        plan: who owns what, a :class:`zeroshard_core.Plan`.
        traffic: bytes, calls and waiting so far, a :class:`zeroshard_comm.Traffic`.

    Raises:
        TypeError: for params that are a tensor, not iterable or mixed, or a partition or cost that is none; on every
            rank.
        ValueError: for an empty list, a dict without ``"params"``, an optimizer or partition that cannot be; on every
            rank.
        DisagreementError: if ranks differ in tensors, order, shapes, dtypes, trainability, hyperparameters or settings;
            on every rank.

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
        self.process_group = ranks.group
        self.world_size = ranks.world_size
        self.rank = ranks.rank
        self.global_rank = ranks.global_rank
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self.traffic = Traffic()
        self._overlap_with_ddp = overlap_with_ddp
        self._consolidated: StateDict | None = None
        self._holds_state = False
        self._hook_failure: BaseException | None = None
        self._follower: BackwardFollower | None = None
        policy = Policy(partition, cost, optimizer_class, elementwise, parameters_as_bucket_view, self.world_size)

        def read() -> list[ParamGroup]:
            check_shardable(optimizer_class)
            Optimizer.__init__(self, read_groups(params), dict(defaults))
            Joinable.__init__(self)
            return self.param_groups

        self._engine = Engine(ranks, self.traffic, policy, defaults, read)
        # Weakly: an optimizer that is let go is to be freed at once, with its memory.
        self_of = weakref.ref(self)
        self._uneven = UnevenInputs(
            self._engine, lambda: (optimizer := self_of()) is not None and join_config(optimizer).enable
        )
        self._expectations = Expectations(optimizer_class, defaults, elementwise=elementwise)
        sync_groups(self.optim.param_groups, self.param_groups)
        # What schedulers look up in `defaults` is what the inner class fills in.
        self.defaults = self.optim.defaults
        self.initialized = True

    # ------------------------------------------------------------------ reading

    @property
    def optim(self) -> Optimizer:
        """The local optimizer, over this rank's shards."""
        return self._engine.local.optim

    @property
    def plan(self) -> Plan:
        """Who owns what."""
        return self._engine.layout.plan

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """The flat buffers that parameters are views of, 1-D; none without ``parameters_as_bucket_view``.

        Between and behind the parameters lie elements that belong to none, and whose values mean nothing.
        """
        return self._engine.replicas.buffers

    @property  # type: ignore[override] # torch's annotation is narrower than its use
    def state(self) -> MutableMapping[Any, Any]:
        """State of the parameters that this rank owns (or owns a part of): the local optimizer's own dicts, not copies.

        What is written here is written to the local optimizer. The state of a part has the shape of its rows.
        After a step it is empty on no rank: where this rank holds no state, one parameter has an empty dict.
        """
        if not hasattr(self, "_engine"):
            early: defaultdict[Any, Any] = self.__dict__.setdefault("_early_state", defaultdict(dict))
            return early
        inner = self.optim.state
        placeholder = self._engine.params[0] if self._holds_state else None
        if (inner or placeholder is None) and not any(
            piece.is_stand_in for piece in self._engine.local.pieces.values()
        ):
            return inner
        return StateView(self._engine.local, placeholder)

    @state.setter
    def state(self, value: MutableMapping[Any, Any]) -> None:
        if not hasattr(self, "_engine"):
            self.__dict__["_early_state"] = value
            return
        by_param = {piece.param: piece.tensor for piece in self._engine.local.pieces.values()}
        replaced: defaultdict[Any, Any] = defaultdict(dict)
        replaced.update({by_param.get(key, key): entries for key, entries in value.items()})
        self.optim.state = replaced

    # ------------------------------------------------------------------ stepping

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
            Exception: what a rank met, or its local step or a hook before it raised, on every rank. After a Ctrl-C in
                these all may go on; after one elsewhere the next call says what to do.
            In all cases but a lost peer, replicas are equal afterwards, but for parameters that a rank has converted.
        """
        failure, self._hook_failure = self._hook_failure, None
        pipeline = self._engine.pipeline
        if pipeline is not None and pipeline.stepping is not Stepping.IN_STEP:
            # Nothing is sent from here: a Join context need not know, and an error is this rank's own.
            return self._step_after_backward(pipeline, closure, kwargs, failure)
        loss: Any = None
        if pipeline is not None and closure is not None:
            # Its backward reduces the gradients that are stepped: once, before any shard is.
            with torch.enable_grad():
                loss = closure()
            closure = None
        try:
            result = self._engine.step(self.param_groups, closure, kwargs, failure, lambda: self._attend_step(kwargs))
        finally:
            del failure
        self._uneven.calling = None
        self._uneven.stepped()
        self._holds_state = True
        return result if loss is None else loss

    def _begin_call(self, call: Call) -> None:
        """Tell a Join context that this rank is about to communicate; ``calling`` is set to None behind the call."""
        self._engine.refuse_interrupted()
        self._uneven.calling = call
        Join.notify_join_context(self)

    def _attend_step(self, arguments: Mapping[str, Any]) -> None:
        self._begin_call(Call.STEP)
        self._uneven.attend(Call.STEP, self.param_groups, arguments=arguments)

    def _refuse_joined(self, operation: str) -> None:
        """Raise on every rank if one of a Join context has run out of data. Collective inside a context."""
        self._begin_call(Call.OTHER)
        refusal = RuntimeError(f"{operation} needs all ranks, and one has run out of data: call it outside of Join")
        self._uneven.attend(Call.OTHER, self.param_groups, impossible=refusal)

    def _step_after_backward(
        self, pipeline: Pipeline, closure: Closure | None, arguments: Mapping[str, Any], failure: BaseException | None
    ) -> None:
        """Do nothing, since backward has stepped; refuse what comes too late."""
        pipeline.refuse_broken()
        if closure is not None or arguments:
            raise ValueError(
                "this optimizer is stepped during backward by its communication hook, so step() takes neither a "
                "closure nor arguments; call step() without them, or not at all, or use reduce_to_owner_hook"
            )
        if failure is not None:
            try:
                raise failure
            finally:
                del failure
        pipeline.refuse_unreduced()

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
        pipeline = self._engine.pipeline
        if pipeline is None:
            return torch.nn.utils.clip_grad_norm_(
                self._engine.params, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
            )
        if pipeline.stepping is not Stepping.IN_STEP:
            raise ValueError(
                "this optimizer is stepped during backward by its communication hook, so there is nothing left to "
                "clip; use reduce_to_owner_hook, and clip between backward() and step()"
            )
        self._begin_call(Call.CLIP)
        self._uneven.attend(Call.CLIP, self.param_groups, (max_norm, norm_type, error_if_nonfinite))
        norm = clip_over_ranks(
            self._engine.control,
            pipeline.gradients,
            max_norm,
            norm_type,
            self._engine.params[0].dtype,
            error_if_nonfinite=error_if_nonfinite,
        )
        self._uneven.calling = None
        return norm

    @property
    def takes_buckets(self) -> bool:
        """Whether gradients come bucket by bucket, from a communication hook."""
        return self._engine.pipeline is not None

    def follow_backward(self, stepping: Stepping) -> BackwardFollower:
        """Take gradients bucket by bucket from now on: for communication hooks, such as those for DDP.

        Args:
            stepping: when shards are stepped.

        Raises:
            ValueError: if gradients are taken in another way already, or parameters cannot be exchanged in buckets.
        """
        if self._follower is None or self._follower.stepping is not stepping:
            self._follower = BackwardFollower(self._engine, self._uneven, lambda: self.param_groups, stepping)
        return self._follower

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register a hook that is called before each step, as in torch; what it raises on one rank, every rank raises.

        It is reported by the step, so that nobody waits: hooks after one that raised are not called, and no shard of
        its rank is stepped. What hooks for all optimizers (``register_optimizer_step_pre_hook``) and hooks after the
        step raise is not reported: that rank alone raises it.

        Args:
            hook: called with the optimizer, the positional arguments of its step (itself first) and the keyword
                arguments; returns None, or a tuple of both, to be used instead.

        Returns:
            The handle that removes the hook.
        """
        if self._overlap_with_ddp:
            raise ValueError(
                "this optimizer is stepped during backward by its communication hook, and a step pre-hook would be "
                "called behind the step; use reduce_to_owner_hook"
            )

        # Not a method, and without this object: it would be kept alive by its own hooks.
        def guarded(optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]] | None:  # noqa: ANN401 - as torch's hooks
            if optimizer._hook_failure is not None:
                return None
            try:
                changed = hook(optimizer, args, kwargs)
                if changed is not None and not (isinstance(changed, tuple) and len(changed) == 2):
                    raise RuntimeError(
                        f"a step pre-hook must return None or a tuple of (new_args, new_kwargs), but got {changed}"
                    )
            except BaseException as error:  # noqa: BLE001 - every rank must hear of it, whatever it is, Ctrl-C too
                optimizer._hook_failure = error
                return None
            return changed

        return super().register_step_pre_hook(guarded)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, dealt out on top of what the ranks own already. Collective, at any time.

        Args:
            param_group: a dict with ``"params"`` and hyperparameters; it is copied, not modified.

        Raises:
            TypeError: if it is no dict, or holds something that is no tensor.
            ValueError: if ``"params"`` is missing, or a parameter is in a group already.
            DisagreementError: if ranks add different groups. The optimizer is as before then, on every rank.
        """
        if not self.initialized:
            super().add_param_group(param_group)
            return
        self._refuse_joined("add_param_group()")
        register = super().add_param_group
        self._engine.grow(self.param_groups, lambda: register(read_group(param_group)))
        self._uneven.calling = None

    # ------------------------------------------------------------------ checkpoints

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
        target = -1
        if not isinstance(to, bool):
            # NumPy's integers are ranks too.
            with suppress(Exception):
                target = operator.index(to)
        self._begin_call(Call.CONSOLIDATE)
        self._uneven.attend(Call.CONSOLIDATE, self.param_groups, (target,))
        self._consolidate(target, to)
        self._uneven.calling = None

    def _consolidate(self, target: int, to: object) -> None:
        """As :meth:`consolidate_state_dict`, also of a rank that has run out of data.

        Args:
            target: the rank, -1 if it is none.
            to: what was asked for.
        """
        failure: Exception | None = None
        operation = f"consolidate_state_dict(to={target})"
        if not 0 <= target < self.world_size:
            failure = ValueError(
                f"consolidate_state_dict(to={to!r}): `to` must be a group rank from 0 to {self.world_size - 1}"
            )
        try:
            self._engine.meet(operation, failure)
        finally:
            del failure
        self._consolidated = None
        self._consolidated = consolidate(
            self._engine.control, self._engine.local, self.plan, self.param_groups, target, operation
        )

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
        if self._consolidated is None:
            raise RuntimeError(
                f"rank {self.rank} has no consolidated optimizer state to give. Call "
                f"consolidate_state_dict(to={self.rank}) on all ranks beforehand, or state_dict() only on the rank "
                f"that the state was consolidated to."
            )
        state_dict: StateDict = {
            "state": {
                key: dict(entries) if isinstance(entries, dict) else entries
                for key, entries in self._consolidated["state"].items()
            },
            "param_groups": [
                {**group, "params": list(group["params"])} for group in self._consolidated["param_groups"]
            ],
        }
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
        self._refuse_joined("load_state_dict()")
        state_dict = dict(state_dict) if isinstance(state_dict, Mapping) else state_dict
        failure: Exception | None = None
        mine: dict[Any, Any] = {}
        by_index: dict[Any, Any] = {}
        layout, digest = self._engine.layout, 0
        try:
            for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
                state_dict = pre_hook(self, state_dict) or state_dict
            layout = self._engine.followed(self.param_groups)
            by_index = checked(state_dict, self.param_groups, layout.plan, self._expectations)
            digest = digest_of(state_dict)
            mine = local_state(by_index, layout.plan, self.rank)
        except Exception as error:  # noqa: BLE001 - every rank must hear of it, whatever it is
            failure = error
        try:
            self._engine.control.check_consistent(
                "load_state_dict()",
                digest ^ layout.declaration.digest,
                error=failure,
                detail=layout.declaration.to_json,
                explain=what_differs,
            )
        finally:
            failure = None
        inner = self.optim
        before = (inner.state, inner.param_groups)
        try:
            if layout is not self._engine.layout:
                self._engine.adopt(layout, self.param_groups)
            before = (inner.state, [dict(group) for group in inner.param_groups])
            install(self._engine.local, mine, state_dict["param_groups"])
        except Exception as error:  # noqa: BLE001 - every rank must hear of it, whatever it is
            failure = error
        verdict = self._engine.control.inconsistency("the end of load_state_dict()", error=failure)
        if verdict is not None:
            inner.state, inner.param_groups = before
            try:
                raise verdict from (failure if verdict is not failure else None)
            finally:
                del verdict, failure
        sync_groups(inner.param_groups, self.param_groups)
        self._consolidated = None
        self._holds_state = True
        loaded = frozenset(key for key, entries in by_index.items() if isinstance(key, int) and entries)
        # Frozen tensors that now have state stay with the rank that holds it when they are unfrozen.
        self._engine.settle(loaded, self.param_groups)
        self._uneven.calling = None
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    # ------------------------------------------------------------------ uneven inputs

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
        if type(join_config(self)) is not JoinConfig:
            raise RuntimeError(
                "this optimizer is in a Join block already, and blocks cannot be nested: leave the outer one first"
            )
        partners = partners_in_torch()
        refuse_before_model(partners, self)
        self._uneven.begin(divide_by_running=not kwargs.get("divide_by_initial_world_size", True))
        self._uneven.partners = [item for item in partners if isinstance(item, DistributedDataParallel)]
        self._uneven.forget_what_others_used()
        return OptimizerJoinHook(
            self._uneven, lambda: self.param_groups, self._leave_join, lambda to: self._consolidate(to, to)
        )

    def _leave_join(self) -> None:
        set_join_config(self, None)
        self._uneven.end()

    @property
    def join_device(self) -> torch.device:
        """The device on which ``Join`` counts the ranks that still run: that of the first parameter."""
        return self._engine.params[0].device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The process group of this optimizer."""
        return self.process_group

    # ------------------------------------------------------------------ what must not happen

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # noqa: ANN401 - as in object
        """Refuse pickling and deep copies: a process group cannot be copied.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a ZeroRedundancyOptimizer cannot be pickled or deep-copied: it holds a process group and only this rank's "
            "share of the state. Save its state with consolidate_state_dict() and state_dict(), and load that into a "
            "new one"
        )

    # ------------------------------------------------------------------ names that other projects use

    @property
    def _param_to_rank(self) -> dict[torch.Tensor, int]:
        """Each parameter's owner; a cut parameter is listed with the owner of its first element."""
        return {param: self.plan.of_tensor(index)[0].rank for index, param in enumerate(self._engine.params)}

    def _partition_parameters(self) -> list[list[dict[str, Any]]]:
        """Per rank, the public param groups narrowed to the parameters of which it owns something."""
        owners = {
            param: {shard.rank for shard in self.plan.of_tensor(index)}
            for index, param in enumerate(self._engine.params)
        }
        return [
            [{**group, "params": [p for p in group["params"] if rank in owners[p]]} for group in self.param_groups]
            for rank in range(self.world_size)
        ]

    @staticmethod
    def _sync_param_groups(
        src_param_groups: Sequence[Mapping[str, Any]], dst_param_groups: list[dict[str, Any]]
    ) -> None:
        """Copy every attribute but the members from one list of groups to another."""
        sync_groups(src_param_groups, dst_param_groups)

    def _clear_cache(self) -> None:
        """Do nothing: nothing is cached that could be stale."""
