"""Checks the training loop of a hook that steps during backward: one such backward for each call of ``step()``."""

from __future__ import annotations

from collections.abc import Callable

from zeroshard.guard import Guard


class EarlySteps:
    """Counts the backwards that have stepped."""

    def __init__(self, guard: Guard, has_new_hyperparameters: Callable[[], bool]) -> None:
        self._guard, self._has_new_hyperparameters = guard, has_new_hyperparameters
        self._backwards = 0
        self._unstepped = ""
        """The reason why the last backward failed to step; empty if it did not fail."""

    def make_step(self, step: Callable[[], object]) -> None:
        """Make the step of a backward, and record whether it has succeeded."""
        try:
            step()
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

    def accept_step(self, changed: str, edited: str, *, has_gradients: bool) -> None:
        """Accept a call of ``step()`` if one backward has stepped, and the loop has changed nothing that it uses.

        ``changed`` and ``edited`` name a tensor whose gradient, or whose state, the loop has changed since. If this
        raises a RuntimeError, further steps raise it too, until a state is loaded.
        """
        backwards, self._backwards = self._backwards, 0
        found = ""
        if backwards > 1:
            found = f"{backwards} backwards have stepped since the last call of step()"
        elif backwards and self._has_new_hyperparameters():
            found = "a hyperparameter was changed after the backward that has stepped with it"
        elif backwards and edited:
            found = f"the state of {edited} was changed after the backward that has stepped with it"
        elif backwards and changed:
            found = f"the gradient of {changed} was removed or set to zero after the backward that has stepped with it"
        elif not backwards and has_gradients:
            found = "step() was called again with the same gradients, and no backward has stepped in between"
        if found:
            self._guard.refused = (
                f"{found}: this communication hook steps during backward, which is for exactly one backward outside of "
                f"no_sync() per step(). Accumulate under no_sync(), and change hyperparameters, gradients and state "
                f"after step(); or use reduce_to_owner_hook. Parameters have wrong values: load a state"
            )
            raise RuntimeError(self._guard.refused)

    def reset(self) -> None:
        """Forget earlier backwards, after a state was loaded."""
        self._backwards, self._unstepped = 0, ""
