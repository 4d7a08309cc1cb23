"""The engine of one sharded optimizer: what changes in it, and the entry of every collective call."""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from zeroshard_comm import Coordinator, PeerLostError, Position, RankGroup, Traffic, agreed

from zeroshard.clipping import clip_over_ranks
from zeroshard.debug.checks import StepChecks
from zeroshard.debug.describe import describe
from zeroshard.grads.early_steps import EarlySteps
from zeroshard.grads.exchange import GradExchange, StepMode
from zeroshard.join import Call, JoinState
from zeroshard.local.optimizer import Closure, LocalOptimizer, sync_groups
from zeroshard.local.train_mode import call_on_all_ranks
from zeroshard.param_buffers import ParamBuffers, broadcast_all
from zeroshard.plan.costs import with_classes
from zeroshard.plan.group_classes import GroupClass, names_of
from zeroshard.plan.groups import ParamGroup, active_mask, check_capture, check_members, parameters_of, same_place
from zeroshard.plan.hyperparameters import Hyperparameters, settings_of
from zeroshard.plan.layout import Layout, Policy, first_layout, next_layout, renamed, same_shards, with_settings
from zeroshard.state.check import StateSchema
from zeroshard.state.consolidate import consolidate
from zeroshard.state.initialize import init_state, is_torchs_own_step
from zeroshard.state.load import load
from zeroshard.state.metadata import StateMetadata
from zeroshard.step import Seen, step

_logger = logging.getLogger(__name__)


