"""The sharded optimizer: a drop-in for ``torch.distributed.optim.ZeroRedundancyOptimizer``.

Private attributes have the same names as in torch's class, because other projects read them. The engine holds all
mutable state, because frameworks copy the attributes of this object.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from zeroshard_comm import RankGroup, Traffic
from zeroshard_core import Cost, Level, Plan, Strategy

from zeroshard._torch_private import disable_dynamo
from zeroshard.debug.describe import OptimizerDescription
from zeroshard.engine import Engine
from zeroshard.grads.exchange import GradExchange
from zeroshard.grads.source import StepMode
from zeroshard.join import JoinState
from zeroshard.local.optimizer import Closure
from zeroshard.plan.eligibility import Coupled, OptimizerFactory, check_shardable, name_of
from zeroshard.plan.group_classes import GroupClass, adopting_dicts, names_of, take_class
from zeroshard.plan.groups import ParamGroup, hyperparameters_of, read_group, read_groups
from zeroshard.plan.layout import Policy
from zeroshard.state.classes import with_part
from zeroshard.state.listing import StateDict
from zeroshard.state.names import Keys, check_keys, key_by_index, key_by_name
from zeroshard.state.view import StateView

_logger = logging.getLogger(__name__)


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    r"""Wrap an optimizer class and keep only this rank's share of its state (ZeRO stage 1).

    Every rank holds all parameters, and the optimizer state of the parameters that it owns. :meth:`step` updates these
    with the given optimizer class and broadcasts the new values. Gradients must be equal on all ranks, as
    DistributedDataParallel leaves them; results then equal the unsharded optimizer's.

    All ranks of the group must construct it, and call the methods marked as collective, in the same order. If one rank
    has bad input, or ranks differ, every rank raises before anything is changed.

    The algorithm is stage 1 of `ZeRO <https://arxiv.org/abs/1910.02054>`_.

    Args:
        params: tensors, ``(name, tensor)`` pairs, or dicts of param groups, in the same order on every rank. A group
            may set its own ``optimizer_class``, with ``optimizer_defaults`` for its constructor, and its own ``cost``
            and ``elementwise``.
        optimizer_class: the class of the local optimizer, or a ``functools.partial`` of it.
        process_group: the process group whose ranks share the optimizer state; the default group if None.
        parameters_as_bucket_view: pack parameters into flat buffers, so that a step sends few large messages without
            copying. ``param.data`` then points into a buffer. If it is rebound to a tensor of the same shape, dtype and
            device, the next call copies the values back into the buffer; any other rebinding raises.
        overlap_with_ddp: whether a communication hook of ``zeroshard_integrations.ddp`` steps during backward.
        partition: ``"whole"`` (each tensor has one owner), ``"split"`` (large tensors are cut evenly; elementwise
            optimizers only), ``"level"`` or :func:`zeroshard_core.level` (keeps tensors of other classes whole and
            balances their work, and cuts tensors of elementwise classes to even out the state), or your own function,
            see :data:`zeroshard_core.Strategy`.
        cost: the cost of a tensor in the partition, as a function or a dict by name. The default is its number of
            elements; with several classes, or ``"level"``, the work of its update if its class is known.
        elementwise: declares that ``optimizer_class`` is elementwise, if zeroshard does not know it.
        coupled: ``"allow"`` accepts an optimizer class that couples tensors; each rank then sees only its own tensors.
        master_weights: step float32 copies of float16 and bfloat16 parameters, kept as state entry ``"master_param"``.
        **defaults: arguments of ``optimizer_class``, for groups of this class.

    Attributes:
        process_group, parameters_as_bucket_view: the process group in use, and the argument.
        world_size, rank: the size of the group, and the rank of this process in it.
        global_rank: the rank of this process in the default group.
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
        params: Any,  # noqa: ANN401 - checked by read_groups, because torch's annotation accepts more
        optimizer_class: OptimizerFactory,
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        partition: Literal["whole", "split", "level"] | Strategy | Level = "whole",
        cost: Cost | Mapping[str, float] | None = None,
        elementwise: bool = False,
        coupled: Coupled = "refuse",
        master_weights: bool = False,
        **defaults: Any,  # noqa: ANN401 - arguments of any optimizer class
    ) -> None:
        self.initialized, self._overlap_with_ddp = False, overlap_with_ddp
        _register(ZeroRedundancyOptimizer)
        ranks = RankGroup.of(process_group)
        self.process_group, self.world_size = ranks.group, ranks.world_size
        self.rank, self.global_rank = ranks.rank, ranks.global_rank
        self.parameters_as_bucket_view = views = parameters_as_bucket_view
        policy = Policy(
            partition,
            cost,
            views,
            ranks.world_size,
            coupled,
            master_weights,
            by_messages=("cpu",) if ranks.sends_tagged(torch.device("cpu")) else (),
        )

        self._constructors = constructors = GroupClass(optimizer_class, dict(defaults), elementwise)

        def read(adopt: Callable[[object, ParamGroup], ParamGroup]) -> tuple[list[ParamGroup], list[GroupClass]]:
            check_shardable(optimizer_class)
            given = [*params] if isinstance(params, Iterator) else params
            taken = [take_class(group, constructors) for group in read_groups(given)]
            groups = [group for group, _ in taken]
            if isinstance(next(iter(given)), dict):
                groups = [adopt(*each) for each in zip(given, groups, strict=True)]
            # Each class fills in its own defaults when it is built.
            Optimizer.__init__(self, groups, {})
            Joinable.__init__(self)
            return self.param_groups, [found for _, found in taken]

        with adopting_dicts() as adopt:
            self._engine = Engine(ranks, policy, name_of(optimizer_class), partial(read, adopt))
        self._state_view = StateView(self._engine.local, self._engine.metadata)
        self.defaults = self._engine.local.defaults  # as the class fills them in: schedulers look values up there
        self.initialized = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None or to zero, and free the memory of sharded gradients."""
        super().zero_grad(set_to_none)
        if self._engine.exchange is not None:
            self._engine.exchange.release()

    def step(self, closure: Closure | None = None, **kwargs: Any) -> Any:  # noqa: ANN401 - what the inner step takes and returns
        """Update this rank's shards and broadcast the new values. Collective.

        Between steps you may freeze, unfreeze or rebind parameters, and convert parameters that have no state. With
        ``parameters_as_bucket_view`` the step copies rebound data back into its buffer, and a conversion raises.

        Args:
            closure: re-evaluates the model and returns the loss. Pass a closure on all ranks or on none; this is not
                checked. It must not unfreeze or convert parameters.
            **kwargs: passed to the local optimizer's step.

        Returns:
            The result of the local optimizer's step, e.g. the closure's loss; None without a closure.

        Raises:
            DisagreementError, PeerLostError: if ranks differ in their parameters, or one is gone.
            RuntimeError: if a hook steps during backward, and there was not exactly one such backward since the last
                step(), or hyperparameters or gradients were changed after it; every step() raises until a state is
                loaded. Also if Ctrl-C has interrupted a collective call; then build a new optimizer.
            Exception: any other error of a rank, on every rank; errors of step hooks are raised only where they occur.
                Replicas are still equal, except for parameters that a rank has converted.
        """
        return self._engine.stepper.step(closure, kwargs)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients of all parameters so that their norm is at most ``max_norm``.

        Does the same as :func:`torch.nn.utils.clip_grad_norm_` over the parameters of all groups, even if each rank has
        only its parts of gradients, because of a communication hook or :func:`shard_gradients`. Then it is collective.

        Args:
            max_norm: the largest norm that is not scaled down.
            norm_type: the p of the p-norm; ``inf`` for the largest magnitude.
            error_if_nonfinite: whether to raise if the norm is infinite or NaN.

        Returns:
            The norm before clipping, as a 0-dim tensor on the gradients' device.

        Raises:
            ValueError: if a communication hook steps during backward, which leaves nothing to clip.
            RuntimeError: if the norm is not finite, and ``error_if_nonfinite`` is True.
            DisagreementError, PeerLostError: if ranks pass different arguments, or one is gone.
        """
        return self._engine.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register a hook that is called before each step, as in torch. Its errors are raised on this rank only.

        Args:
            hook: called with the optimizer, and the positional and keyword arguments of its step; may return new ones.
        """
        if self._overlap_with_ddp:
            raise ValueError(
                "a communication hook steps this optimizer during backward, so a step pre-hook would be called after "
                "the step; use reduce_to_owner_hook"
            )
        return super().register_step_pre_hook(hook)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, and choose their owners; other parameters keep theirs. Collective.

        Args:
            param_group: a dict with ``"params"`` and hyperparameters. As in torch, this dict becomes the group; if it
                has an ``optimizer_class`` or another option of this package, a copy of it does.

        Raises:
            TypeError, ValueError: if it is not such a dict, or a parameter is already in a group.
            DisagreementError: if ranks add different groups; then no rank adds one.
        """
        register, constructors = super().add_param_group, self._constructors
        if not self.initialized:
            register(param_group)
            return
        engine = self._engine

        def append(adopt: Callable[[object, ParamGroup], ParamGroup]) -> GroupClass:
            group, found = take_class(read_group(param_group), constructors)
            group = adopt(param_group, group)
            defaults = self.defaults
            if not all(each.is_stepped_with(constructors) for each in [*engine.local.classes, found]):
                # Otherwise torch would write defaults of other classes into the group.
                self.defaults = {}
                _logger.info("add_param_group(): %d parameters for %s", len(group["params"]), found.name)
            try:
                register(group)
            finally:
                self.defaults = defaults
            return found

        with adopting_dicts() as adopt:
            engine.add_param_group(partial(append, adopt))
        self.defaults = engine.local.defaults

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the state of all shards in the CPU memory of one rank, for :meth:`state_dict`. Collective.

        The rank keeps it until the next step, load or new group; until then the other ranks list only placeholders.

        Args:
            to: the rank in the process group that receives the state, an integer of any type. Other ranks need no extra
                memory.

        Raises:
            ValueError: if there is no such rank.
            StateMapError: if an entry of the state cannot be joined or cannot be sent without pickle, or if only some
                owners of a cut tensor have it, for example because the first step failed on the others.
            DisagreementError, PeerLostError: if ranks pass different targets, or one is gone.
        """
        self._engine.consolidate(to)

    def init_state(self) -> None:
        """Initialize the state of all trainable parameters if no rank has any. Collective.

        The state equals the plain optimizer's after a step with zero gradients and learning rate 0, which is how
        ``torch.distributed.checkpoint`` finds the entries. Parameters, gradients and hyperparameters are unchanged, and
        no hook is called. No-op if there is state.

        Raises:
            DisagreementError, PeerLostError: if ranks differ in their parameters, or one is gone.
            Exception: an error of any rank's step, on every rank.
        """
        self._engine.init_state()

    def state_dict(self, *, keys: Keys = "indices") -> StateDict:
        """Return the state of the optimizer as this rank has it. Not collective; call it at any time.

        Args:
            keys: ``"names"`` to use the names of parameters as keys in place of their indices.

        Returns:
            ``{"state": {index: entries}, "param_groups": [...]}``, in the form of the unsharded optimizer. If the state
            was consolidated to this rank since the last step, it has all values, on the CPU. Otherwise it has this
            rank's values (not copies) and placeholders for other ranks' values; or only placeholders if the state was
            consolidated to another rank. A placeholder is a tensor with shape, dtype and device that raises when read.

        Raises:
            ValueError: if ``keys`` is ``"names"``, and the optimizer was built from parameters without names.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = self._engine.list_state()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return key_by_name(state_dict, self.param_groups) if check_keys(keys) == "names" else state_dict

    def load_state_dict(
        self,
        state_dict: StateDict,
        *,
        from_rank: int | None = None,
        keys: Keys = "indices",
        group: int | None = None,
    ) -> None:
        """Load a checkpoint; every rank keeps the state that it owns. Collective.

        Args:
            state_dict: the whole state, equal on every rank: from the plain optimizer, torch's ZeroRedundancyOptimizer,
                or this class at any world size; or the result of :meth:`state_dict` on this rank, with the same plan.
                An empty dict on every rank, without ``from_rank``, changes nothing; a dict with an empty ``"state"``
                clears the state. It is not modified, and its tensors are not kept.
            from_rank: the group rank whose state dict all ranks load; it sends each rank its part. The other ranks pass
                an empty dict.
            keys: ``"names"`` if its keys are names of parameters; their order may then differ.
            group: the index of a param group. The checkpoint is a plain optimizer's, and is loaded into the groups that
                share this group's local optimizer; other groups keep their state. Not with ``from_rank`` or names.

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
            if group is not None and given:
                if from_rank is not None or keys != "indices":
                    raise ValueError("load_state_dict(group=...) supports neither from_rank nor keys='names'")
                return with_part(self._engine.list_state(), self.group_assignment, group, given)
            return key_by_index(given, self.param_groups) if check_keys(keys) == "names" and given else given

        if self._engine.load(read, from_rank, group):
            for post_hook in self._optimizer_load_state_dict_post_hooks.values():
                post_hook(self)

    @property
    def optim(self) -> Optimizer:
        """The local optimizer, over this rank's shards.

        Raises:
            AttributeError: if there are several, see :attr:`local_optimizers`.
        """
        first, *others = self.local_optimizers
        if others:
            raise AttributeError(
                f"this optimizer has {1 + len(others)} local optimizers, for {names_of(self._engine.local.classes)}: "
                f"use local_optimizers"
            )
        return first

    @property
    def local_optimizers(self) -> tuple[Optimizer, ...]:
        """The local optimizers, over this rank's shards: one for each combination of class and arguments."""
        return tuple(self._engine.local.members)

    @property
    def group_assignment(self) -> list[int]:
        """The index of each param group's local optimizer in :attr:`local_optimizers`."""
        return list(self._engine.local.assignment)

    @property
    def plan(self) -> Plan:
        """The owner of each tensor, or of each part of a cut tensor."""
        return self._engine.layouts.layout.plan

    @property
    def traffic(self) -> Traffic:
        """The bytes, calls and seconds of waiting counted so far."""
        return self._engine.coordinator.traffic

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """The flat buffers that parameters are views of, 1-D; elements between them are padding."""
        return self._engine.buffers.buffers

    def describe(self) -> OptimizerDescription:
        """Return the owners, the buckets of a communication hook, and the traffic so far. Not collective.

        ``print(optimizer)`` shows it as text; ``dataclasses.asdict()`` converts it to a dict.
        """
        return self._engine.describe()

    @property  # type: ignore[override] # torch annotates it narrowly
    def state(self) -> MutableMapping[Any, Any]:
        """The state of all parameters that have state.

        Entries of this rank's shards are the local optimizer's own dicts, not copies; a part has the shape of its rows.
        Other entries are placeholders, which have a shape but no values; reading them raises.
        """
        return self._state_view

    @state.setter
    def state(self, value: MutableMapping[Any, Any]) -> None:
        # torch's constructor sets it before there is an engine.
        if hasattr(self, "_engine"):
            self._state_view.replace(value)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups. The engine holds them, because wrappers copy this object's attributes."""
        # There is no engine while torch's constructor runs.
        found: list[dict[str, Any]] = (
            self._engine.local.groups if hasattr(self, "_engine") else vars(self)["param_groups"]
        )
        return found

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        if hasattr(self, "_engine"):
            self._engine.local.groups = value
        else:
            vars(self)["param_groups"] = value

    @staticmethod
    def profile_hook_step(func: Any) -> Any:  # noqa: ANN401 - as torch's
        """Wrap :meth:`step` as torch does, so that torch.compile does not trace it."""
        return disable_dynamo(Optimizer.profile_hook_step(func))

    def join_hook(self, **kwargs: Any) -> NoReturn:  # noqa: ANN401, ARG002 - shared by all joinables
        """Raise, because torch's ``Join`` is not supported; ``zeroshard_integrations.join.Join`` does not call this.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "torch's Join does not support zeroshard's optimizer: use zeroshard_integrations.join.Join, which takes "
            "the same arguments"
        )

    @property
    def join_device(self) -> torch.device:
        """The device on which ``Join`` counts the ranks that still have data: the first parameter's."""
        return self._engine.local.params[0].device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The process group of this optimizer."""
        return self.process_group

    @property
    def join_state(self) -> JoinState:
        """The state that a context of ``zeroshard_integrations.join`` sets and reads."""
        return self._engine.join

    @property
    def train(self) -> Callable[[], Any]:
        """Call the local optimizer's ``train()``, which schedule-free optimizers have. Collective.

        It broadcasts the parameters that it changes. A second call in a row broadcasts only if it has changed
        parameters or param groups again; it does not detect changes that it has made only through ``.data``.

        Raises:
            AttributeError: when the attribute is read, if the local optimizer's class has no such method.
            DisagreementError, PeerLostError: if ranks call different methods, or one is gone.
            Exception: an error of any rank's optimizer, on every rank; replicas are still equal.
        """
        return self._engine.train_or_eval("train")

    @property
    def eval(self) -> Callable[[], Any]:
        """Call the local optimizer's ``eval()``; see :attr:`train`. Collective."""
        return self._engine.train_or_eval("eval")

    @property
    def takes_buckets(self) -> bool:
        """True if a communication hook or :func:`shard_gradients` reduces gradients bucket by bucket."""
        return self._engine.exchange is not None

    @disable_dynamo
    def follow_backward(
        self,
        mode: StepMode,
        names: Mapping[torch.Tensor, str] = MappingProxyType({}),
        *,
        norms: bool = True,
    ) -> GradExchange:
        """Reduce gradients bucket by bucket from now on, for communication hooks. Only the first call is collective.

        Args:
            mode: when shards are stepped.
            names: the model's names, for errors about parameters that were passed without names; equal on all ranks.
            norms: whether ranks exchange the 2-norms of all gradients at the end of each backward, so that torch's
                functions for clipping work. The first call decides. Ignored if shards are stepped during backward.

        Raises:
            ValueError: if another mode is in use, ``overlap_with_ddp`` does not fit the mode, parameters cannot be
                exchanged in buckets, or the optimizer is in a Join block.
        """
        if self._engine.join.context is not None:
            raise ValueError(
                "the optimizer is in a Join block, where ranks without data cannot run a communication hook. "
                "With uneven data leave the hook out"
            )
        if self._overlap_with_ddp and mode is StepMode.IN_STEP:
            raise ValueError(
                "the optimizer was built with overlap_with_ddp=True, so a communication hook must step it: register "
                "hook_with_zero_step or hook_with_zero_step_interleaved, or build it without overlap_with_ddp"
            )
        if not self._overlap_with_ddp and mode is not StepMode.IN_STEP:
            raise ValueError(
                "a communication hook can step only an optimizer that was built with overlap_with_ddp=True: build it "
                "so, or register reduce_to_owner_hook, which leaves stepping to step()"
            )
        made = self._engine.for_hooks
        if made is None:
            return self._engine.take_buckets(mode, names, norms=norms)
        made.check_hook(mode)
        return made

    @property
    def _param_to_rank(self) -> dict[torch.Tensor, int]:
        """The owner of each parameter; for a cut parameter, the owner of its first element."""
        return {param: self.plan.of_tensor(index)[0].rank for index, param in enumerate(self._engine.local.params)}

    def _partition_parameters(self) -> list[list[dict[str, Any]]]:
        """Return, for each rank, the public param groups with only the parameters of which the rank owns a part."""
        owners = {p: {shard.rank for shard in self.plan.of_tensor(i)} for i, p in enumerate(self._engine.local.params)}
        return [
            [{**group, "params": [p for p in group["params"] if rank in owners[p]]} for group in self.param_groups]
            for rank in range(self.plan.world_size)
        ]

    @staticmethod
    def _sync_param_groups(
        src_param_groups: Sequence[Mapping[str, Any]], dst_param_groups: list[dict[str, Any]]
    ) -> None:
        """Copy hyperparameters from one list of groups to another."""
        for source, target in zip(src_param_groups, dst_param_groups, strict=True):
            target.update(hyperparameters_of(source))

    def _clear_cache(self) -> None:
        """Do nothing, because there is no cache."""

    def __repr__(self) -> str:
        if not hasattr(self, "_engine"):
            # The constructor has raised.
            return object.__repr__(self)
        return f"{type(self).__name__} of {self._engine.describe().to_text()}"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # noqa: ANN401 - as in object
        """Refuse pickling and deep copies, because a process group cannot be copied.

        Raises:
            TypeError: always.
        """
        advice = (
            ". Copying a DistributedDataParallel model copies the state of its communication hook, this optimizer: "
            "copy the module instead, as in AveragedModel(ddp.module)"
        )
        raise TypeError(
            "a ZeroRedundancyOptimizer cannot be pickled or deep-copied: it holds a process group and only this rank's "
            "share of the state. Save its state with consolidate_state_dict() and state_dict(), and load that into a "
            "new one" + (advice if self.takes_buckets else "")
        )


@cache
def _register(kind: type) -> None:
    """Register a class as a virtual subclass of torch's.

    Call it when the first optimizer is built, not when the class is defined, because importing torch's class takes most
    of a second. The first step would import the same modules anyway.
    """
    with warnings.catch_warnings():
        # The import warns, because torch is going to remove the class.
        warnings.simplefilter("ignore")
        try:
            from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
        except ImportError:
            return
    TorchZero.register(kind)
