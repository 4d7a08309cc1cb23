"""A plan at work: one place that follows the model, steps this rank's shards, shares them, and agrees with the others.

No other module of this package issues a step's collectives. The order is fixed: this rank looks at its parameters; all
ranks agree that they are in the same step of the same optimizer with the same layout, and that nothing is wrong; each
steps its shards and shares them; and they agree that this has succeeded everywhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from zeroshard_comm import (
    Control,
    DifferentCallsError,
    PeerLostError,
    Position,
    RankGroup,
    ShardingConfig,
    Traffic,
    check_config,
    connect,
)

from zeroshard.elementwise import name_of
from zeroshard.interruptions import Interruptions
from zeroshard.layout import Layout, Policy, check_unchanged, first_layout, next_layout, same_place, same_shards
from zeroshard.local import Closure, LocalOptimizer, sync_groups
from zeroshard.param_groups import Hyperparameters, ParamGroup, active_mask, check_members, parameters_of, settings_of
from zeroshard.param_order import check_order, read_order
from zeroshard.pipeline import Pipeline, Stepping, common_device
from zeroshard.replicas import Replicas
from zeroshard.step_agreement import StepAgreement, share_parameters


def _nobody_to_tell() -> None:
    pass


class Engine:
    """Holds the layout, the local optimizer and the replicas of one sharded optimizer, and alone replaces them.

    Args:
        ranks: the group.
        traffic: where bytes and waiting are counted.
        policy: how tensors are dealt out.
        defaults: the user's keyword arguments for the optimizer class.
        read_groups: reads and checks what the user handed in; returns the public param groups.

    Attributes:
        layout: who owns what, and what takes part.
        local: the local optimizer.
        replicas: where parameters lie, and the messages of a share.
        control: the channel of the ranks' meetings.
        hyperparameters: what the ranks should agree upon.

    Raises:
        Exception: what any rank met while it read or planned, on every rank.
        DisagreementError: if ranks differ in their plans or settings, on every rank.
    """

    def __init__(
        self,
        ranks: RankGroup,
        traffic: Traffic,
        policy: Policy,
        defaults: Mapping[str, Any],
        read_groups: Callable[[], list[ParamGroup]],
    ) -> None:
        self.ranks = ranks
        self._traffic = traffic
        self.control = Control(ranks, traffic)
        self._policy = policy
        built: tuple[list[ParamGroup], Layout, LocalOptimizer] | None = None
        declaration: ShardingConfig | None = None
        order: Mapping[str, int] = {}
        failure: Exception | None = None
        try:
            groups = read_groups()
            layout = first_layout(policy, groups, name_of(policy.factory))
            built = groups, layout, LocalOptimizer(policy.factory, groups, layout.plan, ranks.rank, defaults)
            declaration = _with_hyperparameters(layout, settings_of(groups, built[2].optim.defaults))
            order = read_order(self.control, layout.plan.tensors, parameters_of(groups))
        except Exception as error:  # noqa: BLE001 - every rank must hear of it, whatever it is
            failure = error
        try:
            check_config(self.control, "ZeroRedundancyOptimizer()", declaration, error=failure)
        finally:
            # Here and below: a frame that keeps an error which passes through it keeps itself alive, and the model.
            del failure
        check_order(self.control, order, "ZeroRedundancyOptimizer()")
        assert built is not None
        self.control.position = Position(ranks.context.number_optimizer(), name_of(policy.factory), 0)
        connect(self.control)
        groups, self.layout, self.local = built
        self.replicas = Replicas(self.control, as_bucket_view=policy.as_bucket_view)
        self.params = parameters_of(groups)
        self.hyperparameters = Hyperparameters()
        self.hyperparameters.follow(groups)
        self.pipeline: Pipeline | None = None
        """Moves gradients and parameters bucket by bucket, once gradients come that way; see :meth:`attach`."""
        self._interruptions = Interruptions(self.control)
        self._begun: tuple[Layout, Exception | None] | None = None
        self.shadowing = False
        """Whether steps are those of a rank that has run out of data: its schedulers no longer run with the others'."""
        self.divides_by_running = False
        """Whether a hook's gradients are averaged over the ranks that still have data, and not over all."""
        self._lay_out()

    def meet(self, operation: str, problem: Exception | None) -> None:
        """Meet before a call that concerns all ranks, and raise on all of them if one differs or has a problem.

        Raises:
            DisagreementError: if ranks are in different calls, or their layouts differ.
            PeerLostError: if a rank is gone.
            Exception: a rank's problem.
        """
        try:
            with self._exchange():
                check_config(self.control, operation, self.layout.declaration, error=problem)
        finally:
            del problem

    def refuse_interrupted(self) -> None:
        """Raise if an exchange was interrupted on this rank; see :class:`~zeroshard.interruptions.Interruptions`."""
        self._interruptions.refuse()

    def _exchange(self) -> AbstractContextManager[None]:
        return self._interruptions.exchange(
            lambda by: self.pipeline.break_off(by) if self.pipeline is not None else None
        )

    def step(
        self,
        groups: Sequence[ParamGroup],
        closure: Closure | None,
        arguments: Mapping[str, Any],
        problem: BaseException | None = None,
        attend: Callable[[], None] = _nobody_to_tell,
        gradients: Mapping[int, torch.Tensor] | None = None,
    ) -> Any:  # noqa: ANN401 - what the inner step returns
        """Follow the model, step this rank's shards, and bring every rank the others'. Collective.

        Args:
            groups: the public param groups; their hyperparameters are handed to the local optimizer and back.
            closure: re-evaluates the model.
            arguments: further keyword arguments of the inner step.
            problem: what this rank has met before the step, for every rank to raise.
            attend: called once before anything is sent, and behind a closure.
            gradients: step with these in place of what is in ``.grad``, see :meth:`LocalOptimizer.step_with`.

        Returns:
            What the inner step returned.

        Raises:
            DisagreementError: if ranks follow different changes of their models, or step with different hyperparameters
                (numbers, strings, lists and dicts of them).
            PeerLostError: if a rank is gone.
            Exception: what any rank met, on every rank. Replicas are equal then, but for parameters that a rank has
                converted or exchanged.
            BaseException: what has interrupted this rank, as Ctrl-C does. Before and in the local step the others
                raise a RuntimeError, and all may go on; else :meth:`refuse_interrupted` raises from now on.
        """
        with self._exchange():
            try:
                failure = self._interruptions.as_error(problem) if problem is not None else None
                return self._step(groups, closure, arguments, failure, attend, gradients)
            finally:
                failure = problem = None

    def _step(
        self,
        groups: Sequence[ParamGroup],
        closure: Closure | None,
        arguments: Mapping[str, Any],
        problem: Exception | None,
        attend: Callable[[], None],
        gradients: Mapping[int, torch.Tensor] | None,
    ) -> Any:  # noqa: ANN401 - what the inner step returns
        """As :meth:`step`; what interrupts the local step is raised as an error."""
        if self.pipeline is not None:
            self.pipeline.refuse_broken()
            problem = self.pipeline.end_abandoned() or problem
        layout, observed = self._begun if self._begun is not None else self._observe(groups)
        self._begun = None
        bucketwise = self.pipeline if self.pipeline is not None and self.pipeline.routed else None
        problem = observed if problem is None else problem
        declared = None if self.shadowing else self.hyperparameters.follow(groups)
        agreement = StepAgreement(self.control, layout.declaration, attend)
        # A closure communicates, too: ranks agree when it has returned.
        if closure is None or problem is not None or layout is not self.layout:
            try:
                agreement.reach(problem)
            except (PeerLostError, DifferentCallsError):
                raise
            except Exception:
                # A hook may have stepped and sent buckets on some ranks; the others wait for what is left of them.
                if bucketwise is not None and bucketwise.stepping is not Stepping.IN_STEP:
                    share_parameters(self.control, self.replicas, bucketwise, None, None, str)
                raise
            finally:
                del problem, observed
        if layout is not self.layout:
            before = self.layout.plan
            self.adopt(layout, groups)
            if bucketwise is not None:
                bucketwise.move_gradients(before, layout.plan)
        failure: Exception | None = None
        result: Any = None
        try:
            if bucketwise is not None:
                result = bucketwise.step(arguments)
            elif gradients is not None:
                self.local.step_with(gradients, arguments)
            else:
                watched = self._watched(closure, groups, agreement) if closure is not None else None
                result = self.local.step(watched, arguments)
        except BaseException as error:
            # Peers wait for this rank's share, and must hear of it; or for what a closure was to send.
            if closure is not None and not isinstance(error, Exception):
                raise
            failure = self._interruptions.as_error(error)
        try:
            if failure is not None and agreement.has_failed:
                raise failure
            agreement.reach(failure)
        except BaseException:
            del failure
            raise
        try:
            share_parameters(self.control, self.replicas, bucketwise, declared, failure, self._hyperparameters_in_words)
        finally:
            del failure
        sync_groups(self.local.optim.param_groups, groups)
        self.hyperparameters.written(groups)
        return result

    def _hyperparameters_in_words(self) -> str:
        return _with_hyperparameters(self.layout, self.hyperparameters.agreed).to_json()

    def attach(self, stepping: Stepping) -> Pipeline:
        """Expect gradients bucket by bucket from now on. Collective, the first time.

        Raises:
            ValueError: if they are expected in another way already, or parameters cannot be exchanged in buckets; that
                on every rank.
        """
        if self.pipeline is None:
            failure: Exception | None = None
            try:
                common_device(self.params, self.layout)
            except ValueError as error:
                failure = error
            try:
                self.control.check_consistent("a communication hook's first call", error=failure)
            finally:
                del failure
            self.pipeline = Pipeline(self.control, self._traffic, self.local, self.params, self.layout, stepping)
            self_of = weakref.ref(self)
            self.pipeline.divides_by_running = lambda: (engine := self_of()) is not None and engine.divides_by_running
        elif self.pipeline.stepping is not stepping:
            raise ValueError(
                f"a communication hook steps this optimizer {self.pipeline.stepping.value!r} already, and cannot step "
                f"it {stepping.value!r} too; build a new optimizer for another hook"
            )
        return self.pipeline

    def begin_backward(self, groups: Sequence[ParamGroup]) -> bool:
        """Follow what the user did since the last step, before shards are stepped during a backward.

        Returns:
            Whether they may be: nothing has changed that the ranks have to talk about. Else they are stepped, or an
            error raised, by the :meth:`step` that ends this backward.
        """
        self._begun = self._observe(groups, in_backward=True)
        layout, problem = self._begun
        return problem is None and layout is self.layout

    def grow(self, groups: list[ParamGroup], append: Callable[[], None]) -> None:
        """Take in a new param group on all ranks, or on none. Collective.

        Args:
            groups: the public param groups.
            append: checks the new group and appends it to ``groups``.

        Raises:
            DisagreementError: if ranks add different groups.
            PeerLostError: if a rank is gone.
            Exception: what any rank met, on every rank. ``groups`` is as before in every case.
        """
        before = len(groups)
        layout, failure = self.layout, None
        declaration = layout.declaration
        order: Mapping[str, int] = {}
        try:
            append()
            layout = next_layout(self._policy, layout, groups)
            self.local.refuse_reordered(self.layout.plan, layout.plan)
            self.local.rehearse(groups, layout.plan)
            if self.pipeline is not None:
                self.pipeline.check(parameters_of(groups), layout)
            hyperparameters = settings_of(groups[before:], self.local.optim.defaults, first=before)
            declaration = _with_hyperparameters(layout, hyperparameters)
            order = read_order(self.control, layout.plan.tensors, parameters_of(groups))
        except Exception as error:  # noqa: BLE001 - every rank must hear of it, whatever it is
            failure = error
        try:
            check_config(self.control, "add_param_group()", declaration, error=failure)
            check_order(self.control, order, "add_param_group()")
        except BaseException:
            del groups[before:]
            raise
        finally:
            del failure
        self.adopt(layout, groups)
        # The new group alone: what was edited in the others since the last step is not in the local optimizer yet.
        sync_groups(self.local.optim.param_groups[before:], groups[before:])

    def settle(self, tensors: frozenset[int], groups: Sequence[ParamGroup]) -> None:
        """Let tensors that were given state stay with their owners, also if they are frozen and unfrozen later.

        They weigh something from now on, which is a part of the plan: all ranks are to do this at the same time, with a
        layout that they agree upon.

        Args:
            tensors: indices.
            groups: the public param groups.
        """
        settled = self.layout.settled | tensors
        if settled != self.layout.settled:
            self.layout = next_layout(self._policy, replace(self.layout, settled=settled), groups)

    def followed(self, groups: Sequence[ParamGroup]) -> Layout:
        """Follow what the user did since the last step, and return the layout that fits it.

        If parameters' data was rebound but not converted, that is taken in at once: it concerns nobody else. Another
        layout is to be agreed upon with all ranks, and then adopted.

        Args:
            groups: the public param groups; their hyperparameters are handed to the local optimizer.

        Raises:
            Exception: what is wrong with the parameters or groups; the other ranks must hear of it.
        """
        check_members(groups, self.params)
        layout = self._next_layout(groups)
        sync_groups(groups, self.local.optim.param_groups)
        return layout

    def _next_layout(self, groups: Sequence[ParamGroup]) -> Layout:
        """As :meth:`followed`, of the parameters alone."""
        layout = self.layout
        moved = self.replicas.moved()
        if moved or active_mask(self.params) != layout.active:
            layout = next_layout(self._policy, layout, groups)
            if self.pipeline is not None:
                self.pipeline.check(self.params, layout)
            if moved and all(map(same_place, self.layout.plan.tensors, layout.plan.tensors)):
                # Also where ranks have to talk first: until then, shares must arrive where parameters are now.
                self._lay_out()
            if layout.declaration.digest == self.layout.declaration.digest:
                layout = self.layout
            else:
                self.local.refuse_reordered(self.layout.plan, layout.plan)
        return layout

    @contextmanager
    def as_shadow(self) -> Iterator[None]:
        """Make steps as those of a rank that has run out of data."""
        before, self.shadowing = self.shadowing, True
        try:
            yield
        finally:
            self.shadowing = before

    def _watched(self, closure: Closure, groups: Sequence[ParamGroup], agreement: StepAgreement) -> Closure:
        """Return a closure that raises if the user's has changed what the ranks agreed upon before the step."""

        def evaluate() -> Any:  # noqa: ANN401 - the closure's own result
            result = closure()
            if self.pipeline is not None:
                # The closure's backward was the first that sent gradients to their owners.
                self.pipeline.bind()
            agreement.reach()
            check_unchanged(self.layout, self._next_layout(groups))
            return result

        return evaluate

    def _observe(self, groups: Sequence[ParamGroup], *, in_backward: bool = False) -> tuple[Layout, Exception | None]:
        """As :meth:`followed`, before a step; hand back what is wrong instead of raising it."""
        try:
            layout = self.followed(groups)
            if self.shadowing:
                # What is in `.grad` is not what is going to be used.
                return layout, None
            self.local.check_gradients()
            if self.pipeline is not None and not in_backward and not self.pipeline.routed:
                self.pipeline.refuse_unreduced()
        except Exception as error:  # noqa: BLE001 - every rank must hear of it, whatever it is
            return self.layout, error
        return layout, None

    def adopt(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        """Take over an agreed layout."""
        if not same_shards(layout.plan, self.layout.plan) or len(groups) != len(self.local.optim.param_groups):
            self.local.follow(groups, layout.plan)
        self.layout = layout
        self.params = parameters_of(groups)
        self._lay_out()

    def _lay_out(self) -> None:
        self.replicas.follow(self.params, self.layout.plan, self.layout.active)
        self.local.rebind()
        if self.pipeline is not None:
            self.pipeline.follow(self.params, self.layout, self.local)


def _with_hyperparameters(layout: Layout, hyperparameters: Mapping[str, str]) -> ShardingConfig:
    """Declare hyperparameters beside a layout: once, as they may change with every step."""
    return replace(layout.declaration, settings={**layout.declaration.settings, **hyperparameters})
