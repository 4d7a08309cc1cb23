"""Holds the state of one sharded optimizer, and is the entry of every collective call."""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from zeroshard_comm import Coordinator, DifferentCallsError, PeerLostError, Position, RankGroup, Traffic, agreed

from zeroshard.clipping import clip_over_ranks
from zeroshard.debug.checks import StepChecks
from zeroshard.debug.describe import OptimizerDescription, describe
from zeroshard.grads.bucket import BucketState
from zeroshard.grads.early_steps import EarlySteps
from zeroshard.grads.exchange import GradExchange, StepCalls, StepMode
from zeroshard.guard import Guard
from zeroshard.join import Call, JoinState
from zeroshard.local.optimizer import Closure, LocalOptimizer, sync_groups
from zeroshard.local.train_mode import send_groups, versions_of
from zeroshard.param_buffers import ParamBuffers, broadcast_all
from zeroshard.plan.costs import with_classes
from zeroshard.plan.group_classes import GroupClass, names_of
from zeroshard.plan.groups import (
    ParamGroup,
    active_mask,
    check_capture,
    check_members,
    check_memory,
    parameters_of,
    same_place,
)
from zeroshard.plan.hyperparameters import Hyperparameters, settings_of
from zeroshard.plan.layout import Layout, Policy, Seen, first_layout, next_layout, renamed, same_shards, with_settings
from zeroshard.state.checkpoints import Checkpoints, LayoutCalls
from zeroshard.state.initialize import is_torchs_own_step
from zeroshard.state.listing import StateDict, list_state
from zeroshard.state.metadata import StateMetadata
from zeroshard.step import agree_to_begin, broadcast_and_agree, update

_logger = logging.getLogger(__name__)


