"""Uneven inputs: how ranks that have run out of data take part in what the others do with one sharded optimizer.

Inside a Join context every call of the optimizer that all ranks make (a step, a clipping, the first bucket of a
backward that steps) begins with a roll call, once a rank may have run out. Those that have run out learn what is done,
get from a running rank what they cannot know, and do their part: so results are those of a run in which they contribute
zero gradients, or what they had accumulated when they ran out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from zeroshard._torch_private import local_used_map
from zeroshard.clipping import clip_over_ranks
from zeroshard.joining.attendance import Attendance, Call, call_roll
from zeroshard.joining.changed_parameters import bring_parameters
from zeroshard.joining.handover import (
    Handover,
    give,
    is_nonzero,
    take,
    unwritable,
)
from zeroshard.joining.stepped_gradients import SteppedGradients
from zeroshard.overlap.bucket import Bucket, BucketPhase
from zeroshard.overlap.placeholder import GradPlaceholder
from zeroshard.overlap.scheduler import BucketScheduler
from zeroshard.param_groups import ParamGroup
from zeroshard.step import StepCoordinator

USE_OURS = (
    "use zeroshard_integrations.join.Join in place of torch's: it knows what a rank had accumulated when it ran out"
)


class UnevenInputs:
    """The part of one optimizer in Join contexts. Its methods belong to the thread that trains.

    Args:
        coordinator: makes the steps of the optimizer.
        groups: returns its param groups.
        is_inside: tells whether the optimizer is in a Join context.

    Attributes:
        someone_joined: tells whether a rank may have run out of data; asked at every call inside a context. All ranks
            must get the same answer at the same call. Changed by a context that knows.
        has_shadowed: whether this rank has taken part in what the others do, in this context.
        divides_by_running: whether gradients that a hook reduces are averaged over the ranks that still have data.
        calling: what this rank's call does that has begun and not come to its end, if there is one. An error that
            leaves it is raised by all ranks.
    """

    def __init__(
        self, coordinator: StepCoordinator, groups: Callable[[], list[ParamGroup]], is_inside: Callable[[], bool]
    ) -> None:
        self._coordinator, self._groups, self._is_inside = coordinator, groups, is_inside
        self._sharding, self._control = coordinator.sharding, coordinator.sharding.control
        self.divides_by_running = False
        self.someone_joined: Callable[[], bool] = _perhaps
        self._partners: Sequence[weakref.ref[DistributedDataParallel]] = ()
        self._stepped = SteppedGradients()
        self.has_shadowed = False
        self.calling: Call | None = None
        self._put_off: Callable[[], None] | None = None

    @property
    def partners(self) -> Sequence[DistributedDataParallel]:
        """The models that share a context of torch's with the optimizer, if known."""
        return [model for reference in self._partners if (model := reference()) is not None]

    @partners.setter
    def partners(self, models: Sequence[DistributedDataParallel]) -> None:
        # Weakly: a model keeps its hook, which keeps the optimizer.
        self._partners = [weakref.ref(model) for model in models]

    @property
    def is_inside(self) -> bool:
        """Whether the optimizer is in a Join context."""
        return self._is_inside()

    @property
    def steps_in_backward(self) -> bool:
        """Whether a communication hook steps the optimizer."""
        return self._scheduler is not None and self._scheduler.steps_early

    @property
    def _scheduler(self) -> BucketScheduler | None:
        source = self._coordinator.source
        assert source is None or isinstance(source, BucketScheduler)
        return source

    def begin(self, *, divide_by_running: bool) -> None:
        """Enter a context.

        Args:
            divide_by_running: whether gradients that a hook reduces are averaged over the ranks that still have data.
        """
        self.someone_joined, self.has_shadowed, self.calling = _perhaps, False, None
        self._divide_by_running(divide_by_running)

    def end(self) -> None:
        """Leave it; a no-op outside."""
        scheduler = self._scheduler
        if self.has_shadowed and scheduler is not None and self.someone_joined is _perhaps:
            # The others have stepped with these gradients, and may have set theirs to zero.
            for param in self._sharding.params:
                if isinstance(param.grad, GradPlaceholder) and scheduler.gradients.is_used(param.grad._tensor):
                    param.grad = None
        self.has_shadowed = False
        self.someone_joined, self.partners = _perhaps, ()
        self._divide_by_running(False)

    def _divide_by_running(self, divides: bool) -> None:
        self.divides_by_running = divides
        if self._scheduler is not None:
            self._scheduler.gradients.divides_by_running = divides

    # ------------------------------------------------------------------ a rank that still has data

    def attend(
        self,
        call: Call,
        groups: Sequence[ParamGroup],
        settings: Sequence[float] = (),
        arguments: Mapping[str, Any] | None = None,
        *,
        impossible: Exception | None = None,
    ) -> None:
        """Tell ranks that have run out what is about to be done, and give them what they need. Collective.

        A no-op outside of a context, and while nobody can have run out.

        Args:
            call: what.
            groups: the public param groups.
            settings: what a clipping is asked for, as numbers.
            arguments: keyword arguments of a step.
            impossible: the error to raise if somebody has run out, where ranks without data cannot take part.

        Raises:
            PeerLostError: if a rank is gone.
            TypeError: if somebody has run out, and a hyperparameter or an argument cannot be told; on every rank.
            Exception: what a rank that has run out cannot do.
        """
        sharding = self._sharding
        if self._control.alone or not self._is_inside() or not self.someone_joined():
            return
        untold = impossible if impossible is not None else self.untold(groups, arguments)
        attendance = call_roll(self._control, call, untold=untold)
        bring_parameters(self._sharding, attendance)
        if attendance.joined and attendance.giver == self._control.ranks.rank:
            give(
                self._control,
                attendance.joined,
                groups,
                sharding.hyperparameters.agreed,
                sharding.params,
                sharding.layout.plan,
                settings,
                arguments,
                gradients=call is Call.STEP and self._scheduler is None,
            )

    def untold(self, groups: Sequence[ParamGroup], arguments: Mapping[str, Any] | None = None) -> Exception | None:
        """Return an error that names what ranks without data cannot be told, if there is something."""
        return unwritable(groups, arguments or {})

    def stepped(self) -> None:
        """Remember which gradients have been used, to know what a rank has accumulated when it runs out."""
        self.forget_what_others_used()
        if self._scheduler is None and not self._control.alone:
            # In every step, also outside of contexts: a window may begin before one.
            self._stepped.record(self._sharding.params)

    # ------------------------------------------------------------------ a rank that has run out

    def shadow(self, groups: list[ParamGroup], consolidate: Callable[[int], None]) -> Call:
        """Do what the others do, once. Collective.

        Args:
            groups: the public param groups; they take over the hyperparameters of a running rank.
            consolidate: brings the state to a rank.

        Returns:
            What was done.

        Raises:
            PeerLostError: if a rank is gone.
            Exception: what a rank has met.
        """
        refusal = self._refusal()
        attendance = call_roll(self._control, Call.JOINED if refusal is None else Call.REFUSED, refusal)
        if not attendance.running:
            return Call.JOINED
        given = self._take(attendance, groups)
        if attendance.call is Call.CLIP:
            self._clip(given)
        elif attendance.call is Call.STEP:
            self._step(given, groups)
        elif attendance.call is Call.CONSOLIDATE:
            consolidate(int(given.settings[0]))
        return attendance.call

    def begin_backward(self, *, adds: bool) -> None:
        """Take note that a backward begins, before its first gradient.

        Args:
            adds: whether there are gradients to which it adds.
        """
        if self._scheduler is not None and self.divides_by_running:
            if not adds:
                self._scheduler.gradients.forget_carried()
            # What was reduced before is not to be divided by the number of ranks that take part in this one.
            self._scheduler.gradients.carry_replaced()

    def attend_backward(self, bucket: Bucket) -> None:
        """Tell, or hear, that a backward begins in which shards may be stepped. Collective."""
        if bucket.is_shadow:
            self.shadow_backward(self._groups())
        else:
            self.attend(Call.BACKWARD, self._groups())

    def end_shadow(self, end: Callable[[], None]) -> None:
        """Leave the end of a backward that is being shadowed to :meth:`finish_backward`, inside a context."""
        if self.is_inside:
            self._put_off = end
        else:
            end()

    def finish_backward(self) -> None:
        """Finish a backward that was shadowed. Collective; a no-op if there was none.

        Raises:
            PeerLostError: if a rank is gone.
            Exception: if shards are stepped during backward, all that a step raises.
        """
        end, self._put_off = self._put_off, None
        if end is not None:
            end()

    def shadow_iteration(self, groups: list[ParamGroup], consolidate: Callable[[int], None]) -> bool:
        """Do what the others do until they have stepped, where nobody tells how often they call. Collective.

        Nothing, if they accumulate: no gradients have been reduced since their last step.

        Args:
            groups: the public param groups.
            consolidate: see :meth:`shadow`.

        Returns:
            Whether there was a step.

        Raises:
            PeerLostError: if a rank is gone.
            Exception: what a rank has met.
        """
        scheduler = self._scheduler
        if scheduler is not None and scheduler.has_buckets:
            accumulates = all(state.phase is BucketPhase.STEPPED for state in scheduler.buckets.arrived)
        else:
            accumulates = self._partners_accumulate()
        if accumulates:
            return False
        while self.shadow(groups, consolidate) in (Call.CLIP, Call.CONSOLIDATE):
            pass
        return True

    def shadow_backward(self, groups: list[ParamGroup]) -> None:
        """Get hyperparameters before shards are stepped during a backward that this rank shadows. Collective.

        Raises:
            PeerLostError: if the rank that gives is gone.
        """
        if not self.someone_joined():
            # This rank has failed, and the others do not know yet.
            return
        attendance = call_roll(self._control, Call.JOINED)
        if attendance.running:
            self._take(attendance, groups)

    def report(self, error: Exception, call: Call, groups: Sequence[ParamGroup]) -> None:
        """Come to a call that the other ranks are in, or will make, only to tell them of an error. Collective.

        Args:
            error: what has happened on this rank.
            call: which.
            groups: the public param groups.

        Raises:
            Exception: always; the others raise it too.
        """
        try:
            if call is not Call.STEP:
                # All others begin with a meeting.
                self._control.check_consistent(f"a call in {call.name.lower()}", error=error)
            with self._coordinator.as_shadow():
                self._coordinator.step(groups, None, {}, error)
        finally:
            del error

    def _take(self, attendance: Attendance, groups: list[ParamGroup]) -> Handover:
        sharding = self._sharding
        bring_parameters(self._sharding, attendance)
        given = take(
            self._control,
            attendance.giver,
            sharding.params,
            sharding.layout.plan,
            gradients=attendance.call is Call.STEP and self._scheduler is None,
        )
        given.apply(groups)
        sharding.hyperparameters.adopt(given.agreed, groups)
        if self._scheduler is not None and not self._scheduler.steps_early:
            # What the others have set to zero, or None, since their backward.
            for index in given.zeroed:
                grad = sharding.params[index].grad
                if type(grad) is GradPlaceholder:
                    grad.zero_()
            for index in given.absent:
                sharding.params[index].grad = None
        return given

    def _clip(self, given: Handover) -> None:
        sharding = self._sharding
        if self._scheduler is None:
            return
        max_norm, norm_type, error_if_nonfinite = given.settings
        try:
            clip_over_ranks(
                self._control,
                self._scheduler.owned_gradients,
                max_norm,
                norm_type,
                sharding.params[0].dtype,
                error_if_nonfinite=bool(error_if_nonfinite),
            )
        except RuntimeError as error:
            # That a norm is not finite concerns the ranks that asked for it, and may go on without this step.
            if type(error) is not RuntimeError:
                raise

    def _step(self, given: Handover, groups: Sequence[ParamGroup]) -> None:
        self.has_shadowed = True
        with self._coordinator.as_shadow():
            self._coordinator.step(
                groups, None, given.arguments, gradients=given.gradients if self._scheduler is None else None
            )

    def forget_what_others_used(self) -> None:
        """Take the others' marks out of what DDP contributes the next time of this rank's used parameters.

        DDP does not wait for the reduction of these marks on a rank without data; it is over when a step is. Before the
        first backward they are whatever was in memory.
        """
        for model in self.partners:
            used = local_used_map(model)
            if model.find_unused_parameters and used is not None:
                used.zero_()

    def _refusal(self) -> Exception | None:
        """Why this rank cannot take part in a step, if it cannot: it has accumulated what nobody can add any more."""
        sharding = self._sharding
        if self.has_shadowed or self.someone_joined is not _perhaps or self._scheduler is not None:
            return None
        if not self._stepped.differ(self._sharding.params):
            return None
        for index, param in enumerate(sharding.params):
            if param.grad is not None and is_nonzero([param.grad]):
                name = sharding.layout.plan.tensors[index].name
                return RuntimeError(
                    f"this rank ran out of data with a gradient in {name!r} that has not been stepped, in torch's "
                    f"Join, which would leave it out: {USE_OURS}"
                )
        return None

    def _partners_accumulate(self) -> bool:
        """Whether DDP has told, in the iteration that was just shadowed, that the others do not reduce gradients."""
        return bool(self.partners) and not any(model.require_forward_param_sync for model in self.partners)


def _perhaps() -> bool:
    return True
