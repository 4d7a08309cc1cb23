"""One Join block that was entered, on one rank: what it knows of the others, and what a rank with data tells them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from zeroshard import OptimizerJoinHook
from zeroshard._torch_private import set_join_config
from zeroshard.joining.attendance import Call
from zeroshard_comm import Control, DisagreementError, RankGroup

from zeroshard_integrations._torch_private import queue_callback
from zeroshard_integrations.ddp import optimizers_of_hooks
from zeroshard_integrations.join.announcements import (
    Announcement,
    Announcements,
    Held,
    Kind,
    Status,
    agreed,
    difference,
)
from zeroshard_integrations.join.call_order import CallOrder, Made
from zeroshard_integrations.join.checks import params_of, refuse_nested, refuse_without_model
from zeroshard_integrations.join.config import BlockConfig
from zeroshard_integrations.join.failure_note import FailureNote
from zeroshard_integrations.join.model import ModelInJoin

ENDED = "this Join block has ended with an error on every rank: leave it, and do not catch errors inside of it"


class JoinBlock:
    """The state of a block. It belongs to the thread that trains, and to the modules that implement Join.

    Args:
        joinables: in the order of the block.
        group: of all of them.
        throws: whether a rank that runs out is an error on every rank.
        arguments: for the joinables' hooks.

    Attributes:
        joinables: as given.
        hooks: theirs, by place.
        models: those that are models, by place.
        steps: the hooks of sharded optimizers, by place.
        models_of: by the place of a sharded optimizer, the models of its parameters.
        rank: this rank.
        control: the channel of the ranks.
        board: their announcements.
        note: for ranks that no announcement reaches.
        order: of this rank's calls.
        running: how many ranks still have data, as far as is known.
        joined: the others, ascending.
        is_shadow: whether this rank takes part in what others do, so that its joinables' calls are not its own.
        is_told: whether all ranks have an error to raise, and know it.
        is_over: whether all ranks have left their loops, and listen no longer.

    Raises:
        DisagreementError: if ranks enter with other joinables or settings; on every rank, as what follows.
        RuntimeError: if a joinable is in a block already.
        Exception: what a joinable has raised when it was asked for its hook.
        PeerLostError: if a rank is gone.
    """

    def __init__(
        self, joinables: Sequence[Joinable], group: dist.ProcessGroup, *, throws: bool, arguments: Mapping[str, Any]
    ) -> None:
        for joinable in joinables:
            refuse_nested(joinable)
        ranks = RankGroup.of(group)
        self.joinables, self._throws, self._arguments = joinables, throws, arguments
        self.hooks: list[JoinHook] = []
        self.models: dict[int, ModelInJoin] = {}
        self.rank, self.running = ranks.rank, ranks.world_size
        self.joined: tuple[int, ...] = ()
        self.order = CallOrder()
        self.is_shadow = self.is_told = self.is_over = self._end_is_due = False
        self.control = Control(ranks)
        self.steps: dict[int, OptimizerJoinHook] = {}
        try:
            self._meet()
            self.board = Announcements(self.control)
            self.note = FailureNote(ranks.group, ranks.rank)
            for model in self.models.values():
                model.enter(self.control)
        except BaseException:
            self.reset()
            raise
        self.models_of = {
            place: [
                model for model in self.models.values() if not set(params_of(joinables[place])).isdisjoint(model.params)
            ]
            for place in self.steps
        }

    @property
    def has_announcers(self) -> bool:
        """Whether there are joinables of which each call is announced, so that steps in between need not be."""
        return len(self.steps) < len(self.joinables)

    def reset(self) -> None:
        """Take all joinables out of the block; also after an error."""
        for place, joinable in enumerate(self.joinables):
            if place in self.models:
                self.models[place].leave()
            set_join_config(joinable, None)
            if place in self.steps:
                self.steps[place].leave()

    # ------------------------------------------------------------------ entering

    def _meet(self) -> None:
        told = ", ".join([type(joinable).__name__ for joinable in self.joinables])
        settings = {"throw_on_early_termination": self._throws, **self._arguments}
        told_settings = ", ".join([f"{name}={_told(value)}" for name, value in sorted(settings.items())])
        entered = f"Join([{told}], {told_settings})"
        self.control.check_consistent(
            "entering Join",
            zlib.crc32(entered.encode()),
            error=self._prepare(),
            detail=lambda: entered,
            explain=lambda here, there, rank, other: f"rank {rank} has entered {here}, and rank {other} {there}",
        )

    def _prepare(self) -> Exception | None:
        """Ask the joinables for their hooks, and take them in; return what went wrong."""
        try:
            for place, joinable in enumerate(self.joinables):
                hook = joinable.join_hook(**self._arguments)
                self.hooks.append(hook)
                if isinstance(hook, OptimizerJoinHook):
                    self.steps[place] = hook
            for place, joinable in enumerate(self.joinables):
                self._take_in(place, joinable)
        except Exception as error:  # noqa: BLE001 - every rank must hear of it, whatever it is
            return error
        return None

    def _take_in(self, place: int, joinable: Joinable) -> None:
        enabled: Callable[[], bool] = _always
        if isinstance(joinable, DistributedDataParallel):
            params = set(joinable.parameters())
            model = ModelInJoin(
                joinable,
                [hook for at, hook in self.steps.items() if not params.isdisjoint(params_of(self.joinables[at]))],
                takes_buckets=bool(optimizers_of_hooks(joinable)),
                divide_by_running=not self._arguments.get("divide_by_initial_world_size", True),
                answered=self.answered,
                begins=lambda model: self._backward_begins(place, model),
            )
            self.models[place] = model
            enabled = model.synchronizes_buffers
        if place in self.steps:
            self.steps[place].follow(lambda: bool(self.joined))
        config = BlockConfig.make(lambda: self._notified(place), enabled, throw_on_early_termination=self._throws)
        set_join_config(joinable, config)

    # ------------------------------------------------------------------ telling the others

    def _notified(self, place: int) -> None:
        """A joinable is about to communicate on this rank."""
        if self.is_shadow or self.is_over:
            return
        self._refuse_ended()
        self.answered()
        refuse_without_model(self.joinables, self.joinables[place])
        model, hook = self.models.get(place), self.steps.get(place)
        if model is not None:
            # Whatever a backward has left that an exception has ended.
            self._end_is_due = False
            announcement = model.begin(place)
            self.order.add(Made(Kind.FORWARD, place, reduces=announcement.reduces))
        else:
            announcement = Announcement(Status.RUNNING, Kind.CALL, place)
            self.order.add(Made(Kind.CALL, place, hook.calling if hook is not None else None))
        if hook is not None:
            if hook.calling is Call.STEP:
                for stepped in self.models_of[place]:
                    stepped.awaits_step = False
            if self.has_announcers and not self.joined:
                # The others are told at the next forward. While nobody has run out, nobody needs to hear of more.
                return
        self.board.post(announcement)
        if model is None or self._throws or self.joined or model.waits_in_front():
            self.answered()

    def _refuse_ended(self) -> None:
        if self.is_told:
            raise RuntimeError(ENDED)

    def _backward_begins(self, place: int, model: ModelInJoin) -> None:
        """A backward begins on this rank; where somebody has run out, its first gradient is there."""
        if self.is_over:
            return
        self._refuse_ended()
        self.order.add(Made(Kind.BACKWARD, place, reduces=model.reduces))
        if not self.joined:
            model.add_to(model.seen())
            return
        if model.steps_in_backward:
            for hook in model.owners:
                hook.refuse_untold()
        mine = model.held.now()
        model.refuse_untold(mine)
        self.answered()
        self.board.post(Announcement(Status.RUNNING, Kind.BACKWARD, place, model.reduces, held=mine))
        answers = self.board.answers()
        self.learn(answers)
        held, giver = agreed(answers)
        self.hand_over(model, held, giver, self.joined)
        model.add_to(held)
        if model.steps_in_backward and not self._end_is_due:
            # Behind what DDP does at the end of a backward, and before the hooks' own steps.
            self._end_is_due = True
            queue_callback(lambda: queue_callback(self._backward_ends))

    def _backward_ends(self) -> None:
        self._end_is_due = False
        self.board.post(Announcement(Status.RUNNING, Kind.END))
        self.answered()

    def hand_over(self, model: ModelInJoin, held: Held, giver: int, joined: Sequence[int]) -> None:
        """Bring gradients that were changed to the ranks that have run out. Collective; a no-op if none were.

        Args:
            model: whose.
            held: what has become of them.
            giver: the rank that has them.
            joined: the ranks that need them.
        """
        if held not in (Held.ZERO, Held.CHANGED):
            return
        if giver == self.rank:
            model.give(self.control, joined)
        elif self.rank in joined:
            model.take(self.control, giver)

    # ------------------------------------------------------------------ hearing from the others

    def answered(self) -> int:
        """Wait for what the ranks have announced, if that was not done; return how many still have data.

        Raises:
            Exception: as :meth:`learn`.
        """
        if self.board.is_posted:
            self.learn(self.board.answers())
        return self.running

    def learn(self, answers: Sequence[Announcement]) -> None:
        """Take in what all ranks have announced; raise on all of them what has to be raised on all.

        Raises:
            DisagreementError: if ranks that still have data are about to do different things.
            RuntimeError: if a rank has run out, and that is to be an error.
            Exception: what a rank has failed with.
        """
        if not self.joined and answers[0].status is Status.RUNNING and answers.count(answers[0]) == len(answers):
            # As ever.
            return
        by_status = {status: [r for r, a in enumerate(answers) if a.status is status] for status in Status}
        running = by_status[Status.RUNNING]
        if by_status[Status.FAILED]:
            self.is_told = True
            self.control.check_consistent("leaving Join")
            raise RuntimeError(f"rank {by_status[Status.FAILED][0]} has left the Join block with an error")
        self.running, self.joined = len(running), tuple(by_status[Status.JOINED])
        if self.joined:
            for model in self.models.values():
                model.expect_shadows()
        if self._throws and running and self.joined:
            self.is_told = True
            raise RuntimeError(
                f"rank {self.joined[0]} has run out of data, and throw_on_early_termination is set: an error on every "
                f"rank. Catch it around the block to stop training here, or leave the setting out to go on"
            )
        for rank in running:
            if answers[rank] != answers[running[0]]:
                self.is_told = True
                names = [type(joinable).__name__ for joinable in self.joinables]
                raise DisagreementError(difference(answers, running[0], rank, names))


def _told(value: object) -> str:
    """A setting in words that are the same on all ranks."""
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def _always() -> bool:
    return True
