"""Checks the loop if shards are stepped during backward: each ``step()`` needs exactly one such backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from zeroshard.changes import Seen
from zeroshard.guard import Guard


@dataclass(frozen=True)
class StepCalls:
    """The functions that step during backward and check the loop. They do not keep the optimizer alive.

    ``look`` looks at the model; its argument is True when a backward begins. ``step`` makes the step that ends a
    backward, given the result of ``look`` or None; it is collective. ``has_new_hyperparameters`` says whether one was
    changed since the last step. ``edited_state`` names a tensor whose state was edited since then, or returns ``""``.
    """

    look: Callable[[bool], Seen]
    step: Callable[[Seen | None], object]
    has_new_hyperparameters: Callable[[], bool]
    edited_state: Callable[[], str]


class EarlySteps:
    """Counts the backwards that have stepped. ``seen`` is the result of ``look`` from when the backward began."""

    def __init__(self, guard: Guard, calls: StepCalls) -> None:
        self._guard, self._calls = guard, calls
        self.seen: Seen | None = None
        self._backwards = 0
        self._unstepped = ""
        """The reason why the last backward failed to step; empty if it did not fail."""

    def make_step(self, prepare: Callable[[], object], skipped: str) -> None:
        """Make the step of a backward, and record whether it has succeeded.

        ``prepare`` raises if no step can be made; ``skipped`` says why a backward has reduced nothing, or is empty.
        """
        # Drop it here, because the frames of an error in it refer to the optimizer.
        seen, self.seen = self.seen, None
        try:
            if skipped:
                raise RuntimeError(skipped)
            if seen is not None and not seen.is_agreed:
                seen = self._calls.look(False)
            elif seen is not None:
                try:
                    prepare()
                except RuntimeError as error:
                    seen = replace(seen, error=error)
            self._calls.step(seen)
        except BaseException as raised:
            self._unstepped = f"the last backward has not stepped: {raised}"
            raise
        self._unstepped = ""
        self._backwards += 1

    @property
    def has_stepped(self) -> bool:
        """True if a backward has stepped since the last call of ``step()``."""
        return self._backwards > 0

    def check_refused(self) -> None:
        """Raise a RuntimeError if an earlier call was refused, or the last backward has not stepped."""
        self._guard.check_broken()
        if refusal := self._guard.refused or self._unstepped:
            raise RuntimeError(refusal)

    def accept_step(self, changed: str, *, has_gradients: bool) -> None:
        """Accept a call of ``step()``; raise a RuntimeError if the loop has misused the hook since the last call.

        ``changed`` names a tensor whose gradient the loop has changed since the backward, or is empty. After an error,
        further steps raise it too, until a state is loaded.
        """
        backwards, self._backwards = self._backwards, 0
        found = ""
        if backwards > 1:
            found = f"{backwards} backwards have stepped since the last call of step()"
        elif backwards and self._calls.has_new_hyperparameters():
            found = "a hyperparameter was changed after the backward that has stepped with it"
        elif backwards and (edited := self._calls.edited_state()):
            found = f"the state of {edited} was changed after the backward that has stepped with it"
        elif backwards and changed:
            found = f"the gradient of {changed} was removed or set to zero after the backward that has stepped with it"
        elif not backwards and has_gradients:
            found = "step() was called again with the same gradients, and no backward has stepped in between"
        if found:
            self._guard.refused = (
                f"{found}: this communication hook steps during backward, so each step() needs exactly one backward "
                f"outside of no_sync(). Accumulate under no_sync(), and change hyperparameters, gradients and state "
                f"after step(); or use reduce_to_owner_hook. Parameters have wrong values now: load a checkpoint"
            )
            raise RuntimeError(self._guard.refused)

    def reset(self) -> None:
        """Forget earlier backwards, after a state was loaded."""
        self._backwards, self._unstepped = 0, ""
