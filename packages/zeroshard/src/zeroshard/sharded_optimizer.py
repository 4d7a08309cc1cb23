"""All of a sharded optimizer that changes: the public class hands its calls to this one, and keeps nothing itself."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from zeroshard_comm import RankGroup, Traffic

from zeroshard._torch_private import JoinConfig, join_config, set_join_config
from zeroshard.clipping import clip_over_ranks
from zeroshard.joining.attendance import Call
from zeroshard.joining.hook import OptimizerJoinHook
from zeroshard.joining.partners import partners_in_torch, refuse_before_model
from zeroshard.joining.uneven import UnevenInputs
from zeroshard.layout import Policy
from zeroshard.local_optimizer import Closure
from zeroshard.overlap.backward import BackwardFollower
from zeroshard.overlap.scheduler import StepMode
from zeroshard.param_groups import ParamGroup
from zeroshard.sharding import Sharding
from zeroshard.state.consolidate import StateDict, consolidate
from zeroshard.state.load import load
from zeroshard.state.schema import StateSchema
from zeroshard.state.view import StateView
from zeroshard.step import StepCoordinator


class ShardedOptimizer:
    """Holds plan, local optimizer, steps and consolidated state of one public optimizer.

    Args:
        ranks: the group.
        policy: how tensors are dealt out.
        defaults: the user's keyword arguments for the optimizer class.
        read: reads and checks what the user handed in; returns the public param groups.
        public: returns the public optimizer, which may be gone.

    Attributes:
        sharding: the plan at work.
        traffic: bytes, calls and waiting so far.
        follower: takes gradients bucket by bucket, once they come that way.
        hook_failure: what the user's hooks before a step have raised.

    Raises:
        Exception: what any rank met, on every rank.
    """

    def __init__(
        self,
        ranks: RankGroup,
        policy: Policy,
        defaults: Mapping[str, Any],
        read: Callable[[], list[ParamGroup]],
        public: Callable[[], Any],
    ) -> None:
        self.traffic = Traffic()
        self.sharding = Sharding(ranks, self.traffic, policy, defaults, read)
        self.follower: BackwardFollower | None = None
        self.hook_failure: BaseException | None = None
        self._public, self._ranks = public, ranks
        self._coordinator = StepCoordinator(self.sharding)
        # Not methods: what is handed on would keep this object alive.
        self._groups = partial(_groups_of, public)
        self._joining = UnevenInputs(self._coordinator, self._groups, partial(_is_in_context, public))
        self._schema = StateSchema(policy.factory, defaults, elementwise=policy.elementwise)
        self._consolidated: StateDict | None = None

    # ------------------------------------------------------------------ state

    @property
    def state(self) -> MutableMapping[Any, Any]:
        """State of what this rank owns, under the public parameters."""
        local = self.sharding.local
        inner = local.optim.state
        placeholder = self.sharding.params[0] if self._coordinator.has_state else None
        if (inner or placeholder is None) and not any(shard.is_detached for shard in local.shards.values()):
            return inner
        return StateView(local, placeholder)

    @state.setter
    def state(self, value: MutableMapping[Any, Any]) -> None:
        local = self.sharding.local
        tensor_of = {shard.param: shard.tensor for shard in local.shards.values()}
        replaced: defaultdict[Any, Any] = defaultdict(dict)
        replaced.update({tensor_of.get(key, key): entries for key, entries in value.items()})
        local.optim.state = replaced

    def consolidate(self, to: object) -> None:
        """Bring the state of all ranks to one."""
        target = -1
        if not isinstance(to, bool):
            # NumPy's integers are ranks too.
            with suppress(Exception):
                target = operator.index(to)  # type: ignore[arg-type] # that is what is tried
        self._begin_call(Call.CONSOLIDATE)
        self._joining.attend(Call.CONSOLIDATE, self._groups(), (target,))
        self._consolidate(target, to)
        self._joining.calling = None

    def _consolidate(self, target: int, to: object) -> None:
        """As :meth:`consolidate`, also of a rank that has run out of data."""

        def release() -> None:
            self._consolidated = None

        with self._coordinator.guard.exchange():
            self._consolidated = consolidate(self.sharding, self._groups(), target, to, release)

    def consolidated(self) -> StateDict:
        """Return a state dict with containers of its own, of the state that was last consolidated to this rank."""
        if self._consolidated is None:
            rank = self._ranks.rank
            raise RuntimeError(
                f"rank {rank} has no consolidated optimizer state to give. Call consolidate_state_dict(to={rank}) on "
                f"all ranks beforehand, or state_dict() only on the rank that the state was consolidated to."
            )
        state, groups = self._consolidated["state"], self._consolidated["param_groups"]
        return {
            "state": {key: dict(value) if isinstance(value, dict) else value for key, value in state.items()},
            "param_groups": [{**group, "params": list(group["params"])} for group in groups],
        }

    def load(self, read: Callable[[], Mapping[str, Any]]) -> None:
        """Load a whole state dict on all ranks, or on none."""
        self._refuse_joined("load_state_dict()")
        load(self.sharding, self._groups(), self._schema, read)
        self._consolidated, self._coordinator.has_state = None, True
        self._joining.calling = None
        if self.follower is not None:
            self.follower.begin_anew()

    # ------------------------------------------------------------------ stepping

    def step(self, closure: Closure | None, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401 - as the inner step
        """Make a step, or check the one that backward has made."""
        failure, self.hook_failure = self.hook_failure, None
        try:
            follower, loss = self.follower, None
            if follower is not None and follower.mode is not StepMode.IN_STEP:
                # Nothing is sent from here: a Join context need not know, and an error is this rank's own.
                return self._step_after_backward(follower, closure, arguments, failure)
            if follower is not None and closure is not None:
                # Its backward reduces the gradients that are stepped: once, before any shard is.
                try:
                    with torch.enable_grad():
                        loss = closure()
                except Exception as error:  # noqa: BLE001 - every rank must hear of it, whatever it is
                    failure = failure or error
                closure = None
            groups = self._groups()

            def attend() -> None:
                self._begin_call(Call.STEP)
                self._joining.attend(Call.STEP, groups, arguments=arguments)

            result = self._coordinator.step(groups, closure, arguments, failure, attend)
        finally:
            del failure
        self._joining.calling = None
        self._joining.stepped()
        return result if loss is None else loss

    def _step_after_backward(
        self,
        follower: BackwardFollower,
        closure: Closure | None,
        arguments: Mapping[str, Any],
        failure: BaseException | None,
    ) -> None:
        """Do nothing, since backward has stepped; refuse what comes too late."""
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
        follower.on_step()

    def clip_grad_norm_(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> torch.Tensor:
        """Scale the gradients of all parameters."""
        params = self.sharding.params
        if self.follower is None:
            return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
        if self.follower.mode is not StepMode.IN_STEP:
            raise ValueError(
                "this optimizer is stepped during backward by its communication hook, so there is nothing left to "
                "clip; use reduce_to_owner_hook, and clip between backward() and step()"
            )
        self._begin_call(Call.CLIP)
        self._joining.attend(Call.CLIP, self._groups(), (max_norm, norm_type, error_if_nonfinite))
        norm = clip_over_ranks(
            self.sharding.control,
            self.follower.scheduler.owned_gradients,
            max_norm,
            norm_type,
            params[0].dtype,
            error_if_nonfinite=error_if_nonfinite,
        )
        self._joining.calling = None
        return norm

    def follow_backward(self, mode: StepMode) -> BackwardFollower:
        """Take gradients bucket by bucket from now on."""
        if self.follower is None:
            self.follower = BackwardFollower(self._coordinator, self._joining, self._groups, mode)
            self.follower.scheduler.gradients.divides_by_running = self._joining.divides_by_running
        elif self.follower.mode is not mode:
            raise ValueError(
                f"a communication hook steps this optimizer {self.follower.mode.value!r} already, and cannot step it "
                f"{mode.value!r} too; build a new optimizer for another hook"
            )
        return self.follower

    def add_param_group(self, append: Callable[[], None]) -> None:
        """Take in a new param group on all ranks, or on none."""
        self._refuse_joined("add_param_group()")
        follower = self.follower
        is_noted = follower is not None and follower.has_same_hyperparameters()
        with self._coordinator.guard.exchange():
            self.sharding.grow(self._groups(), append)
        if follower is not None and is_noted:
            # Those of the new group are no change.
            follower.note_hyperparameters()
        self._joining.calling = None

    # ------------------------------------------------------------------ uneven inputs

    def join_hook(self, *, divide_by_running: bool) -> JoinHook:
        """Enter a Join context."""
        public = self._public()
        if type(join_config(public)) is not JoinConfig:
            raise RuntimeError(
                "this optimizer is in a Join block already, and blocks cannot be nested: leave the outer one first"
            )
        partners = partners_in_torch()
        refuse_before_model(partners, public)
        self._joining.begin(divide_by_running=divide_by_running)
        self._joining.partners = [item for item in partners if isinstance(item, DistributedDataParallel)]
        self._joining.forget_what_others_used()
        return OptimizerJoinHook(self._joining, self._groups, self._leave_join, lambda to: self._consolidate(to, to))

    def _leave_join(self) -> None:
        public = self._public()
        if public is not None:
            set_join_config(public, None)
        self._joining.end()

    def _begin_call(self, call: Call) -> None:
        """Tell a Join context that this rank is about to communicate; ``calling`` is set to None after the call."""
        self._coordinator.guard.check()
        self._joining.calling = call
        public: Joinable = self._public()
        Join.notify_join_context(public)

    def _refuse_joined(self, operation: str) -> None:
        """Raise on every rank if one of a Join context has run out of data. Collective inside a context."""
        self._begin_call(Call.OTHER)
        refusal = RuntimeError(f"{operation} needs all ranks, and one has run out of data: call it outside of Join")
        self._joining.attend(Call.OTHER, self._groups(), impossible=refusal)


def _groups_of(public: Callable[[], Any]) -> list[ParamGroup]:
    optimizer = public()
    return optimizer.param_groups if optimizer is not None else []


def _is_in_context(public: Callable[[], Any]) -> bool:
    optimizer = public()
    return optimizer is not None and join_config(optimizer).enable