class Engine:
    """Holds groups, layout, local optimizer, parameter buffers and state metadata of one public optimizer.

    It adopts another plan after all ranks agree on it. Objects that the engine holds refer to it weakly.

    Args:
        ranks: the ranks of the process group.
        policy: how to partition tensors, without the classes of the groups.
        name: the name of the constructor's optimizer class.
        read: reads and checks the user's arguments; returns the public param groups, and the class of each.

    Attributes:
        coordinator: the channel of the ranks' agreements.
        traffic: counts bytes, calls and seconds of waiting.
        policy: how to partition tensors, with the class of each group and the names of parameters.
        layout: the owners of all tensors, and which tensors are active.
        local: the local optimizer.
        buffers: the memory of the parameters, and their broadcast.
        hyperparameters: the hyperparameters that must be equal on all ranks.
        metadata: lists the state of all ranks.
        checkpoints: saves and loads the state.
        join: announces calls inside Join.
        exchange: reduces gradients bucket by bucket; None until a communication hook is registered, or first called.
        debugging: logs or checks every step; None if debugging is off.
        guard: keeps errors that outlive a call; the context of every exchange.
        last_mode: the last of ``train`` and ``eval`` that was called; empty before.

    Raises:
        Exception: an error of any rank in reading or planning, on every rank.
        DisagreementError: if ranks differ in their plans or settings, on every rank.
    """

    def __init__(
        self,
        ranks: RankGroup,
        policy: Policy,
        name: str,
        read: Callable[[], tuple[list[ParamGroup], Sequence[GroupClass]]],
    ) -> None:
        self.traffic, self.policy = Traffic(), policy
        self.coordinator = coordinator = Coordinator(ranks, self.traffic)
        self.exchange: GradExchange | None = None
        self.guard, self.last_mode = Guard(coordinator), ""
        with agreed(coordinator, "ZeroRedundancyOptimizer()") as proposal:
            groups, classes = read()
            policy = with_classes(policy, classes, groups)
            self.policy, self.layout = policy, first_layout(policy, groups)
            self.local = LocalOptimizer(policy, groups, self.layout.plan, ranks.rank)
            if policy.has_several:
                # Each class fills in its own defaults.
                sync_groups(self.local.optim.param_groups, groups)
            proposal.set(with_settings(self.layout, settings_of(groups, self.local.optim.defaults)))
            proposal.flag = bool(self.local.optim.state)
        begins_with_state = coordinator.flagged
        coordinator.position = Position(ranks.context.number_optimizer(), name, 0)
        self.buffers = ParamBuffers(coordinator, as_bucket_view=policy.as_bucket_view)
        self.hyperparameters = Hyperparameters()
        self.hyperparameters.update(groups)
        self._lay_out()
        weak = weakref.proxy(self)
        self.metadata = StateMetadata(coordinator, self.local)
        self.join = JoinState(
            coordinator,
            self.local,
            self.hyperparameters,
            step=lambda arguments: weak.apply_step(arguments),
            consolidate=lambda target: weak.apply_consolidation(target),
        )
        if begins_with_state:
            self.metadata.exchange("ZeroRedundancyOptimizer()")
        self.debugging: StepChecks | None = None
        if policy.debug_level != "OFF":
            self.debugging = StepChecks(coordinator, self.local, compares=policy.debug_level == "DETAIL")
        calls = LayoutCalls(lambda: weak.layout, lambda: weak.update_layout(), lambda layout: weak.adopt(layout))
        self.checkpoints = Checkpoints(coordinator, self.local, self.metadata, self.hyperparameters, calls)
        if _logger.isEnabledFor(logging.INFO):
            _logger.info("%s", self.describe().to_text())

    def describe(self) -> OptimizerDescription:
        """Return a description of the optimizer as it is now. Not collective."""
        return describe(self.coordinator, self.policy, self.layout, self.local, self.metadata, self._buckets())

    def _buckets(self) -> Sequence[BucketState]:
        return list(self.exchange.buckets.by_index.values()) if self.exchange is not None else []

    # ------------------------------------------------------------------ the begin of every collective call

    def collective(self) -> Guard:
        """Return the context of a call in which all ranks exchange something, and which Join refuses."""
        self._announce(Call.REFUSED)
        return self.guard

    def _announce(self, call: Call, **arguments: Any) -> None:  # noqa: ANN401 - of any call
        """Announce a call inside Join. Raises if an earlier exchange is incomplete."""
        self.guard.check_broken()
        if self.join.context is not None:
            self.join.announce(call, **arguments)

    # ------------------------------------------------------------------ the layout

    @property
    def groups(self) -> list[ParamGroup]:
        """The public param groups."""
        return self.local.groups

    @groups.setter
    def groups(self, groups: list[ParamGroup]) -> None:
        self.local.groups = groups

    @property
    def params(self) -> Sequence[torch.Tensor]:
        """All parameters, by tensor index."""
        return self.local.params

    def update_layout(self) -> Layout:
        """Return the layout that fits the user's changes since the last step.

        Copies hyperparameters to the local optimizer. Copies data that was rebound but not converted into its flat
        buffer; without one, lays out all parameters again at once, because that concerns no other rank. All ranks must
        agree on another layout before the engine adopts it.

        Raises:
            Exception: an error in the parameters or groups; the caller must report it to all ranks.
        """
        self.guard.check_allowed()
        check_capture(self.coordinator.ranks, self.params, self.layout.plan)
        check_members(self.groups, self.params)
        layout = self.current_layout()
        sync_groups(self.groups, self.local.optim.param_groups)
        return layout

    def current_layout(self) -> Layout:
        """Like :meth:`update_layout`, but only for the parameters."""
        layout = self.layout
        moved = self.buffers.moved()
        if moved and self.buffers.buffers:
            # Before values are copied apart: parameters that share memory now would not share it any more.
            check_memory(self.groups, active_mask(self.params))
        if moved and self.buffers.restore(layout.plan):
            self.local.rebind()
            moved = self.buffers.moved()
        if moved or active_mask(self.params) != layout.active:
            layout = next_layout(self.policy, layout, self.groups)
            if self.exchange is not None:
                self.exchange.buckets.check_layout(self.params, layout)
            if moved and all(map(same_place, self.layout.plan.tensors, layout.plan.tensors)):
                # Even before ranks agree, because values must arrive where parameters are now.
                self._lay_out()
            if layout.config.digest == self.layout.config.digest:
                layout = self.layout
            else:
                self.local.check_not_converted(self.layout.plan, layout.plan)
        self.local.masters.refresh()
        return layout

    def adopt(self, layout: Layout) -> None:
        """Adopt a layout on which all ranks agree. No-op if it is in use."""
        if layout is self.layout:
            return
        _logger.debug("rank %d adopts another layout", self.coordinator.ranks.rank)
        if not same_shards(layout.plan, self.layout.plan) or len(self.groups) != len(self.local.optim.param_groups):
            self.local.rebuild(self.groups, layout.plan, self.policy.classes)
        else:
            self.local.use(self.groups, layout.plan)
        self.layout = layout
        self._lay_out()

    def to_text(self) -> str:
        """Return layout and hyperparameters as JSON, which ranks compare at the end of a step."""
        return with_settings(self.layout, self.hyperparameters.agreed).to_json()

    def _lay_out(self) -> None:
        self.buffers.lay_out(self.params, self.layout.plan, self.layout.active)
        self.local.rebind()
        self.local.masters.refresh()
        if self.exchange is not None:
            self.exchange.buckets.lay_out(self.layout)

    def ever_trained(self) -> tuple[bool, ...]:
        """Return for each tensor whether it was trainable in a step or has state on any rank; equal on all ranks."""
        tensors = self.layout.plan.tensors
        return tuple([spec.trainable or index in self.metadata for index, spec in enumerate(tensors)])

    def broadcast_params(self) -> None:
        """Broadcast the parameters that were :meth:`ever_trained`, outside of a step. Collective.

        Ranks must agree afterwards, because others may still be reading.
        """
        buffers = ParamBuffers(self.coordinator, as_bucket_view=False)
        buffers.lay_out(self.params, self.layout.plan, self.ever_trained())
        broadcast_all([buffers.broadcast])

    def add_param_group(self, append: Callable[[], GroupClass]) -> None:
        """Add a param group, which ``append`` checks and appends, on all ranks or on none. Collective."""
        exchange, early, before, policy = self.exchange, self.early_steps, len(self.groups), self.policy
        is_accepted = early is not None and early.has_same_hyperparameters()
        with self.collective():
            layout = self.layout
            try:
                with agreed(self.coordinator, "add_param_group()") as proposal:
                    proposal.set(layout.config)
                    self.guard.check_allowed()
                    self.current_layout()
                    classes = [*self.policy.classes, append()]
                    policy = with_classes(self.policy, classes, self.groups)
                    layout = next_layout(policy, layout, self.groups)
                    self.local.check_not_converted(self.layout.plan, layout.plan)
                    self.local.dry_run(self.groups, layout.plan, policy.classes)
                    if exchange is not None:
                        exchange.buckets.check_layout(parameters_of(self.groups), layout)
                    settings = settings_of(self.groups[before:], self.local.optim.defaults, first=before)
                    proposal.set(with_settings(layout, settings))
            except BaseException:
                del self.groups[before:]
                raise
            self.policy = policy
            self.adopt(layout)
            # Copy only the new group: the local optimizer does not have later edits of the other groups yet.
            sync_groups(self.local.optim.param_groups[before:], self.groups[before:])
            if self.coordinator.agree("add_param_group()", flag=self.metadata.has_changed()):
                self.metadata.exchange("add_param_group()")
        self.metadata.drop_consolidated()
        if early is not None and is_accepted:
            # The hyperparameters of the new group do not count as changed.
            early.accept_hyperparameters()

    # ------------------------------------------------------------------ steps

    @property
    def early_steps(self) -> EarlySteps | None:
        """Checks calls of ``step()`` if a communication hook steps during backward; else None."""
        return self.exchange.early_steps if self.exchange is not None else None

    def step(self, closure: Closure | None, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401 - as the inner step
        """Make a step, or check the one that backward has made."""
        exchange, early = self.exchange, self.early_steps
        may_be_torchs = exchange is not None and not closure and not (early is not None and early.has_stepped)
        if may_be_torchs and self.metadata.is_empty and is_torchs_own_step(self.params, self.groups):
            return self.init_state()
        if early is not None:
            # This sends nothing, so only this rank raises its errors.
            if closure is not None or arguments:
                raise ValueError(
                    "this optimizer is stepped during backward by its communication hook, so step() takes neither a "
                    "closure nor arguments; call step() without them, or not at all, or use reduce_to_owner_hook"
                )
            assert exchange is not None
            return exchange.accept_step()
        error: Exception | None = None
        inner = arguments
        if arguments and self.policy.has_several:
            error = TypeError(
                f"step() takes no keyword arguments with several optimizer classes, but got {', '.join(arguments)}"
            )
        self._announce(Call.STEP if closure is None else Call.REFUSED, **arguments)
        if closure is not None:
            try:
                with self.guard, torch.enable_grad():
                    loss = closure()
                inner = {**arguments, "closure": lambda: loss}
            except Exception as raised:  # noqa: BLE001 - the agreement raises any error on every rank
                error = raised
        return self.apply_step(inner, error)

    def look(self, *, in_backward: bool = False) -> Seen:
        """Return what the user changed since the last step, or an error, which the agreement raises on every rank."""
        if in_backward and self.buffers.moved():
            # Rebound data is copied into its buffer after the backward, which may still read the old values.
            return Seen(self.layout, is_new=True)
        try:
            if self.exchange is not None and not in_backward:
                self.exchange.prepare_step()
            layout = self.update_layout()
            self.local.check_gradients()
            if self.guard.refused:
                raise RuntimeError(self.guard.refused)
        except Exception as error:  # noqa: BLE001 - the agreement raises any error on every rank
            return Seen(self.layout, error=error)
        return Seen(layout, layout is not self.layout)

    def apply_step(self, arguments: Mapping[str, Any], error: Exception | None = None, seen: Seen | None = None) -> Any:  # noqa: ANN401 - as the inner step
        """Make a step. Collective.

        Args:
            arguments: keyword arguments of the inner step.
            error: an error of this rank before the step, which every rank raises.
            seen: the result of :meth:`look` when the backward began that may have stepped some buckets.

        Returns:
            The result of the inner step.

        Raises:
            DisagreementError: if models were changed differently, or hyperparameters (numbers, strings, lists and dicts
                of them) differ between ranks.
            PeerLostError: if a rank is gone.
            Exception: an error of any rank, on every rank. Replicas are equal then, except parameters that a rank has
                converted or exchanged.
        """
        with self.guard:
            return self._step(arguments, error, seen or self.look(), in_backward=seen is not None)

    def _step(self, arguments: Mapping[str, Any], error: Exception | None, seen: Seen, *, in_backward: bool) -> Any:  # noqa: ANN401 - as the inner step
        coordinator, digest, failure, result = self.coordinator, None, None, None
        error = error or seen.error
        try:
            digest = self.hyperparameters.update(self.groups)
        except Exception as raised:  # noqa: BLE001 - the agreement raises any error on every rank
            error = error or raised
        if not seen.is_agreed:
            self._agree_to_begin(seen.layout, error, in_backward=in_backward)
            error = None
        if coordinator.position is not None:
            coordinator.position = replace(coordinator.position, steps=coordinator.position.steps + 1)
        if self.exchange is not None:
            self.exchange.table.norms.forget()
        # Inside Join a rank without data gets only what it needs for a step.
        if self.debugging is not None and self.exchange is None and self.join.context is None:
            self.debugging.compare_gradients()
        self.adopt(seen.layout)
        self.metadata.drop_consolidated()
        try:
            if error is not None:
                raise error
            result = update(self.local, self.exchange, arguments, in_backward=in_backward)
        except Exception as raised:  # noqa: BLE001 - peers wait for this rank's values, and raise its error then
            failure = raised
        self._end_step(digest, failure, in_backward=in_backward)
        self.local.masters.record_written()
        sync_groups(self.local.optim.param_groups, self.groups)
        self.hyperparameters.record_written(self.groups)
        if self.debugging is not None:
            self.debugging.compare_params(self.layout.active, keeps_state=self.early_steps is not None)
            self.debugging.log([state.tensors for state in self._buckets()], lambda: self.describe().to_text())
        return result

    def _agree_to_begin(self, layout: Layout, error: Exception | None, *, in_backward: bool) -> None:
        try:
            agree_to_begin(self.coordinator, layout, self.exchange, error)
        except (PeerLostError, DifferentCallsError) as lost:
            if in_backward:
                # No rank will wait for messages that were sent early.
                self.guard.mark_broken(lost)
            # The others may be lost because of this rank's error, e.g. in collectives of a closure that raised here.
            if error is not None and isinstance(lost, PeerLostError):
                raise error from lost
            raise
        except Exception:
            # A hook may have stepped and sent buckets on some ranks; the others wait for the rest of them.
            if in_backward:
                self._end_step(None, None, in_backward=True)
            raise

    def _end_step(self, digest: int | None, failure: Exception | None, *, in_backward: bool) -> None:
        """Broadcast and agree; raise the error of any rank's update on every rank. Collective."""
        sent = self.exchange.broadcasts if self.exchange is not None and in_backward else []
        broadcasts = sent or [self.buffers.broadcast]
        try:
            found = broadcast_and_agree(self.coordinator, broadcasts, self.metadata, digest, self.to_text, failure)
        except Exception as raised:
            if self.exchange is not None:
                self.guard.mark_broken(raised)
            if failure is not None and isinstance(raised, PeerLostError):
                raise failure from raised
            raise
        if found is not None:
            raise found

    def clip_grad_norm_(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> torch.Tensor:
        """Scale the gradients of all parameters so that their norm is at most ``max_norm``."""
        if self.exchange is None:
            return torch.nn.utils.clip_grad_norm_(
                self.params, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
            )
        if self.early_steps is not None:
            raise ValueError(
                "this optimizer is stepped during backward by its communication hook, so there is nothing left to "
                "clip; use reduce_to_owner_hook, and clip between backward() and step()"
            )
        with self.guard:
            norm, factor = clip_over_ranks(
                self.coordinator,
                self.exchange.owned_gradients,
                self.params[0],
                max_norm,
                norm_type,
                error_if_nonfinite=error_if_nonfinite,
            )
        if factor is not None:
            self.exchange.table.norms.clipped(factor)
        return norm

    def train_or_eval(self, name: str) -> Callable[[], Any]:
        """Return a function that calls a method of the local optimizer on all ranks; AttributeError without it."""
        inner = self.local.optim
        if not callable(getattr(inner, name, None)):
            # Frameworks use hasattr().
            raise AttributeError(
                f"the local optimizer, of class {names_of(self.policy.classes)}, has no method {name}()"
            )

        def call() -> Any:  # noqa: ANN401 - what the local optimizer's returns
            with self.collective():
                return self._call_on_all_ranks(name)

        return call

    def _call_on_all_ranks(self, name: str) -> Any:  # noqa: ANN401 - what the local optimizer's returns
        """Call ``train`` or ``eval`` of the local optimizer; replicas are equal even after an error. Collective."""
        coordinator, local = self.coordinator, self.local
        with agreed(coordinator, f"{name}()") as proposal:
            layout = self.update_layout()
            proposal.set(layout.config)
        self.adopt(layout)
        self.hyperparameters.update(self.groups)
        last, self.last_mode, before = self.last_mode, "", versions_of(local)
        with agreed(coordinator, f"the end of {name}()"):
            try:
                result = getattr(local.optim, name)()
                self.last_mode = name
            finally:
                local.masters.round()
                # Frameworks call train() before every batch.
                is_alike = last == name == self.last_mode and before == versions_of(local)
                if (
                    coordinator.agree(f"what {name}() has changed", flag=not is_alike)
                    and not coordinator.is_single_rank
                ):
                    self.broadcast_params()
                    send_groups(coordinator, local)
                sync_groups(local.optim.param_groups, self.groups)
                self.hyperparameters.record_written(self.groups)
        return result

    def take_buckets(self, mode: StepMode, names: Mapping[torch.Tensor, str], *, norms: bool) -> GradExchange:
        """Reduce gradients bucket by bucket from now on. All ranks pass the same ``names``."""
        self.policy = replace(self.policy, names={param: names[param] for param in self.params if param in names})
        self.layout = renamed(self.policy, self.layout, self.groups)
        weak: Engine = weakref.proxy(self)
        calls = StepCalls(
            look=lambda in_backward: weak.look(in_backward=in_backward),
            step=lambda seen: weak.apply_step({}, seen=seen),
            checksum=lambda: weak.hyperparameters.update(weak.groups),
            edited_state=lambda: weak.debugging.edited_state() if weak.debugging is not None else "",
        )
        self.exchange = GradExchange(
            self.coordinator, self.guard, self.local, self.buffers, self.layout, calls, mode, norms=norms
        )
        return self.exchange

    # ------------------------------------------------------------------ state

    def consolidate(self, to: object) -> None:
        """Gather the state of all ranks on one rank."""
        target = -1
        if not isinstance(to, bool):
            # NumPy's integers are ranks too.
            with suppress(Exception):
                target = operator.index(to)  # type: ignore[arg-type] # that is what is tried
        self._announce(Call.CONSOLIDATE, target=target)
        self.apply_consolidation(target, to)

    def apply_consolidation(self, target: int, to: object = None) -> None:
        """Gather the state on a rank, after :meth:`consolidate` has announced the call inside Join."""
        with self.guard:
            self.checkpoints.consolidate(target, to)

    def list_state(self) -> StateDict:
        """List the whole state, without communication."""
        return list_state(self.local, self.metadata, self.hyperparameters)

    def init_state(self) -> None:
        """Make the state of all ranks if there is none."""
        with self.collective():
            self.checkpoints.init_state()

    def load(self, read: Callable[[], Mapping[str, Any]], from_rank: int | None, group: int | None = None) -> bool:
        """Load a state dict on all ranks, or on none; return False if there was nothing to load."""
        with self.collective():
            is_loaded = self.checkpoints.load(read, from_rank, group)
        if is_loaded:
            self.guard.refused = ""
            if self.early_steps is not None:
                self.early_steps.reset()
        return is_loaded
