"""What ``TORCH_DISTRIBUTED_DEBUG`` adds to a step: nothing, a log of what the optimizer is, or checks of every step."""

from __future__ import annotations

import logging
from collections.abc import Callable

from zeroshard.description import describe
from zeroshard.invariants import InvariantChecks
from zeroshard.sharding import Sharding
from zeroshard.state.metadata import StateMetadata

_logger = logging.getLogger(__name__)


class StepDebugging:
    """Logs plan, buckets and traffic after the first step, and after steps that have changed plan or buckets.

    Args:
        sharding: the plan at work.
        metadata: tells what state other ranks have.
        checks: also made in every step, if not None.
    """

    def __init__(self, sharding: Sharding, metadata: StateMetadata, checks: InvariantChecks | None) -> None:
        self._sharding, self._metadata, self._checks = sharding, metadata, checks
        self._logged: object = None

    def before_update(self) -> None:
        """Make the checks before an update. Collective, if there are some.

        Raises:
            Exception: as :meth:`InvariantChecks.before_update`.
        """
        if self._checks is not None:
            self._checks.before_update()

    def after_step(self) -> None:
        """Make the checks after a step, and log what has changed. Collective, if there are checks.

        Raises:
            Exception: as :meth:`InvariantChecks.after_step`.
        """
        if self._checks is not None:
            self._checks.after_step()
        sharding = self._sharding
        buckets = sharding.buckets.by_index.items() if sharding.buckets is not None else ()
        present = sharding.layout.plan, [(index, bucket.tensors) for index, bucket in buckets]
        if present != self._logged:
            self._logged = present
            _logger.info("%s\n%s", describe(sharding, self._metadata), sharding.layout.plan)


def step_debugging(sharding: Sharding, metadata: StateMetadata, is_in_join: Callable[[], bool]) -> StepDebugging | None:
    """Return what the level asks for that was set when the optimizer was built; None for ``OFF``."""
    level = sharding.policy.debug_level
    if level == "OFF":
        return None
    checks = InvariantChecks(sharding, is_in_join) if level == "DETAIL" else None
    return StepDebugging(sharding, metadata, checks)
