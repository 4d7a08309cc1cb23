"""Uneven inputs: train with DistributedDataParallel and a sharded optimizer until every rank has used all of its data.

A drop-in for ``torch.distributed.algorithms.join``, with its names and signatures. Ranks that run out of data take part
in what the others do, as if they contributed zero gradients; what they had accumulated counts. Parameters end where a
single process would have ended that sees the batches of all ranks, if each forward is followed by its backward, and no
step is left out; docs/join.md lists what is not right yet.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.join import Joinable, JoinHook, _JoinConfig
from torch.nn.parallel import DistributedDataParallel
from zeroshard import OptimizerJoinHook
from zeroshard_comm import Control, DisagreementError, PeerLostError, RankGroup

from zeroshard_integrations.announcements import Announcement, Announcements, Status
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
    all ranks have left. So a step is shadowed where there is one, and only there: backwards under ``ddp.no_sync()``,
    several backwards before a step and models that are called without gradients work. Gradients that are set to zero
    without a step do not, once a rank has run out.

    Entering is collective: all ranks enter a block with the same joinables and settings, in the same order. While all
    ranks have data, the first joinable's call costs one small message to each peer and back; for a model it is
    waited for when the forward has been computed.

    Args:
        joinables: models in DistributedDataParallel, sharded optimizers, and any other
            :class:`Joinable`, of one process group; a model before the optimizer of its parameters. The first is called
            first in every iteration.
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
        self._called: list[int] = []
        """What this rank has called since the first joinable's last call, by place."""
        self._iterations = self._accumulations = 0
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
            detail=lambda: entered,
            explain=lambda here, there, rank, other: f"rank {rank} has entered {here}, and rank {other} {there}",
        )
        self._hooks = [joinable.join_hook(**self._kwargs) for joinable in self._joinables]
        self._steps = {place: hook for place, hook in enumerate(self._hooks) if isinstance(hook, OptimizerJoinHook)}
        self._board = Announcements(self._control)
        self._note = FailureNote(ranks.group, ranks.rank)
        self._is_inside = True
        for place, joinable in enumerate(self._joinables):
            self._take_in(place, joinable)
        for place in self._steps:
            params = set(params_of(self._joinables[place]))
            self._models_of[place] = [
                model for model in self._models.values() if not params.isdisjoint(model.ddp.parameters())
            ]
        return self

    def _take_in(self, place: int, joinable: Joinable) -> None:
        enabled: Callable[[], bool] = _always
        if isinstance(joinable, DistributedDataParallel):
            model = ModelInJoin(joinable, divide_by_running=self._divide_by_running, answered=self._answered)
            params = set(joinable.parameters())
            owners = [
                hook
                for number, hook in self._steps.items()
                if not params.isdisjoint(params_of(self._joinables[number]))
            ]
            model.is_stepped = any(not hook.steps_in_backward for hook in owners)
            model.behind = [hook.finish_backward for hook in owners]
            model.takes_buckets = bool(optimizers_of_hooks(joinable))
            model.has_unstepped = lambda: any(hook.has_unstepped() for hook in owners)
            model.enter()
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
        if place == 0:
            self._called = []
        elif not self._called:
            name = type(self._joinables[place]).__name__
            raise RuntimeError(
                f"joinable {place} ({name}) of the Join block is called before joinable 0, by whose calls ranks tell "
                f"whether they have run out of data: list it first"
            )
        refuse_without_model(self._joinables, self._joinables[place])
        self._called.append(place)
        model = self._models.get(place)
        announcement = model.begin(place) if model is not None else Announcement(Status.RUNNING, place)
        if place in self._steps:
            self._accumulations = 0
            self._closed(place)
        elif model is not None and model.reduces:
            self._accumulations += 1
        # While nobody has run out, nobody needs to hear of more than one call in an iteration.
        if place == 0 or self._joined:
            self._board.post(announcement)
            if model is None or self._throw or model.waits_in_front():
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
        if here.joinable != there.joinable:
            names = [type(self._joinables[answer.joinable]).__name__ for answer in (here, there)]
            return (
                f"rank {one} is about to call joinable {here.joinable} ({names[0]}) of the Join block, and rank "
                f"{other} joinable {there.joinable} ({names[1]}): ranks that still have data must make the same calls"
            )
        if here.with_grad != there.with_grad:
            yes, no = (one, other) if here.with_grad else (other, one)
            return f"rank {yes} calls the model with gradients enabled, and rank {no} without: do the same on all ranks"
        yes, no = (one, other) if here.reduces else (other, one)
        return (
            f"rank {no} is in no_sync() and rank {yes} is not: backward would wait for ever. Decide by the number of "
            f"the batch, alike on all ranks that still have data; what a rank has accumulated when it runs out counts, "
            f"without a synchronized backward of its own"
        )

    def _closed(self, place: int) -> None:
        """An optimizer is stepped: what its models have accumulated has been used."""
        for model in self._models_of[place]:
            model.close()

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
            is_last_joiner = self._shadow_the_others()
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
            if model.phase is not Phase.IDLE:
                return RuntimeError(
                    "this rank has left the Join block behind a forward whose backward() is missing, as with break "
                    "inside an iteration: leave the loop before the forward or behind the step, or compute what is "
                    "not to be trained under torch.no_grad()"
                )
            if model.is_open and model.reduces and model.is_stepped and not self._joined and self._accumulations < 2:
                return RuntimeError(
                    "this rank has left the Join block behind a backward() whose step() is missing, as with break "
                    "inside an iteration: leave the loop behind the step"
                )
        return None

    def _shadow_the_others(self) -> bool:
        """Take part in what the ranks do that still have data; return whether this was one of the last."""
        is_last_joiner = True
        self._is_shadow = True
        try:
            while True:
                self._board.post(Announcement(Status.JOINED))
                answers = self._board.answers()
                self._learn(answers)
                if not self._running:
                    return is_last_joiner
                is_last_joiner = False
                self._shadow(next(answer for answer in answers if answer.status is Status.RUNNING))
        finally:
            self._is_shadow = False

    def _shadow(self, announcement: Announcement) -> None:
        place = announcement.joinable
        model = self._models.get(place)
        if model is not None:
            model.shadow(announcement, self._running)
            self._iterations += place == 0 and announcement.reduces
            return
        self._hooks[place].main_hook()
        if place in self._steps:
            self._closed(place)

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
        """Do what the others wait for in this iteration, so that they come to where they can be told."""
        if not self._called:
            return
        reduces = True
        model = self._models.get(self._called[-1])
        if model is not None:
            reduces = model.reduces
            if model.phase is Phase.FORWARD and reduces:
                model.shadow_backward(self._running)
        if self._joined or not reduces:
            # The others announce whatever they call.
            return
        for place, hook in enumerate(self._hooks):
            if place in self._called:
                continue
            if place in self._models:
                self._models[place].shadow(Announcement(Status.RUNNING, place, True, True), self._running)
            elif place in self._steps:
                if not self._steps[place].steps_in_backward:
                    self._steps[place].report(error)
            else:
                hook.main_hook()


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
