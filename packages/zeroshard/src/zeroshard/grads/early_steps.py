"""Checks the loop of a hook that steps during backward: one backward that has stepped for each call of ``step()``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from zeroshard.guard import Guard


class EarlySteps:
    """Counts the backwards that have stepped, and remembers the hyperparameters that they have stepped with.

    Args:
        guard: its ``refused`` is set.
        checksum: returns a checksum of the hyperparameters.
    """

    def __init__(self, guard: Guard, checksum: Callable[[], int]) -> None:
        self._guard, self._checksum = guard, checksum
        self._backwards = self._stepped_with = 0
        self._unstepped = ""
        """Why the last backward has not stepped, if it should have."""

    @contextmanager
    def one(self) -> Iterator[None]:
        """Record the step of a backward, which is made in the block."""
        try:
            yield
        except BaseException as raised:
            self._unstepped = f"the last backward has not stepped: {raised}"
            raise
        self._unstepped = ""
        self._backwards += 1
        self.accept_hyperparameters()

    @property
    def has_stepped(self) -> bool:
        """Whether a backward has stepped since the last call of ``step()``."""
        return self._backwards > 0

    def has_same_hyperparameters(self) -> bool:
        """Whether hyperparameters are those that the last backward has stepped with, or that were accepted since."""
        return self._checksum() == self._stepped_with

    def accept_hyperparameters(self) -> None:
        """Treat the current hyperparameters as those that the last backward has stepped with."""
        self._stepped_with = self._checksum()

    def check_refused(self) -> None:
        """Raise a RuntimeError if an earlier call was refused, or the last backward has not stepped."""
        self._guard.check_broken()
        if refusal := self._guard.refused or self._unstepped:
            raise RuntimeError(refusal)

    def accept_step(self, changed: str, edited: str, *, has_gradients: bool) -> None:
        """Accept a call of ``step()``: one backward has stepped, and nothing was changed that it would have seen.

        Args:
            changed: a tensor whose gradient was removed or set to zero since; empty if there is none.
            edited: a tensor whose state was edited since; empty if there is none.
            has_gradients: whether gradients of a backward are there.

        Raises:
            RuntimeError: if that is not so, from then on until a state is loaded.
        """
        backwards, self._backwards = self._backwards, 0
        found = ""
        if backwards > 1:
            found = f"{backwards} backwards have stepped since the last call of step()"
        elif backwards and not self.has_same_hyperparameters():
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
                f"after step(); or use reduce_to_owner_hook, which leaves stepping to step(). Parameters differ from a "
                f"run without sharding: load a state before you go on"
            )
            raise RuntimeError(self._guard.refused)

    def reset(self) -> None:
        """Forget how ``step()`` was called: a state has been loaded."""
        self._backwards, self._unstepped = 0, ""
