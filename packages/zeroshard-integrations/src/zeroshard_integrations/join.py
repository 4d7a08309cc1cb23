"""Uneven inputs: train with DistributedDataParallel and a sharded optimizer until every rank has used all of its data.

A drop-in for ``torch.distributed.algorithms.join``, with its names and signatures. Ranks that run out of data take part
in what the others do, as if they contributed zero gradients; what they had accumulated counts. Parameters end where a
single process would have ended that sees the batches of all ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.join import Joinable, JoinHook, _JoinConfig
from torch.nn.parallel import DistributedDataParallel
from zeroshard import OptimizerJoinHook
from zeroshard.attendance import Call
from zeroshard.handover import give_gradients, take_gradients
from zeroshard_comm import Control, DisagreementError, PeerLostError, RankGroup

from zeroshard_integrations.announcements import Announcement, Announcements, Held, Kind, Status
from zeroshard_integrations.call_order import CallOrder, Made
from zeroshard_integrations.ddp import optimizers_of_hooks
from zeroshard_integrations.failure_note import FailureNote
from zeroshard_integrations.join_checks import (
    common_group,
    params_of,
    refuse_nested,
    refuse_without_model,
)
from zeroshard_integrations.join_config import BlockConfig
from zeroshard_integrations.join_model import ModelInJoin, Phase

__all__ = ["Join", "JoinHook", "Joinable"]


class Join:
    """A block in which every rank trains on as many batches as it has.

    ``with Join([ddp, optimizer]) as join:`` around the training loop. Every joinable tells the block before it
    communicates (:meth:`notify_join_context`), and a rank that has left the loop calls the hook of that joinable, until
    all ranks have left. Backwards are followed where their first gradient comes. So what is shadowed is what the others
    do: backwards under ``ddp.no_sync()``, several before a step, steps that are left out, forwards without a backward,
    and gradients that are never set to zero, or changed, all end where one process would have.

    Entering is collective: all ranks enter a block with the same joinables and settings, in the same order. While all
    ranks have data, the forward of a model costs one small message to each peer and back, which is waited for when the
    forward has been computed; a joinable that is neither a model nor a sharded optimizer waits in front.

    Args:
        joinables: models in DistributedDataParallel, sharded optimizers, and any other
            :class:`Joinable`, of one process group; a model before the optimizer of its parameters.
        enable: False to do nothing, where inputs are known to be even.
        throw_on_early_termination: raise an error on every rank as soon as one has run out of data.
        **kwargs: handed to the ``join_hook`` of every joinable. ``divide_by_initial_world_size`` (True) tells whether
            gradients are averaged over all ranks, or over those that still have data.

    Raises:
        ValueError: if there are no joinables, one is there twice, they are of several process groups, an optimizer
            comes before its model or is torch's, or a communication hook's model or optimizer is missing.
        TypeError: if something is no joinable.
        RuntimeError: if a joinable is in a block already.

    Example:
        >>> import os, tempfile, torch
        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> from zeroshard import ZeroRedundancyOptimizer
        >>> from zeroshard_integrations.join import Join
        >>> store = dist.FileStore(tempfile.mkstemp()[1], 1)
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> ddp = DistributedDataParallel(torch.nn.Linear(4, 1))
        >>> optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3)
        >>> with Join([ddp, optimizer]) as join:
        ...     for batch in torch.ones(3, 2, 4):  # any number on any rank
        ...         optimizer.zero_grad()
        ...         ddp(batch).sum().backward()
        ...         optimizer.step()
        >>> join.running, join.shadowed_steps
        (0, 0)
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        joinables: Sequence[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,  # noqa: ANN401 - arguments of any joinable
    ) -> None:
        self._joinables = list(joinables)
        self._enable, self._throw = enable, throw_on_early_termination
        self._group = common_group(self._joinables)
        self._divide_by_running = not kwargs.get("divide_by_initial_world_size", True)
        self._kwargs = kwargs
        self._world_size, self._rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        self._begin()

    def _begin(self) -> None:
        self._hooks: list[JoinHook] = []
        self._models: dict[int, ModelInJoin] = {}
        self._steps: dict[int, OptimizerJoinHook] = {}
        self._models_of: dict[int, list[ModelInJoin]] = {}
        """By an optimizer's place, the models of its parameters."""
        self._running = self._world_size
        self._joined: tuple[int, ...] = ()
        self._order = CallOrder()
        self._has_announcers = self._ends = False
        self._iterations = 0
        self._shadowed: list[ModelInJoin] = []
        self._is_inside = self._is_shadow = self._is_told = False

    # ------------------------------------------------------------------ what a training loop may ask

    @property
    def running(self) -> int:
        """How many ranks still have data, as of the last forward; 0 behind the block."""
        return self._running

    @property
    def shadowed_steps(self) -> int:
        """How many steps of the others this rank has taken part in without data of its own.

        Of all sharded optimizers; of reductions of gradients, where no sharded optimizer steps by itself.
        """
        of_hooks = [hook.steps for hook in self._steps.values() if not hook.steps_in_backward]
        return sum(of_hooks) if of_hooks else self._iterations

    @staticmethod
    def notify_join_context(joinable: Joinable) -> dist.Work | None:
        """Tell the block that a joinable is in, if it is in one, that it is about to communicate.

        A joinable calls this, or torch's, before the collectives that its hook shadows, on every rank alike.

        Args:
            joinable: itself.

        Returns:
            None in a block of ours; in torch's, the operation under way that tells the other ranks, if there is one.

        Raises:
            DisagreementError: if the ranks that still have data are in different calls.
            PeerLostError: if a rank is gone.
            RuntimeError: if a rank has run out of data, with ``throw_on_early_termination``.
            Exception: what another rank has met inside the block.
        """
        config = getattr(joinable, "_join_config", None)
        if isinstance(config, BlockConfig):
            config.notify()
            return None
        work: dist.Work | None = TorchJoin.notify_join_context(joinable)
        return work

    # ------------------------------------------------------------------ entering

    def __enter__(self) -> Join:
        """Enter the block. Collective.

        Raises:
            DisagreementError: if ranks enter with other joinables or settings.
            PeerLostError: if a rank is gone.
        """
        if not self._enable:
            return self
        for joinable in self._joinables:
            refuse_nested(joinable)
        self._begin()
        ranks = RankGroup.of(self._group)
        self._control = Control(ranks)
        told = ", ".join([type(joinable).__name__ for joinable in self._joinables])
        settings = {"throw_on_early_termination": self._throw, **self._kwargs}
        told_settings = ", ".join([f"{name}={_told(value)}" for name, value in sorted(settings.items())])
        entered = f"Join([{told}], {told_settings})"
        self._control.meet(
            "entering Join",
            _digest(entered),
            error=self._make_hooks(),
            detail=lambda: entered,
            explain=lambda here, there, rank, other: f"rank {rank} has entered {here}, and rank {other} {there}",
        )
        self._steps = {place: hook for place, hook in enumerate(self._hooks) if isinstance(hook, OptimizerJoinHook)}
        # Those that wait for announcements by themselves, so that steps between them need none.
        self._has_announcers = len(self._steps) < len(self._joinables)
        self._board = Announcements(self._control)
        self._note = FailureNote(ranks.group, ranks.rank)
        self._is_inside = True
        for place, joinable in enumerate(self._joinables):
            self._take_in(place, joinable)
        for place in self._steps:
            params = set(params_of(self._joinables[place]))
            self._models_of[place] = [model for model in self._models.values() if not params.isdisjoint(model.params)]
        return self

    def _make_hooks(self) -> Exception | None:
        """Ask the joinables for their hooks; return what one of them raised, with all of them as before."""
        hooks: list[JoinHook] = []
        try:
            for joinable in self._joinables:
                hooks.append(joinable.join_hook(**self._kwargs))
        except Exception as error:  # noqa: BLE001 - every rank must hear of it, whatever it is
            for hook in hooks:
                if isinstance(hook, OptimizerJoinHook):
                    hook.leave()
            return error
        self._hooks = hooks
        return None

    def _take_in(self, place: int, joinable: Joinable) -> None:
        enabled: Callable[[], bool] = _always
        if isinstance(joinable, DistributedDataParallel):
            params = set(joinable.parameters())
            owners = [
                hook
                for number, hook in self._steps.items()
                if not params.isdisjoint(params_of(self._joinables[number]))
            ]
            model = ModelInJoin(
                joinable,
                owners,
                takes_buckets=bool(optimizers_of_hooks(joinable)),
                divide_by_running=self._divide_by_running,
                answered=self._answered,
                begins=lambda model: self._backward_begins(place, model),
            )
            self._models[place] = model
            enabled = model.synchronizes_buffers
        if place in self._steps:
            self._steps[place].follow(lambda: bool(self._joined))
        joinable._join_config = BlockConfig.make(
            lambda: self._notified(place), enabled, throw_on_early_termination=self._throw
        )

    # ------------------------------------------------------------------ a rank that still has data

    def _notified(self, place: int) -> None:
        """A joinable is about to communicate on this rank."""
        if self._is_shadow:
            return
        if self._is_told:
            raise RuntimeError("this Join block has ended with an error on every rank: leave it")
        self._answered()
        refuse_without_model(self._joinables, self._joinables[place])
        model = self._models.get(place)
        if model is not None:
            announcement = model.begin(place)
            self._order.add(Made(Kind.FORWARD, place, reduces=announcement.reduces))
        else:
            hook = self._steps.get(place)
            announcement = Announcement(Status.RUNNING, Kind.CALL, place)
            self._order.add(Made(Kind.CALL, place, hook.calling if hook is not None else None))
            if hook is not None and hook.calling is Call.STEP:
                self._stepped(place)
            if hook is not None and self._has_announcers and not self._joined:
                # The others are told at the next forward. While nobody has run out, nobody needs to hear of more.
                return
        self._board.post(announcement)
        if model is None or self._throw or self._joined or model.waits_in_front():
            self._answered()

    def _backward_begins(self, place: int, model: ModelInJoin) -> None:
        """The first gradient of a backward is there on this rank."""
        self._order.add(Made(Kind.BACKWARD, place, reduces=model.reduces))
        if not self._joined:
            model.add_to(Held.DROPPED if model.held.are_none() else Held.KEPT)
            return
        if model.steps_in_backward:
            for hook in model.owners:
                hook.refuse_untold()
        held = model.held.now()
        model.refuse_changed(held)
        self._answered()
        self._board.post(Announcement(Status.RUNNING, Kind.BACKWARD, place, model.reduces, held=held))
        answers = self._board.answers()
        self._learn(answers)
        held, giver = _agreed(answers)
        self._hand_over(model, held, giver, self._joined)
        model.add_to(held)
        if model.steps_in_backward and not self._ends:
            # Behind what DDP does at the end of a backward, and before the hooks' own steps.
            self._ends = True
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(self._backward_ends))

    def _backward_ends(self) -> None:
        self._ends = False
        self._board.post(Announcement(Status.RUNNING, Kind.END))
        self._answered()

    def _answered(self) -> int:
        """Wait for what the ranks have announced, if that was not done; return how many still have data."""
        if self._board.is_posted:
            self._learn(self._board.answers())
        return self._running

    def _learn(self, answers: Sequence[Announcement]) -> None:
        """Take in what all ranks have announced; raise on all of them what has to be raised on all."""
        by_status = {status: [r for r, a in enumerate(answers) if a.status is status] for status in Status}
        running = by_status[Status.RUNNING]
        if by_status[Status.FAILED]:
            self._is_told = True
            self._control.meet("leaving Join")
            raise RuntimeError(f"rank {by_status[Status.FAILED][0]} has left the Join block with an error")
        self._running, self._joined = len(running), tuple(by_status[Status.JOINED])
        if self._joined:
            for model in self._models.values():
                model.watch()
        if self._throw and running and self._joined:
            self._is_told = True
            raise RuntimeError(
                f"rank {self._joined[0]} has run out of data, and throw_on_early_termination is set: an error on every "
                f"rank. Catch it around the block to stop training here, or leave the setting out to go on"
            )
        first = answers[running[0]] if running else None
        for rank in running:
            if answers[rank] != first:
                self._is_told = True
                raise DisagreementError(self._difference(answers, running[0], rank))

    def _difference(self, answers: Sequence[Announcement], one: int, other: int) -> str:
        here, there = answers[one], answers[other]
        if (here.kind, here.joinable) != (there.kind, there.joinable):
            told = [
                f"rank {rank} is about to {_IN_WORDS[answer.kind]} joinable {answer.joinable} "
                f"({type(self._joinables[answer.joinable]).__name__})"
                for rank, answer in ((one, here), (other, there))
            ]
            return f"{' and '.join(told)} of the Join block: ranks that still have data must make the same calls"
        if here.with_grad != there.with_grad:
            yes, no = (one, other) if here.with_grad else (other, one)
            return f"rank {yes} calls the model with gradients enabled, and rank {no} without: do the same on all ranks"
        yes, no = (one, other) if here.reduces else (other, one)
        return (
            f"rank {no} is in no_sync() and rank {yes} is not: backward would wait for ever. Decide by the number of "
            f"the batch, alike on all ranks that still have data; what a rank has accumulated when it runs out counts, "
            f"without a synchronized backward of its own"
        )

    def _stepped(self, place: int) -> None:
        """An optimizer is stepped: what its models have accumulated has been used."""
        for model in self._models_of[place]:
            model.awaits_step = False

    # ------------------------------------------------------------------ leaving

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Shadow the others until all have left. Collective.

        Raises:
            RuntimeError: if this rank has left in the middle of an iteration; on every rank.
            DisagreementError: if ranks that still have data make different calls; on every rank.
            PeerLostError: if a rank is gone.
            Exception: what another rank has met inside the block.
        """
        if not self._is_inside:
            return
        try:
            if value is None:
                self._leave_with_the_others()
            elif isinstance(value, Exception) and not self._is_told:
                self._fail(value)
        finally:
            self._is_inside = False
            self._running = 0 if value is None else self._running
            for place, joinable in enumerate(self._joinables):
                if place in self._models:
                    self._models[place].leave()
                joinable._join_config = _JoinConfig.construct_disabled_join_config()
                if place in self._steps:
                    self._steps[place].leave()

    def _leave_with_the_others(self) -> None:
        try:
            early = self._left_early()
            if early is not None:
                raise early
            self._answered()
            before = self._shadow_the_others()
            is_last_joiner = self._rank not in before
            if before:
                for model in self._models.values():
                    self._hold_as_the_last(model, before)
            for hook in self._hooks:
                hook.post_hook(is_last_joiner)
        except Exception as error:
            if not self._is_told:
                self._fail(error)
            raise

    def _left_early(self) -> Exception | None:
        """Return what is wrong, if this rank has left in the middle of an iteration."""
        for model in self._models.values():
            problem = model.problem() if model.phase is Phase.IDLE else None
            if problem is not None:
                return problem
            if model.phase is Phase.BACKWARD or (model.phase is Phase.FORWARD and not self._joined):
                return RuntimeError(
                    "this rank has left the Join block behind a forward whose backward() is missing, as with break "
                    "inside an iteration: leave the loop before the forward or behind the step, or compute what is "
                    "not to be trained under torch.no_grad()"
                )
            if not self._joined and self._is_unstepped(model):
                # Where somebody has run out, the others tell of their step.
                return RuntimeError(
                    "this rank has left the Join block behind a backward() whose step() is missing, as with break "
                    "inside an iteration: leave the loop behind the step, or set gradients to zero where a step is "
                    "left out"
                )
        return None

    def _is_unstepped(self, model: ModelInJoin) -> bool:
        """Whether a step is missing behind the last backward, which the others are going to make.

        Not in windows, which may be incomplete; not if gradients are gone, or not finite, so that steps are left out.
        """
        if not model.awaits_step or model.has_windows or model.steps_in_backward or not model.owners:
            return False
        return model.held.now() is not Held.DROPPED and (model.takes_buckets or model.held.are_finite())

    def _shadow_the_others(self) -> Sequence[int]:
        """Take part in what the ranks do that still have data; return those that had run out before the last ones."""
        self._is_shadow = True
        try:
            while True:
                before = self._joined
                self._board.post(Announcement(Status.JOINED))
                answers = self._board.answers()
                self._learn(answers)
                if not self._running:
                    return before
                self._shadow(answers)
        finally:
            self._is_shadow = False

    def _shadow(self, answers: Sequence[Announcement]) -> None:
        announcement = next(answer for answer in answers if answer.status is Status.RUNNING)
        place = announcement.joinable
        if announcement.kind is Kind.END:
            for model in self._shadowed:
                model.end_backward()
            self._shadowed = []
        elif announcement.kind is Kind.CALL:
            self._hooks[place].main_hook()
        elif announcement.kind is Kind.FORWARD:
            self._models[place].shadow_forward(announcement)
        else:
            model = self._models[place]
            held, giver = _agreed(answers)
            self._hand_over(model, held, giver, self._joined)
            model.hold(held)
            if not announcement.reduces:
                return
            self._iterations += place == min(self._models)
            model.shadow_backward(self._running)
            if model.steps_in_backward:
                # Not before the others are where they step: they may reduce the gradients of further models before.
                self._shadowed.append(model)
            else:
                model.end_backward()

    def _hold_as_the_last(self, model: ModelInJoin, joined: Sequence[int]) -> None:
        """Let ranks that have run out do with their gradients what the last have done since, so that all have the same.

        Args:
            model: whose.
            joined: who had run out before the last.
        """
        is_last = self._rank not in joined
        self._board.post(Announcement(Status.JOINED, held=model.held.now() if is_last else Held.KEPT))
        answers = self._board.answers()
        if any(answer.status is Status.FAILED for answer in answers):
            self._learn(answers)
        held, giver = _agreed(answers, [rank for rank in range(self._world_size) if rank not in joined])
        self._hand_over(model, held, giver, joined)
        if not is_last:
            model.hold(held)

    def _hand_over(self, model: ModelInJoin, held: Held, giver: int, joined: Sequence[int]) -> None:
        """Bring gradients that were changed to the ranks that have run out. Collective."""
        if held is not Held.CHANGED:
            return
        values = not model.takes_buckets
        if giver == self._rank:
            give_gradients(self._control, joined, model.params, model.held.gone(), values=values)
        elif self._rank in joined:
            take_gradients(self._control, giver, model.params, values=values)

    # ------------------------------------------------------------------ failing

    def _fail(self, error: Exception) -> None:
        """Tell the others of this rank's error; raise only to name the rank that failed before it."""
        self._is_shadow = True
        self._note.leave(error)
        try:
            if _is_lost(error) or any(model.phase is Phase.BACKWARD for model in self._models.values()):
                # Messages may be under way that nobody waits for. The others find the note.
                self._blame(error)
                return
            try:
                self._tell(error)
            except PeerLostError:
                self._blame(error)
        finally:
            self._is_shadow = False
            del error

    def _tell(self, error: Exception) -> None:
        """Come to where the others can be told, and tell them.

        Raises:
            PeerLostError: if a rank is gone.
        """
        for come in (self._answered, lambda: self._finish_iteration(error)):
            try:
                if not self._is_told:
                    come()
            except PeerLostError:
                raise
            except Exception:  # noqa: BLE001, S110 - others have errors of their own; this rank keeps the one it has
                pass
        if not self._is_told:
            self._is_told = True
            self._board.post(Announcement(Status.FAILED))
            self._board.answers()
            self._control.compare("leaving Join", error=error)

    def _blame(self, error: Exception) -> None:
        """Raise, if a rank has failed before this one has lost it."""
        first = self._note.read()
        if first is not None and first[0] != self._rank:
            raise RuntimeError(f"rank {first[0]} has failed inside the Join block: {first[1]}") from error

    def _finish_iteration(self, error: Exception) -> None:
        """Make the calls with the others that they make before they can be told, as far as that is known."""
        if self._joined or self._is_known_to_all():
            # Where somebody has run out, all calls are announced.
            return
        for made in self._expected():
            hook = self._steps.get(made.joinable)
            if made.kind is Kind.BACKWARD:
                if made.reduces:
                    self._models[made.joinable].shadow_backward(self._running)
                    self._models[made.joinable].end_backward()
            elif made.kind is not Kind.CALL or hook is None or not self._has_announcers:
                return
            elif made.call is not None:
                # Raises.
                hook.report(error, made.call)

    def _is_known_to_all(self) -> bool:
        """Whether the error has left a call in which all ranks have raised it."""
        last = self._order.last
        hook = self._steps.get(last.joinable) if last is not None and last.kind is Kind.CALL else None
        return hook is not None and hook.calling is not None

    def _expected(self) -> Sequence[Made]:
        """The calls that the others make next, as this rank did the last time, or as any loop does the first time."""
        open_models = {place: model for place, model in self._models.items() if model.phase is Phase.FORWARD}
        found = self._order.expected()
        if found:
            return found
        called = self._order.made_by_joinables()
        if not called or any(place not in called for place in self._models):
            return []
        backwards = [Made(Kind.BACKWARD, place, reduces=model.reduces) for place, model in open_models.items()]
        steps = [
            Made(Kind.CALL, place, Call.STEP)
            for place, hook in self._steps.items()
            if place not in called and not hook.steps_in_backward and all(m.reduces for m in self._models_of[place])
        ]
        return [*backwards, *steps]


_IN_WORDS = {
    Kind.CALL: "call",
    Kind.FORWARD: "call",
    Kind.BACKWARD: "compute gradients of",
    Kind.END: "step during the backward of",
}


def _agreed(answers: Sequence[Announcement], among: Sequence[int] | None = None) -> tuple[Held, int]:
    """What has become of the gradients on ranks that have data, or some others, and the first rank that says so."""
    if among is None:
        among = [rank for rank, answer in enumerate(answers) if answer.status is Status.RUNNING]
    held, rank = max((answers[rank].held, -rank) for rank in among)
    return held, -rank


def _is_lost(error: Exception) -> bool:
    """Whether an error is that of a backend: another rank is gone, or has not come."""
    return isinstance(error, (PeerLostError, dist.DistError)) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "Timed out"))
    )


def _digest(text: str) -> int:
    return zlib.crc32(text.encode())


def _told(value: object) -> str:
    """A setting in words that are the same on all ranks."""
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def _always() -> bool:
    return True
