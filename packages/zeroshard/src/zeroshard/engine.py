"""Holds the parts of one sharded optimizer, and starts its collective calls outside of steps."""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
from zeroshard_comm import Coordinator, Position, RankGroup, agreed

from zeroshard.changes import Changes
from zeroshard.clipping import clip_over_ranks
from zeroshard.debug.checks import StepChecks
from zeroshard.debug.describe import OptimizerDescription, describe
from zeroshard.grads.early_steps import StepCalls
from zeroshard.grads.exchange import GradExchange
from zeroshard.grads.sharded import ShardedGradients
from zeroshard.grads.source import GradSource, StepMode
from zeroshard.guard import Guard
from zeroshard.join import Call, JoinState
from zeroshard.layouts import Layouts
from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.param_buffers import ParamBuffers
from zeroshard.plan.costs import with_classes
from zeroshard.plan.group_classes import GroupClass, names_of
from zeroshard.plan.groups import ParamGroup, check_values
from zeroshard.plan.hyperparameters import settings_of
from zeroshard.plan.layout import Policy, first_layout, with_settings
from zeroshard.state.checkpoints import Checkpoints
from zeroshard.state.group_values import GroupValues
from zeroshard.state.listing import StateDict, list_state
from zeroshard.state.metadata import StateMetadata
from zeroshard.step import Stepper
from zeroshard.train_mode import TrainMode

_logger = logging.getLogger(__name__)


