"""One step: look at the model, agree with the other ranks, update this rank's shards, share them, agree once more.

No other module of this package issues a step's collectives. The order is fixed: this rank looks at its parameters; all
ranks agree that they are in the same step of the same optimizer with the same layout, and that no rank has an error;
each updates its shards and shares them; and they agree that this has succeeded everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch.profiler import record_function
from zeroshard_comm import DifferentCallsError, PeerLostError, check_config, explain_configs

from zeroshard.debugging import StepDebugging
from zeroshard.exchange_guard import ExchangeGuard
from zeroshard.layout import Layout, check_unchanged
from zeroshard.local_optimizer import Closure, sync_groups
from zeroshard.param_groups import ParamGroup
from zeroshard.sharding import Sharding
from zeroshard.state.metadata import StateMetadata
from zeroshard.stepped_in_parts import may_step_in_parts


class _Sharing(Protocol):
    """Brings parameters from their owners to all ranks; as :class:`zeroshard.parameter_sync.Sharing`."""

    def expect(self) -> None: ...
    def send(self) -> None: ...
    def arrive(self) -> None: ...
    def wait(self) -> None: ...


class _Part(Protocol):
    """Parameters that are updated and shared together; as :class:`zeroshard.overlap.bucket.BucketState`."""

    @property
    def sharing(self) -> _Sharing: ...
    def bind(self) -> None: ...
    def unbind(self) -> None: ...
    def step(self, arguments: Mapping[str, Any]) -> None: ...


class _Operations(Protocol):
    """What a loop has done to gradients; it is a :class:`zeroshard.overlap.operations.GradOperations`."""

    @property
    def in_words(self) -> Mapping[str, str]: ...
    def agreed(self) -> None: ...


class _GradientSource(Protocol):
    """Where gradients come from, bucket by bucket; it is a :class:`zeroshard.overlap.scheduler.BucketScheduler`."""

    @property
    def steps_early(self) -> bool: ...
    @property
    def has_buckets(self) -> bool: ...
    @property
    def operations(self) -> _Operations: ...
    @property
    def has_parts(self) -> bool: ...
    @property
    def parts(self) -> Sequence[_Part]: ...
    def check_gradients(self) -> None: ...
    def check_unreduced(self) -> None: ...
    def end_abandoned(self) -> Exception | None: ...


class StepCoordinator:
    """Makes the steps of one sharded optimizer, and holds what they need.

    Args:
        sharding: the plan at work.
        metadata: tells all ranks of the state on each, after a step that has changed it.
        debugging: logs, or checks every step; None if nobody asks for that.

    Attributes:
        sharding: as given.
        guard: tells whether earlier exchanges were completed.
        source: where gradients come from, once they come bucket by bucket.
    """

    def __init__(self, sharding: Sharding, metadata: StateMetadata, debugging: StepDebugging | None) -> None:
        self.sharding, self.guard = sharding, ExchangeGuard(sharding.control)
        self.source: _GradientSource | None = None
        self._metadata, self._debugging = metadata, debugging
        self._begun: tuple[Layout, Exception | None] | None = None

    def step(
        self,
        groups: Sequence[ParamGroup],
        closure: Closure | None,
        arguments: Mapping[str, Any],
        problem: Exception | None = None,
    ) -> Any:  # noqa: ANN401 - what the inner step returns
        """Follow the model, update this rank's shards, and bring every rank the others'. Collective.

        Args:
            groups: the public param groups; their hyperparameters are handed to the local optimizer and back.
            closure: re-evaluates the model.
            arguments: further keyword arguments of the inner step.
            problem: an error of this rank before the step, which every rank raises.

        Returns:
            What the inner step returned.

        Raises:
            DisagreementError: if ranks follow different changes of their models, or step with different hyperparameters
                (numbers, strings, lists and dicts of them).
            PeerLostError: if a rank is gone.
            Exception: an error of any rank, on every rank. Replicas are equal then, except parameters that a rank has
                converted or exchanged.
            BaseException: an interruption of this rank, such as Ctrl-C. The others lose this rank, and every further
                call raises.
        """
        with self.guard.exchange():
            return self._step(groups, closure, arguments, problem)

    def observe_early(self, groups: Sequence[ParamGroup]) -> bool:
        """Follow what the user did since the last step, before shards are stepped during a backward.

        Returns:
            Whether they may be: nothing has changed that ranks must agree on. Otherwise the :meth:`step` that ends this
            backward steps them, or raises an error.
        """
        self._begun = self._observe(groups, in_backward=True)
        if self._debugging is not None:
            try:
                self._debugging.before_update()
            except Exception as error:  # noqa: BLE001 - the step that ends this backward raises it on every rank
                self._begun = self._begun[0], self._begun[1] or error
        layout, problem = self._begun
        return problem is None and layout is self.sharding.layout

    def _step(
        self,
        groups: Sequence[ParamGroup],
        closure: Closure | None,
        arguments: Mapping[str, Any],
        problem: Exception | None,
    ) -> Any:  # noqa: ANN401 - what the inner step returns
        sharding, source = self.sharding, self.source
        if source is not None:
            problem = source.end_abandoned() or problem
            source = source if source.has_buckets else None
        debugging = self._debugging if self._begun is None else None
        layout, observed = self._begun if self._begun is not None else self._observe(groups)
        self._begun = None
        problem = observed if problem is None else problem
        declared = sharding.hyperparameters.follow(groups)
        agreement = _Agreement(sharding, layout, source.operations if source is not None else None)
        # A closure communicates too, so ranks agree after it has returned.
        if closure is None or problem is not None or layout is not sharding.layout:
            try:
                agreement.reach(problem)
            except (PeerLostError, DifferentCallsError) as error:
                if source is not None and source.steps_early:
                    # Messages sent early will not be waited for.
                    self.guard.mark_broken(error)
                raise
            except Exception:
                # A hook may have stepped and sent buckets on some ranks; the others wait for the rest of them.
                if source is not None and source.steps_early:
                    self._share([part.sharing for part in source.parts], None, None)
                raise
            if debugging is not None:
                debugging.before_update()
            debugging = None
        if layout is not sharding.layout:
            sharding.adopt(layout, groups)
        self._metadata.drop_consolidated()
        shares: Sequence[_Sharing] = [sharding.sync] if source is None else [part.sharing for part in source.parts]
        failure: Exception | None = None
        result: Any = None
        try:
            if source is not None:
                source.check_gradients()
                result = self._update(source, arguments)
            else:
                watched = self._watched(closure, groups, agreement, debugging) if closure is not None else None
                with record_function("zeroshard::update"):
                    result = sharding.local.step(watched, arguments)
        except Exception as error:  # noqa: BLE001 - peers wait for this rank's share, and must learn of the error
            failure = error
        if failure is not None and agreement.has_failed:
            raise failure
        agreement.reach(failure)
        self._share(shares, declared, failure)
        sharding.local.masters.note()
        sync_groups(sharding.local.optim.param_groups, groups)
        sharding.hyperparameters.written(groups)
        if self._debugging is not None:
            self._debugging.after_step()
        return result

    def _update(self, source: _GradientSource, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401 - as the inner step
        """Update and send part by part; or all parts at once, if stepping in parts is impossible or of no use."""
        local, parts = self.sharding.local, source.parts
        if source.has_parts and may_step_in_parts(local.optim):
            for part in parts:
                part.sharing.expect()
            for part in parts:
                part.step(arguments)
                part.sharing.send()
            return None
        try:
            for part in parts:
                part.bind()
            with record_function("zeroshard::update"):
                return local.step_bound(arguments)
        finally:
            for part in parts:
                part.unbind()

    def _share(self, shares: Sequence[_Sharing], declared: int | None, failure: Exception | None) -> None:
        """Share all parameters, even after a failure, and learn whether any rank had an error. Collective.

        Args:
            shares: the parameters to share; some may have been sent.
            declared: a number for this rank's hyperparameters; None agrees with all.
            failure: of this rank's update.

        Raises:
            DisagreementError: if ranks have stepped with different hyperparameters.
            PeerLostError: if a rank is gone, and this one's update has not failed.
            Exception: an error of any rank's update, on every rank.
        """
        sharding, problem, verdict = self.sharding, failure, None
        try:
            try:
                with record_function("zeroshard::share"):
                    for share in shares:
                        share.send()
                    # First everything that others wait for, then what waits for others.
                    for share in shares:
                        share.arrive()
                    for share in shares:
                        share.wait()
            except PeerLostError as error:
                problem = problem or error
            # Even if this rank has nothing to wait for: others may still be reading its shards.
            with record_function("zeroshard::agree"):
                try:
                    sharding.control.agree(
                        "the end of step()",
                        declared,
                        error=problem,
                        detail=sharding.in_words,
                        explain=explain_configs,
                        flag=self._metadata.has_changed(),
                    )
                except Exception as error:  # noqa: BLE001 - the metadata is exchanged before it is raised
                    verdict = error
            if sharding.control.flagged and not isinstance(verdict, PeerLostError):
                try:
                    self._metadata.exchange("the state after step()")
                except ValueError:
                    if verdict is None:
                        raise
            if verdict is not None:
                raise verdict
        except Exception as error:
            if self.source is not None and (isinstance(error, PeerLostError) or error is not verdict):
                self.guard.mark_broken(error)
            # The others may be lost because of this rank's error, e.g. in collectives of a closure that raised here.
            if failure is not None and isinstance(error, PeerLostError):
                raise failure from error
            raise

    def _watched(
        self, closure: Closure, groups: Sequence[ParamGroup], agreement: _Agreement, debugging: StepDebugging | None
    ) -> Closure:
        """Return a closure that raises if the user's has changed anything that ranks agreed on before the step."""

        def evaluate() -> Any:  # noqa: ANN401 - the closure's own result
            nonlocal debugging
            result = closure()
            if self.source is not None:
                # The closure's backward was the first that sent gradients to their owners.
                self.source.check_gradients()
                for part in self.source.parts:
                    part.bind()
            agreement.reach()
            if debugging is not None:
                debugging.before_update()
                debugging = None
            check_unchanged(self.sharding.layout, self.sharding.current_layout(groups))
            self.sharding.local.masters.refresh()
            return result

        return evaluate

    def _observe(self, groups: Sequence[ParamGroup], *, in_backward: bool = False) -> tuple[Layout, Exception | None]:
        """Look at what the user did since the last step; return an error instead of raising it."""
        try:
            layout = self.sharding.update_layout(groups)
            self.guard.check_loop()
            self.sharding.local.check_gradients()
            if self.source is not None and not in_backward:
                self.source.check_unreduced()
        except Exception as error:  # noqa: BLE001 - every rank must hear of it, whatever it is
            return self.sharding.layout, error
        return layout, None