class Engine:
    """Groups, layout, local optimizer, parameter buffers and state metadata of one public optimizer.

    Another plan is adopted once all ranks agree on it. Objects that the engine holds refer to it weakly. Every
    exchange is made in a ``with`` block of the engine, which remembers whether it was completed.

    Args:
        ranks: the group.
        policy: how tensors are partitioned; without classes.
        name: of the constructor's optimizer class.
        read: reads and checks the user's arguments; returns the public param groups, and the class of each.

    Attributes:
        groups: the public param groups.
        coordinator: the channel of the ranks' agreements.
        traffic: bytes, calls and waiting so far.
        policy: as given, with the class of each group, and the names of parameters.
        layout: who owns what, and which tensors are active.
        params: all parameters, by tensor index.
        local: the local optimizer.
        buffers: where parameters lie, and how they are broadcast.
        hyperparameters: those that must be equal on all ranks.
        metadata: which state there is on all ranks.
        join: announces calls inside Join.
        exchange: takes gradients bucket by bucket; None until a communication hook is registered, or first called.
        debugging: logs, or checks every step; None if neither is set.
        broken: the error that every further call raises; None if all exchanges were completed.
        refused: why the loop was refused: it misused a hook, until a state is loaded; else empty.
        suspended: why parameters may not be stepped or loaded now, if they may not.
        last_mode: ``train`` or ``eval``, if that was called last.

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
        self.broken: RuntimeError | None = None
        self.refused = self.suspended = self.last_mode = ""
        with agreed(coordinator, "ZeroRedundancyOptimizer()") as proposal:
            self.groups, classes = read()
            groups, policy = self.groups, with_classes(policy, classes, self.groups)
            self.policy, self.layout = policy, first_layout(policy, groups)
            self.local = LocalOptimizer(policy, groups, self.layout.plan, ranks.rank)
            if policy.has_several:
                # Each class fills in its own.
                sync_groups(self.local.optim.param_groups, groups)
            proposal.set(with_settings(self.layout, settings_of(groups, self.local.optim.defaults)))
            proposal.flag = bool(self.local.optim.state)
        begins_with_state = coordinator.flagged
        coordinator.position = Position(ranks.context.number_optimizer(), name, 0)
        self.buffers = ParamBuffers(coordinator, as_bucket_view=policy.as_bucket_view)
        self.params = parameters_of(groups)
        self.hyperparameters = Hyperparameters()
        self.hyperparameters.update(groups)
        self._lay_out()
        weak = weakref.proxy(self)
        self.metadata, self.join = StateMetadata(weak), JoinState(weak)
        if begins_with_state:
            self.metadata.exchange("ZeroRedundancyOptimizer()")
        self.debugging = None if policy.debug_level == "OFF" else StepChecks(weak)
        self._schema = StateSchema()
        if _logger.isEnabledFor(logging.INFO):
            _logger.info("%s", describe(self).to_text())

    # ------------------------------------------------------------------ what every collective call begins with

    def collective(self) -> Engine:
        """Return the context of a call in which all ranks exchange something, and which Join refuses."""
        self._announce(Call.REFUSED)
        return self

    def __enter__(self) -> None:
        """Raise if an earlier exchange was left incomplete."""
        self.check_broken()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Remember if this exchange was left incomplete."""
        if error is not None and (isinstance(error, PeerLostError) or not isinstance(error, Exception)):
            self.mark_broken(error)

    def check_broken(self) -> None:
        """Raise a PeerLostError, or a RuntimeError if no rank was lost, if an exchange was left incomplete here."""
        if self.broken is not None:
            raise type(self.broken)(*self.broken.args)

    def mark_broken(self, error: BaseException) -> None:
        """Let :meth:`check_broken` raise from now on: a later message could be mistaken for one that is under way.

        If a rank was lost, or this one was interrupted (by a `BaseException` that is no `Exception`), no other rank
        waits for this one any more. An interruption of a single rank breaks nothing.
        """
        is_interruption, ranks = not isinstance(error, Exception), self.coordinator.ranks
        if is_interruption and self.coordinator.is_single_rank:
            return
        if is_interruption or isinstance(error, PeerLostError):
            ranks.close(error)
        if self.broken is None:
            kind = PeerLostError if isinstance(error, PeerLostError) else RuntimeError
            self.broken = kind(
                f"rank {ranks.rank}: an earlier call was not finished, and messages of it may still be "
                f"on their way: load a checkpoint and build the optimizer again, on a new process group. It was ended "
                f"by: {type(error).__name__ if is_interruption else error}"
            )

    def check_allowed(self) -> None:
        """Raise a RuntimeError if parameters may not be stepped, loaded or added now."""
        if self.suspended:
            raise RuntimeError(self.suspended)

    def _announce(self, call: Call, **arguments: Any) -> None:  # noqa: ANN401 - of any call
        """Announce a call inside of Join, if earlier exchanges came to their end."""
        self.check_broken()
        if self.join.context is not None:
            self.join.announce(call, **arguments)

    # ------------------------------------------------------------------ the layout

    def update_layout(self) -> Layout:
        """Return the layout that fits the user's changes since the last step.

        Hyperparameters are copied to the local optimizer. If parameters' data was rebound but not converted, it is
        copied into its flat buffer, or without one everything is laid out again, at once: it concerns no other rank.
        All ranks must agree on another layout before it is adopted.

        Raises:
            Exception: an error in the parameters or groups; the other ranks must be told.
        """
        self.check_allowed()
        check_capture(self.coordinator.ranks, self.params, self.layout.plan)
        check_members(self.groups, self.params)
        layout = self.current_layout()
        sync_groups(self.groups, self.local.optim.param_groups)
        return layout

    def current_layout(self) -> Layout:
        """Like :meth:`update_layout`, but only for the parameters."""
        layout = self.layout
        moved = self.buffers.moved()
        if moved and self.buffers.restore(layout.plan):
            self.local.rebind()
            moved = self.buffers.moved()
        if moved or active_mask(self.params) != layout.active:
            layout = next_layout(self.policy, layout, self.groups)
            if self.exchange is not None:
                self.exchange.buckets.check_layout(self.params, layout)
            if moved and all(map(same_place, self.layout.plan.tensors, layout.plan.tensors)):
                # Even if ranks must agree first: until then, values must arrive where parameters are now.
                self._lay_out()
            if layout.config.digest == self.layout.config.digest:
                layout = self.layout
            else:
                self.local.check_not_converted(self.layout.plan, layout.plan)
        self.local.masters.refresh()
        return layout

    def adopt(self, layout: Layout) -> None:
        """Take over a layout that all ranks have agreed on; no-op if it is that in use."""
        if layout is self.layout:
            return
        _logger.debug("rank %d takes over another layout", self.coordinator.ranks.rank)
        if not same_shards(layout.plan, self.layout.plan) or len(self.groups) != len(self.local.optim.param_groups):
            self.local.rebuild(self.groups, layout.plan, self.policy.classes)
        self.layout = layout
        self.params = parameters_of(self.groups)
        self._lay_out()

    def to_text(self) -> str:
        """Return layout and hyperparameters as JSON, which ranks compare at the end of a step."""
        return with_settings(self.layout, self.hyperparameters.agreed).to_json()

    def _lay_out(self) -> None:
        self.buffers.lay_out(self.params, self.layout.plan, self.layout.active)
        self.local.rebind()
        self.local.masters.refresh()
        if self.exchange is not None:
            self.exchange.buckets.lay_out()

    def ever_trained(self) -> tuple[bool, ...]:
        """Tell per tensor whether it was trainable in a step, or has state on any rank; the same on all ranks."""
        tensors = self.layout.plan.tensors
        return tuple([spec.trainable or index in self.metadata for index, spec in enumerate(tensors)])

    def broadcast_params(self) -> None:
        """Send the owners' values of what was :meth:`ever_trained` to all ranks outside of a step. Collective.

        Ranks must agree on something afterwards, as others may still be reading.
        """
        buffers = ParamBuffers(self.coordinator, as_bucket_view=False)
        buffers.lay_out(self.params, self.layout.plan, self.ever_trained())
        broadcast_all([buffers.broadcast])

    def add_param_group(self, append: Callable[[], GroupClass]) -> None:
        """Take in a param group, which ``append`` checks, and appends, on all ranks, or on none. Collective."""
        exchange, early, before, policy = self.exchange, self.early_steps, len(self.groups), self.policy
        is_accepted = early is not None and early.has_same_hyperparameters()
        with self.collective():
            layout = self.layout
            try:
                with agreed(self.coordinator, "add_param_group()") as proposal:
                    proposal.set(layout.config)
                    self.check_allowed()
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
            # Only the new group: edits of the others since the last step are not in the local optimizer yet.
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
        if may_be_torchs and self.metadata.is_empty and is_torchs_own_step(self):
            return self.init_state()
        if early is not None:
            # Nothing is sent here, and errors are raised only on this rank.
            if closure is not None or arguments:
                raise ValueError(
                    "this optimizer is stepped during backward by its communication hook, so step() takes neither a "
                    "closure nor arguments; call step() without them, or not at all, or use reduce_to_owner_hook"
                )
            return early.check_step()
        error: Exception | None = None
        inner = arguments
        if arguments and self.policy.has_several:
            error = TypeError(
                f"step() takes no keyword arguments with several optimizer classes, but got {', '.join(arguments)}"
            )
        self._announce(Call.STEP if closure is None else Call.REFUSED, **arguments)
        if closure is not None:
            try:
                with self, torch.enable_grad():
                    loss = closure()
                inner = {**arguments, "closure": lambda: loss}
            except Exception as raised:  # noqa: BLE001 - every rank must hear of it, whatever it is
                error = raised
        return self.apply_step(inner, error)

    def apply_step(self, arguments: Mapping[str, Any], error: Exception | None = None, seen: Seen | None = None) -> Any:  # noqa: ANN401 - as the inner step
        """Make a step; see :func:`zeroshard.step.step`."""
        with self:
            return step(self, arguments, error, seen)

    def clip_grad_norm_(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> torch.Tensor:
        """Scale the gradients of all parameters."""
        if self.exchange is None:
            return torch.nn.utils.clip_grad_norm_(
                self.params, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
            )
        if self.early_steps is not None:
            raise ValueError(
                "this optimizer is stepped during backward by its communication hook, so there is nothing left to "
                "clip; use reduce_to_owner_hook, and clip between backward() and step()"
            )
        with self:
            return clip_over_ranks(self, self.exchange, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def train_or_eval(self, name: str) -> Callable[[], Any]:
        """Return a function that calls this method of the local optimizer on all ranks; AttributeError if none."""
        inner = self.local.optim
        if not callable(getattr(inner, name, None)):
            # Frameworks use hasattr().
            raise AttributeError(
                f"the local optimizer, of class {names_of(self.policy.classes)}, has no method {name}()"
            )

        def call() -> Any:  # noqa: ANN401 - what the local optimizer's returns
            with self.collective():
                return call_on_all_ranks(self, name)

        return call

    def take_buckets(
        self, mode: StepMode, names: Mapping[torch.Tensor, str], *, norms: bool | Sequence[float]
    ) -> GradExchange:
        """Take gradients bucket by bucket from now on; all ranks give the same names to parameters without."""
        self.policy = replace(self.policy, names={param: names[param] for param in self.params if param in names})
        self.layout = renamed(self.policy, self.layout, self.groups)
        self.exchange = GradExchange(self, mode, norms=norms)
        return self.exchange

    # ------------------------------------------------------------------ state

    def consolidate(self, to: object) -> None:
        """Gather the state of all ranks on one."""
        target = -1
        if not isinstance(to, bool):
            # NumPy's integers are ranks too.
            with suppress(Exception):
                target = operator.index(to)  # type: ignore[arg-type] # that is what is tried
        self._announce(Call.CONSOLIDATE, target=target)
        self.apply_consolidation(target, to)

    def apply_consolidation(self, target: int, to: object = None) -> None:
        """Like :meth:`consolidate`, with a checked rank."""
        with self:
            self.metadata.consolidated = consolidate(self, target, to)
        self.metadata.consolidated_to = target

    def init_state(self) -> None:
        """Make the state of all ranks, if there is none."""
        with self.collective():
            init_state(self)

    def load(self, read: Callable[[], Mapping[str, Any]], from_rank: int | None, group: int | None = None) -> bool:
        """Load a state dict on all ranks, or on none; False if there was nothing to load."""
        with self.collective():
            is_loaded = load(self, self._schema, read, from_rank, group)
        if is_loaded:
            self.refused = ""
            if self.early_steps is not None:
                self.early_steps.reset()
        return is_loaded

    def take_over_state(self, layout: Layout, operation: str, install: Callable[[], None]) -> None:
        """Adopt a layout that ranks have agreed on, and install state on all ranks, or on none. Collective.

        ``install`` replaces state and param groups of the local optimizer, and does not change the old ones, which are
        there again after an error.
        """
        before = [(member, member.state, member.param_groups) for member in self.local.members]
        try:
            with agreed(self.coordinator, f"the end of {operation}"):
                self.adopt(layout)
                install()
            self.metadata.exchange(f"the state after {operation}")
            self.metadata.drop_consolidated()
        except BaseException:
            for member, state, groups in before:
                member.state, member.param_groups = state, groups
            self.local.extra.end_load(failed=True)
            raise