class Engine:
    """Holds the parts of one public optimizer. Parts that call back have weak references to it.

    ``read`` checks the user's arguments, and returns the public param groups and the class of each; ``policy`` has no
    classes yet. If a rank has an error or plans differ, the constructor raises on every rank.
    """

    def __init__(
        self,
        ranks: RankGroup,
        policy: Policy,
        name: str,
        read: Callable[[], tuple[list[ParamGroup], Sequence[GroupClass]]],
    ) -> None:
        self.coordinator = coordinator = Coordinator(ranks)
        self.guard = Guard(coordinator)
        self.exchange: GradSource | None = None
        """Reduces gradients during backward; None if torch or DistributedDataParallel does."""
        self.for_hooks: GradExchange | None = None
        with agreed(coordinator, "ZeroRedundancyOptimizer()") as proposal:
            groups, classes = read()
            if not coordinator.is_single_rank:
                check_values(groups)
            written = [dict(group) for group in groups]
            policy = with_classes(policy, classes, groups)
            layout = first_layout(policy, groups)
            self.local = local = LocalOptimizer(policy, groups, layout.plan, ranks.rank)
            proposal.set(with_settings(layout, settings_of(local.with_defaults(written))))
            proposal.flag = any(local.states)
        begins_with_state = coordinator.flagged
        coordinator.position = Position(ranks.context.number_optimizer(), name, 0)
        self.buffers = ParamBuffers(coordinator, as_bucket_view=policy.as_bucket_view)
        self.changes = changes = Changes(local)
        self.layouts = Layouts(coordinator, self.guard, policy, layout, local, self.buffers, changes)
        changes.read_hyperparameters()
        self.metadata = StateMetadata(coordinator, local, changes)
        if begins_with_state:
            self.metadata.exchange("ZeroRedundancyOptimizer()")
        self.checkpoints = Checkpoints(coordinator, local, self.metadata, changes, self.layouts)
        self.train_mode = TrainMode(coordinator, local, self.layouts, changes, self.metadata)
        self.debugging: StepChecks | None = None
        if policy.debug_level != "OFF":
            self.debugging = StepChecks(coordinator, local, compares=policy.debug_level == "DETAIL")
        weak = weakref.proxy(self)
        self.join = JoinState(
            coordinator,
            local,
            changes,
            step=lambda arguments: weak.stepper.apply(arguments),
            consolidate=lambda target: weak.apply_consolidation(target),
            clip=lambda **arguments: weak.apply_clipping(**arguments),
        )
        self.stepper = Stepper(
            coordinator,
            self.guard,
            local,
            self.layouts,
            self.buffers,
            changes,
            self.metadata,
            GroupValues(coordinator, local, changes),
            self.join,
            self.debugging,
            init_state=lambda: weak.init_state(),
            describe=lambda: weak.describe().to_text(),
        )
        if _logger.isEnabledFor(logging.INFO):
            _logger.info("%s", self.describe().to_text())

    def describe(self) -> OptimizerDescription:
        """Return a description of the optimizer as it is now. Not collective."""
        layouts = self.layouts
        return describe(self.coordinator, layouts.policy, layouts.layout, self.local, self.metadata, self.exchange)

    def collective(self) -> Guard:
        """Return the context of a collective call. In Join, this raises on every rank if one has run out of data."""
        self._announce(Call.REFUSED)
        return self.guard

    def _announce(self, call: Call, **arguments: object) -> None:
        """Announce a call inside Join. Raises if an earlier exchange is incomplete."""
        self.guard.check_broken()
        if self.join.context is not None:
            self.join.announce(call, **arguments)

    # ------------------------------------------------------------------ groups, modes, hooks

    def add_param_group(self, append: Callable[[], GroupClass]) -> None:
        """Add a param group, which ``append`` checks and appends, on all ranks or on none. Collective."""
        had_changes = bool(self.changes.in_hyperparameters())
        with self.collective():
            self.layouts.add_group(append)
            if self.coordinator.agree("add_param_group()", flag=self.metadata.has_changed()):
                self.metadata.exchange("add_param_group()")
        self.metadata.drop_consolidated()
        if not had_changes:
            # A hook that steps in backward raises if hyperparameters have changed; a new group is no such change.
            self.changes.read_hyperparameters()

    def train_or_eval(self, name: str) -> Callable[[], object]:
        """Return a function that calls a local optimizer's method on all ranks; raise AttributeError if it has none."""
        if not any(callable(getattr(member, name, None)) for member in self.local.members):
            # Frameworks look for the method by hasattr().
            raise AttributeError(
                f"the local optimizer, of class {names_of(self.local.classes)}, has no method {name}()"
            )

        def call() -> object:
            with self.collective():
                return self.train_mode.call(name)

        return call

    def take_buckets(self, mode: StepMode, names: Mapping[torch.Tensor, str], *, norms: bool) -> GradExchange:
        """Reduce gradients bucket by bucket from now on. All ranks pass the same ``names``. Collective."""
        if self.exchange is not None:
            self.exchange.check_hook(mode)
        weak = weakref.proxy(self)
        calls = StepCalls(
            look=lambda as_backward_begins: weak.stepper.look(as_backward_begins=as_backward_begins),
            step=lambda seen: weak.stepper.apply({}, seen=seen),
            has_new_hyperparameters=lambda: bool(weak.changes.in_hyperparameters()),
            edited_state=lambda: weak.debugging.edited_state() if weak.debugging is not None else "",
        )
        with self._reducing(names):
            layout = self.layouts.layout
            made = GradExchange(
                self.coordinator, self.guard, self.local, self.buffers, layout, calls, mode, norms=norms
            )
            self._use_source(made)
        self.for_hooks = made
        return made

    def shard(
        self,
        names: Mapping[torch.Tensor, str],
        prepare: Callable[[], tuple[Sequence[int], Mapping[str, object]]],
        *,
        bucket_mb: float,
        norms: bool,
    ) -> ShardedGradients:
        """Keep only this rank's parts of gradients from now on. Collective.

        ``prepare`` checks the arguments. It returns the tensors in the order in which they are sent at first, and
        settings that must be equal on all ranks.
        """
        with self._reducing(names):
            layout = self.layouts.layout
            made = ShardedGradients(
                self.coordinator, self.guard, self.local, layout, prepare, bucket_mb=bucket_mb, norms=norms
            )
            self._use_source(made)
        return made

    @contextmanager
    def _reducing(self, names: Mapping[torch.Tensor, str]) -> Iterator[None]:
        """Use the model's names in a block that makes a source of gradients; restore the old names if it raises."""
        before = self.layouts.policy.names
        self.layouts.use_names(names)
        try:
            yield
        except Exception:
            self.layouts.use_names(before)
            raise

    def _use_source(self, source: GradSource | None) -> None:
        self.exchange = self.stepper.exchange = self.layouts.source = source

    def drop_source(self, source: GradSource) -> None:
        """Stop using a source of gradients. No-op if another one is in use."""
        if self.exchange is source:
            self._use_source(None)
            self.local.hook_gradients = None

    def clip_grad_norm_(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> torch.Tensor:
        """Scale the gradients of all parameters so that their norm is at most ``max_norm``."""
        exchange, params = self.exchange, self.local.params
        if exchange is None:
            return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
        if exchange.early_steps is not None:
            raise ValueError(
                "a communication hook steps this optimizer during backward, so there is nothing left to clip; use "
                "reduce_to_owner_hook, and clip between backward() and step()"
            )
        self._announce(Call.CLIP, max_norm=max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite)
        return self.apply_clipping(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def apply_clipping(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> torch.Tensor:
        """Clip gradients that are reduced during backward, after :meth:`clip_grad_norm_` has announced the call."""
        exchange, params = self.exchange, self.local.params
        assert exchange is not None
        with self.guard:
            norm, factor = clip_over_ranks(
                self.coordinator,
                exchange.gradients_to_clip,
                params[0],
                max_norm,
                norm_type,
                error_if_nonfinite=error_if_nonfinite,
            )
        if factor is not None:
            exchange.table.norms.clipped(factor)
        return norm

    # ------------------------------------------------------------------ state

    def consolidate(self, to: object) -> None:
        """Gather the state of all ranks on one rank."""
        target = -1
        if not isinstance(to, bool):
            # NumPy's integers are ranks too.
            with suppress(Exception):
                target = operator.index(to)  # type: ignore[arg-type] # raises if it is not an integer
        self._announce(Call.CONSOLIDATE, target=target)
        self.apply_consolidation(target, to)

    def apply_consolidation(self, target: int, to: object = None) -> None:
        """Gather the state on a rank, after :meth:`consolidate` has announced the call inside Join."""
        with self.guard:
            self.checkpoints.consolidate(target, to)

    def list_state(self) -> StateDict:
        """List the whole state, without communication."""
        return list_state(self.local, self.metadata, self.changes)

    def init_state(self) -> None:
        """Initialize the state of all ranks if there is none. Collective."""
        with self.collective():
            self.checkpoints.init_state()

    def load(self, read: Callable[[], StateDict], from_rank: int | None, group: int | None = None) -> bool:
        """Load a state dict on all ranks, or on none; return False if there was nothing to load."""
        with self.collective():
            is_loaded = self.checkpoints.load(read, from_rank, group)
        if is_loaded:
            self.guard.refused = ""
            if self.exchange is not None and self.exchange.early_steps is not None:
                self.exchange.early_steps.reset()
        return is_loaded