class _Agreement:
    """Agreement that all ranks are at the same step. It runs once: before the step, or after the closure.

    Attributes:
        has_failed: whether it has raised an error, which every rank has raised.
    """

    def __init__(self, sharding: Sharding, layout: Layout, operations: _Operations | None) -> None:
        self._control, self._config, self._operations = sharding.control, layout.declaration, operations
        self._is_over = self.has_failed = False

    def reach(self, problem: Exception | None = None) -> None:
        """Agree with the other ranks. Collective the first time, and then a no-op.

        Args:
            problem: an error of this rank.

        Raises:
            DisagreementError: if ranks are in different calls, steps or optimizers, or their layouts differ.
            PeerLostError: if a rank is gone, and this one has no problem.
            Exception: a rank's problem, on every rank.
        """
        if self._is_over:
            return
        self._is_over = self.has_failed = True
        try:
            with record_function("zeroshard::agree"):
                done = self._operations.in_words if self._operations is not None else None
                check_config(self._control, "step()", self._config, error=problem, once=done)
        except PeerLostError as lost:
            # The others may be lost because of this rank's problem, e.g. in collectives of a closure that raised here.
            if problem is not None:
                raise problem from lost
            raise
        position = self._control.position
        if position is not None:
            self._control.position = replace(position, steps=position.steps + 1)
        if self._operations is not None:
            self._operations.agreed()
        self.has_failed = False
