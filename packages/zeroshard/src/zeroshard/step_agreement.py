"""The two agreements of a step: all ranks are at the same one, and none has failed; it has succeeded on all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zeroshard_comm import Control, PeerLostError, ShardingConfig, check_config, explain_configs

from zeroshard.pipeline import Pipeline
from zeroshard.replicas import Replicas


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


def share_parameters(
    control: Control,
    replicas: Replicas,
    pipeline: Pipeline | None,
    declared: int | None,
    failure: Exception | None,
    in_words: Callable[[], str],
) -> None:
    """Share all parameters, also after a failure, and learn whether anything was wrong on any rank. Collective.

    Args:
        control: the channel of the ranks.
        replicas: shares all parameters at once.
        pipeline: shares bucket by bucket, if that is how.
        declared: a number for this rank's hyperparameters; None agrees with all.
        failure: of this rank's step.
        in_words: called only after a difference: a configuration with the hyperparameters, as JSON.

    Raises:
        DisagreementError: if ranks have stepped with different hyperparameters.
        PeerLostError: if a rank is gone, and this one's step has not failed.
        Exception: what any rank's step has met, on every rank.
    """
    problem, verdict = failure, None
    try:
        try:
            pipeline.share() if pipeline is not None else replicas.share()
        except PeerLostError as error:
            problem = problem or error
        # Also where this rank has nothing to wait for: others may still be reading what it owns.
        verdict = control.inconsistency(
            "the end of step()", declared, error=problem, detail=in_words, explain=explain_configs
        )
        if verdict is not None:
            raise verdict
    except PeerLostError as error:
        if pipeline is not None:
            pipeline.break_off(error)
        # The others may be lost because of this rank's error, e.g. in collectives of a closure that raised here.
        if failure is not None:
            raise failure from error
        raise
    finally:
        del failure, problem, verdict
