"""What a rank that has run out of data does in a Join block: what the others announce, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from zeroshard_integrations.join.announcements import Announcement, Held, Kind, Status, agreed
from zeroshard_integrations.join.block import JoinBlock
from zeroshard_integrations.join.model import ModelInJoin


class Shadow:
    """Takes part in what the others do, from when this rank has left its loop.

    Args:
        block: of this rank.

    Attributes:
        reductions: how many reductions of the first model's gradients it has taken part in.
    """

    def __init__(self, block: JoinBlock) -> None:
        self._block = block
        self._unended: list[ModelInJoin] = []
        self.reductions = 0

    def follow(self) -> bool:
        """Take part until all have left their loops. Collective.

        Returns:
            Whether this rank had data to the end.

        Raises:
            Exception: what a rank has met.
        """
        block = self._block
        block.is_shadow = True
        try:
            while True:
                before = block.joined
                block.board.post(Announcement(Status.JOINED))
                answers = block.board.answers()
                block.learn(answers)
                if not block.running:
                    break
                self._do(answers)
            if before:
                for model in block.models.values():
                    self._hold_as_the_last(model, before)
        finally:
            block.is_shadow = False
        return block.rank not in before

    def _do(self, answers: Sequence[Announcement]) -> None:
        block = self._block
        announcement = next(answer for answer in answers if answer.status is Status.RUNNING)
        place = announcement.joinable
        if announcement.kind is Kind.END:
            for model in self._unended:
                model.end_backward()
            self._unended = []
        elif announcement.kind is Kind.CALL:
            block.hooks[place].main_hook()
        elif announcement.kind is Kind.FORWARD:
            block.models[place].shadow_forward(announcement)
        else:
            model = block.models[place]
            held, giver = agreed(answers)
            block.hand_over(model, held, giver, block.joined)
            model.hold(held)
            if announcement.reduces:
                self.reductions += place == min(block.models)
                self._reduce(model)

    def _reduce(self, model: ModelInJoin) -> None:
        model.shadow_backward(self._block.running)
        if model.steps_in_backward:
            # Not before the others are where they step: they may reduce the gradients of further models before.
            self._unended.append(model)
        else:
            model.end_backward()

    def _hold_as_the_last(self, model: ModelInJoin, joined: Sequence[int]) -> None:
        """Let ranks that have run out do with their gradients what the last have done since, so that all have the same.

        Args:
            model: whose.
            joined: who had run out before the last.
        """
        block = self._block
        is_last = block.rank not in joined
        mine = model.held.now() if is_last else Held.KEPT
        model.refuse_untold(mine)
        block.board.post(Announcement(Status.JOINED, held=mine))
        answers = block.board.answers()
        if any(answer.status is Status.FAILED for answer in answers):
            block.learn(answers)
        held, giver = agreed(answers, [rank for rank in range(len(answers)) if rank not in joined])
        block.hand_over(model, held, giver, joined)
        if not is_last:
            model.hold(held)
