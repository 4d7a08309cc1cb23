"""The agreement with which a step begins: every rank is at the same step of the same optimizer, and none has failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zeroshard_comm import Control, PeerLostError, ShardingConfig, check_config


class StepAgreement:
    """Is reached once, by whoever asks first: before the step, or after its closure, which communicates too.

    Args:
        control: the channel of the ranks. Its position counts the step if they agree, and only then.
        config: what this rank is going to step with.
        attend: called before.

    Attributes:
        has_failed: whether it has raised an error, which every rank has heard of.
    """

    def __init__(self, control: Control, config: ShardingConfig, attend: Callable[[], None]) -> None:
        self._control, self._config, self._attend = control, config, attend
        self._is_over = self.has_failed = False

    def reach(self, problem: Exception | None = None) -> None:
        """Agree with the other ranks. Collective the first time, and then a no-op.

        Args:
            problem: what this rank has met before.

        Raises:
            DisagreementError: if ranks are in different calls, steps or optimizers, or their layouts differ.
            PeerLostError: if a rank is gone, and this one has no problem.
            Exception: a rank's problem, on every rank.
        """
        if self._is_over:
            return
        self._is_over = self.has_failed = True
        try:
            self._attend()
            check_config(self._control, "step()", self._config, error=problem)
        except PeerLostError as lost:
            # The others may be lost because of this rank's problem, e.g. in collectives of a closure that raised here.
            if problem is not None:
                raise problem from lost
            raise
        finally:
            # A frame that keeps an error which passes through it keeps itself alive, and the model.
            del problem
        position = self._control.position
        if position is not None:
            self._control.position = replace(position, steps=position.steps + 1)
        self.has_failed = False
