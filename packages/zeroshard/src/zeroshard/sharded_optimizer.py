"""The mutable part of a sharded optimizer; the public class delegates to it."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from zeroshard_comm import RankGroup, Traffic

from zeroshard.clipping import clip_over_ranks
from zeroshard.debugging import step_debugging
from zeroshard.description import OptimizerDescription, describe
from zeroshard.joining import Call, Participant
from zeroshard.layout import Policy
from zeroshard.local_optimizer import Closure
from zeroshard.overlap.backward import BackwardFollower
from zeroshard.overlap.scheduler import StepMode
from zeroshard.param_groups import ParamGroup
from zeroshard.sharding import Sharding
from zeroshard.state.consolidate import consolidate, pack_groups
from zeroshard.state.initialize import init_state, is_torchs_own_step
from zeroshard.state.load import load
from zeroshard.state.metadata import StateMetadata
from zeroshard.state.partial import StateDict, list_state
from zeroshard.state.schema import StateSchema
from zeroshard.state.view import StateView
from zeroshard.step import StepCoordinator
from zeroshard.train_mode import TrainMode


class ShardedOptimizer:
    """Holds plan, local optimizer, steps and consolidated state of one public optimizer.

    Args:
        ranks: the group.
        policy: how tensors are dealt out.
        defaults: the user's keyword arguments for the optimizer class.
        read: reads and checks the user's arguments; returns the public param groups.

    Attributes:
        sharding: the plan at work.
        traffic: bytes, calls and waiting so far.
        follower: takes gradients bucket by bucket, once they come that way.
        joining: announces calls in Join contexts.

    Raises:
        Exception: an error of any rank, on every rank.
    """

    def __init__(
        self,
        ranks: RankGroup,
        policy: Policy,
        defaults: Mapping[str, Any],
        read: Callable[[], list[ParamGroup]],
    ) -> None:
        self.traffic = Traffic()
        self.sharding = Sharding(ranks, self.traffic, policy, defaults, read)
        self.follower: BackwardFollower | None = None
        self._ranks = ranks
        self._metadata = StateMetadata(self.sharding, leaves_objects=policy.leaves_objects)
        if self.sharding.begins_with_state:
            self._metadata.exchange("ZeroRedundancyOptimizer()")
        # Not by way of this object, which would never be freed.
        joining = self.joining = Participant(self.sharding)
        debugging = step_debugging(self.sharding, self._metadata, lambda: joining.exchange is not None)
        self._coordinator = StepCoordinator(self.sharding, self._metadata, debugging)
        self._train_mode, self._view = TrainMode(self.sharding), StateView(self.sharding, self._metadata)
        self._schema = StateSchema(policy, defaults)

    def describe(self) -> OptimizerDescription:
        """Return what this rank owns, holds and has sent, without communication."""
        return describe(self.sharding, self._metadata)

    # ------------------------------------------------------------------ state

    @property
    def state(self) -> MutableMapping[Any, Any]:
        """The state of all parameters: this rank's own, and placeholders."""
        local = self.sharding.local
        if self._ranks.world_size == 1 and not any(shard.is_detached for shard in local.shards.values()):
            return local.optim.state
        return self._view

    @state.setter
    def state(self, value: MutableMapping[Any, Any]) -> None:
        local = self.sharding.local
        tensor_of = {shard.param: shard.tensor for shard in local.shards.values()}
        replaced: defaultdict[Any, Any] = defaultdict(dict)
        others = {param for param in self.sharding.params if param not in tensor_of}
        replaced.update({tensor_of.get(key, key): entries for key, entries in value.items() if key not in others})
        local.optim.state = replaced

    def consolidate(self, to: object) -> None:
        """Bring the state of all ranks to one."""
        target = -1
        if not isinstance(to, bool):
            # NumPy's integers are ranks too.
            with suppress(Exception):
                target = operator.index(to)  # type: ignore[arg-type] # that is what is tried
        self._announce(Call.CONSOLIDATE, target=target)
        self.apply_consolidation(target, to)

    def apply_consolidation(self, target: int, to: object = None) -> None:
        """Like :meth:`consolidate`, with a checked rank."""
        metadata = self._metadata
        with self._coordinator.guard.exchange():
            metadata.consolidated = consolidate(self.sharding, target, to, metadata.drop_consolidated)
        metadata.consolidated_to = target

    def list_state(self) -> StateDict:
        """Return what was consolidated to this rank since the last step, in containers of its own; else list it."""
        whole = self._metadata.consolidated
        if whole is None:
            # If another rank has the consolidated state, only that rank gives values.
            lists_own = self._metadata.consolidated_to is None
            return list_state(self.sharding, self._metadata, self.sharding.groups, lists_own=lists_own)
        return {
            "state": {key: dict(value) if isinstance(value, dict) else value for key, value in whole.items()},
            # As they are now, as without sharding, and as the other ranks list them.
            "param_groups": pack_groups(self.sharding.groups),
        }

    def init_state(self) -> None:
        """Make the state of all ranks, if there is none."""
        with self.collective():
            init_state(self.sharding, self._metadata)

    def load(self, read: Callable[[], Mapping[str, Any]], from_rank: int | None) -> bool:
        """Load a state dict on all ranks, or on none; False if there was nothing to load."""
        with self.collective():
            is_loaded = load(self.sharding, self.sharding.groups, self._schema, self._metadata, read, from_rank)
        if is_loaded:
            self._metadata.drop_consolidated()
            if self.follower is not None:
                self.follower.begin_anew()
        return is_loaded

    # ------------------------------------------------------------------ stepping

    @property
    def steps_early(self) -> bool:
        """Whether a communication hook steps during backward."""
        return self.follower is not None and self.follower.scheduler.steps_early

    def step(self, closure: Closure | None, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401 - as the inner step
        """Make a step, or check the one that backward has made."""
        follower, loss, failure = self.follower, None, None
        may_be_torchs = follower is not None and not (closure or follower.has_stepped)
        if may_be_torchs and is_torchs_own_step(self.sharding, self._metadata):
            return self.init_state()
        if follower is not None and follower.mode is not StepMode.IN_STEP:
            # Nothing is sent here: Join contexts need not know, and errors are raised only on this rank.
            return self._step_after_backward(follower, closure, arguments)
        if follower is not None and closure is not None:
            # Its backward reduces the gradients: once, before any shard is stepped.
            try:
                with self._coordinator.guard.exchange(), torch.enable_grad():
                    loss = closure()
            except Exception as error:  # noqa: BLE001 - every rank must hear of it, whatever it is
                failure = error
            closure = None
        call = Call.STEP if closure is None else Call.REFUSED
        self._announce(call, **arguments)
        result = self.apply_step(arguments, closure, failure)
        return result if loss is None else loss

    def apply_step(
        self, arguments: Mapping[str, Any], closure: Closure | None = None, problem: Exception | None = None
    ) -> Any:  # noqa: ANN401 - as the inner step
        """Make a step; see :meth:`StepCoordinator.step`."""
        return self._coordinator.step(self.sharding.groups, closure, arguments, problem)

    def _step_after_backward(
        self, follower: BackwardFollower, closure: Closure | None, arguments: Mapping[str, Any]
    ) -> None:
        """Do nothing, since backward has stepped; refuse arguments that come too late."""
        if closure is not None or arguments:
            raise ValueError(
                "this optimizer is stepped during backward by its communication hook, so step() takes neither a "
                "closure nor arguments; call step() without them, or not at all, or use reduce_to_owner_hook"
            )
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
        asked = {"max_norm": max_norm, "norm_type": norm_type, "error_if_nonfinite": error_if_nonfinite}
        self._announce(Call.CLIP, **asked)
        return self.apply_clipping(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def apply_clipping(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> torch.Tensor:
        """Like :meth:`clip_grad_norm_`, for gradients that lie at their owners."""
        assert self.follower is not None
        control, source, dtype = self.sharding.control, self.follower.scheduler, self.sharding.params[0].dtype
        with self._coordinator.guard.exchange():
            return clip_over_ranks(control, source, max_norm, norm_type, dtype, error_if_nonfinite=error_if_nonfinite)

    def train_or_eval(self, name: str) -> Callable[[], Any]:
        """Return a function that calls this method of the local optimizer on all ranks; AttributeError if none."""
        self._train_mode.check(name)

        def call() -> Any:  # noqa: ANN401 - what the local optimizer's returns
            with self.collective():
                return self._train_mode.call(name)

        return call

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Around a call in which all ranks exchange something, and which Join refuses."""
        self._announce(Call.REFUSED)
        with self._coordinator.guard.exchange():
            yield

    def _announce(self, call: Call, **arguments: Any) -> None:  # noqa: ANN401 - of any call
        """Announce a call inside of Join, if earlier exchanges came to their end."""
        self._coordinator.guard.check()
        self.joining.announce(call, **arguments)

    def follow_backward(
        self, mode: StepMode, names: Mapping[torch.Tensor, str], *, norms: bool | Sequence[float]
    ) -> BackwardFollower:
        """Take gradients bucket by bucket from now on."""
        if self.follower is None:
            self.sharding.name(names)
            self.follower = BackwardFollower(self._coordinator, self.joining, mode, norms=norms)
        elif self.follower.mode is not mode:
            raise ValueError(
                f"a communication hook steps this optimizer {self.follower.mode.value!r} already, and cannot step it "
                f"{mode.value!r} too; build a new optimizer for another hook"
            )
        return self.follower

    def add_param_group(self, append: Callable[[], None]) -> None:
        """Take in a new param group on all ranks, or on none."""
        follower = self.follower
        is_noted = follower is not None and follower.has_same_hyperparameters()
        with self.collective():
            self.sharding.grow(self.sharding.groups, append)
            if self.sharding.control.agree("add_param_group()", flag=self._metadata.has_changed()):
                self._metadata.exchange("add_param_group()")
        self._metadata.drop_consolidated()
        if follower is not None and is_noted:
            # The hyperparameters of the new group do not count as changed.
            follower.note_hyperparameters()
