"""One step: look at the model, agree with the other ranks, update this rank's shards, broadcast them, agree once more.

The order is fixed: this rank looks at its parameters; all ranks agree that they are in the same step of the same
optimizer with the same layout, and that no rank has an error; each updates its shards and broadcasts them; and they
agree that this has succeeded on all ranks. If a hook steps each bucket as soon as it is reduced, ranks have agreed,
updated and broadcast during backward, in :mod:`zeroshard.grads.exchange`; the step then only finishes this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.profiler import record_function
from zeroshard_comm import Coordinator, DifferentCallsError, PeerLostError, check_config, explain_configs

from zeroshard.changes import Changes, Seen
from zeroshard.debug.checks import StepChecks
from zeroshard.grads.source import GradSource
from zeroshard.guard import Guard
from zeroshard.join import Call, JoinState
from zeroshard.layouts import Layouts
from zeroshard.local.optimizer import Closure, LocalOptimizer
from zeroshard.param_buffers import ParamBuffers, broadcast_all
from zeroshard.plan.layout import Layout, with_settings
from zeroshard.state.group_values import GroupValues
from zeroshard.state.initialize import is_torchs_own_step
from zeroshard.state.metadata import StateMetadata


@dataclass(eq=False)
class Stepper:
    """Makes the steps of one optimizer. The engine sets ``exchange``, which reduces gradients during backward."""

    coordinator: Coordinator
    guard: Guard
    local: LocalOptimizer
    layouts: Layouts
    buffers: ParamBuffers
    changes: Changes
    metadata: StateMetadata
    group_values: GroupValues
    join: JoinState
    debugging: StepChecks | None
    init_state: Callable[[], None]
    """Initializes the state of all ranks. Collective."""
    describe: Callable[[], str]
    exchange: GradSource | None = None

    def step(self, closure: Closure | None, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401 - as the inner step
        """Make a step, or check the one that backward has made. Collective."""
        exchange, local = self.exchange, self.local
        early = exchange.early_steps if exchange is not None else None
        may_be_torchs = exchange is not None and not closure and not (early is not None and early.has_stepped)
        if may_be_torchs and not self.metadata.described and is_torchs_own_step(local.params, local.groups):
            return self.init_state()
        if exchange is not None and early is not None:
            early.check_refused()
            try:
                if closure is not None or arguments:
                    raise ValueError(
                        "a communication hook steps this optimizer during backward, so step() takes neither a closure "
                        "nor arguments; call step() without them, or not at all, or use reduce_to_owner_hook"
                    )
                return exchange.accept_step()
            except Exception as raised:
                # No other rank knows of the error, because this call sends nothing else.
                self.coordinator.tell(raised)
                raise
        error: Exception | None = None
        if arguments and len(local.members) > 1:
            error = TypeError(
                f"step() takes no keyword arguments with several optimizer classes, but got {', '.join(arguments)}"
            )
        self.guard.check_broken()
        if self.join.context is not None:
            self.join.announce(Call.STEP if closure is None else Call.REFUSED, **arguments)
        if closure is not None:
            try:
                with self.guard, torch.enable_grad():
                    loss = closure()
                arguments = {**arguments, "closure": lambda: loss}
            except Exception as raised:  # noqa: BLE001 - the agreement raises any error on every rank
                error = raised
        return self.apply(arguments, error)

    def look(self, *, as_backward_begins: bool = False) -> Seen:
        """Prepare a step: return the layout that fits the model, or an error that the agreement raises on all ranks.

        If parameters have moved in memory, they are laid out again. If a backward has not ended, it is ended.
        """
        layout = self.layouts.layout
        if as_backward_begins and self.changes.moved():
            # Rebound data is copied into its buffer after the backward, which may still read the old values.
            return Seen(layout, is_new=True)
        try:
            if self.exchange is not None and not as_backward_begins:
                self.exchange.prepare_step()
            self.guard.check_allowed()
            self.guard.check_capture(self.local.params, layout.plan)
            found = self.layouts.update() if self.changes.in_model() else layout
            if self.local.masters.shards:
                self.local.masters.refresh()
            self.local.check_gradients()
            if self.guard.refused:
                raise RuntimeError(self.guard.refused)
        except Exception as error:  # noqa: BLE001 - the agreement raises any error on every rank
            return Seen(layout, error=error)
        return Seen(found, found is not layout)

    def apply(self, arguments: Mapping[str, Any], error: Exception | None = None, seen: Seen | None = None) -> Any:  # noqa: ANN401 - as the inner step
        """Make a step, and return the result of the inner step. Collective.

        If a rank has an error, every rank raises it; ``error`` is one that occurred before this call. Replicas are
        still equal, except for parameters that a rank has converted or replaced. If a backward may have stepped some
        buckets, ``seen`` is the result of :meth:`look` from when that backward began.
        """
        with self.guard:
            return self._apply(arguments, error, seen or self.look(), by_bucket=seen is not None)

    def _apply(self, arguments: Mapping[str, Any], error: Exception | None, seen: Seen, *, by_bucket: bool) -> Any:  # noqa: ANN401 - as the inner step
        coordinator, digest, failure, result = self.coordinator, None, None, None
        error = error or seen.error
        try:
            digest = self.changes.read_hyperparameters()
        except Exception as raised:  # noqa: BLE001 - the agreement raises any error on every rank
            error = error or raised
        if not seen.is_agreed:
            self._agree_to_begin(seen.layout, error, by_bucket=by_bucket)
            error = None
        if coordinator.position is not None:
            coordinator.position = replace(coordinator.position, steps=coordinator.position.steps + 1)
        if self.exchange is not None:
            self.exchange.table.norms.forget()
        # Inside Join a rank without data gets only the gradients that it needs for a step.
        if self.debugging is not None and self.exchange is None and self.join.context is None:
            self.debugging.compare_gradients()
        if seen.is_new:
            self.layouts.adopt(seen.layout)
        if self.metadata.consolidated_to is not None:
            self.metadata.drop_consolidated()
        if self.group_values.plan is not self.local.plan:
            self.group_values.follow_plan()
        if self.group_values.are_needed:
            self.group_values.begin_step()
        try:
            if error is not None:
                raise error
            result = self._update(arguments, by_bucket=by_bucket)
        except Exception as raised:  # noqa: BLE001 - peers wait for this rank's values, and then raise its error
            failure = raised
        self._end(digest, failure, by_bucket=by_bucket)
        self.changes.record_hyperparameters()
        if self.debugging is not None:
            is_early = self.exchange is not None and self.exchange.early_steps is not None
            buckets = self.exchange.states if self.exchange is not None else []
            self.debugging.compare_params(self.layouts.layout.active, keeps_state=is_early)
            self.debugging.log([state.tensors for state in buckets], self.describe)
        return result

    def _agree_to_begin(self, layout: Layout, error: Exception | None, *, by_bucket: bool) -> None:
        """Return if all ranks are about to make the same step and no rank has an error; raise otherwise. Collective."""
        once = None
        if self.exchange is not None:
            once = {"the checksum of operations on gradients after backward()": self.exchange.table.norms.checksum}
        try:
            with record_function("zeroshard::agree"):
                check_config(self.coordinator, "step()", layout.config, error=error, once=once)
        except (PeerLostError, DifferentCallsError) as lost:
            if by_bucket:
                # No rank will wait for messages that were sent early.
                self.guard.mark_broken(lost)
            # The others may be lost because of this rank's error, e.g. in collectives of a closure that raised here.
            if error is not None and isinstance(lost, PeerLostError):
                raise error from (error.__cause__ or error.__context__ or lost)
            raise
        except Exception:
            # A hook may have stepped and sent buckets on some ranks; the other ranks wait for the remaining buckets.
            if by_bucket:
                self._end(None, None, by_bucket=True)
            raise

    def _update(self, arguments: Mapping[str, Any], *, by_bucket: bool) -> Any:  # noqa: ANN401 - as the inner step
        """Update the shards that backward has not updated. Return the result of the inner step."""
        if self.exchange is not None and by_bucket and self.local.may_step_in_parts:
            self.local.copy_attributes()
            return self.exchange.step_rest(arguments)
        if self.exchange is not None:
            self.exchange.table.use()
        with record_function("zeroshard::update"):
            return self.local.step(arguments)

    def _end(self, digest: int | None, failure: Exception | None, *, by_bucket: bool) -> None:
        """Broadcast and agree; raise the error of any rank's update on every rank. Collective.

        A ``digest`` of None agrees with any other.
        """
        try:
            found = self._broadcast_and_agree(digest, failure, by_bucket=by_bucket)
        except Exception as raised:
            if self.exchange is not None:
                self.guard.mark_broken(raised)
            if failure is not None and isinstance(raised, PeerLostError):
                raise failure from (failure.__cause__ or failure.__context__ or raised)
            raise
        if found is not None:
            raise found

    def _broadcast_and_agree(
        self, digest: int | None, failure: Exception | None, *, by_bucket: bool
    ) -> Exception | None:
        """Broadcast all parameters, even after a failure. Return the error of any rank after a complete exchange."""
        coordinator, metadata, error, found = self.coordinator, self.metadata, failure, None
        sent = self.exchange.broadcasts if self.exchange is not None and by_bucket else []
        try:
            with record_function("zeroshard::broadcast"):
                broadcast_all(sent or [self.buffers.broadcast])
        except PeerLostError as lost:
            error = error or lost
        # Agree even if this rank waits for nothing, because others may still be reading its shards.
        with record_function("zeroshard::agree"):
            values, has_new_state = self.group_values, self.changes.in_entries() and metadata.has_changed()
            try:
                coordinator.agree(
                    "the end of step()",
                    digest,
                    error=error,
                    detail=self._to_text,
                    explain=explain_configs,
                    flag=(values.are_needed and values.have_changed()) or has_new_state,
                )
            except PeerLostError:
                raise
            except Exception as raised:  # noqa: BLE001 - the metadata is exchanged before it is raised
                found = raised
        is_new = coordinator.flagged
        if values.are_needed:
            is_new = values.end_step(is_shared=coordinator.flagged, has_new_state=has_new_state)
        if is_new:
            try:
                metadata.exchange("the state after step()")
            except ValueError:
                if found is None:
                    raise
        return found

    def _to_text(self) -> str:
        """Return layout and hyperparameters as JSON, which ranks compare at the end of a step."""
        return with_settings(self.layouts.layout, self.changes.agreed).to_json()
