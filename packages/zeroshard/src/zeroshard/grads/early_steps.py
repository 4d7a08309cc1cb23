"""Checks the loop of a hook that steps during backward: one backward that has stepped for each call of ``step()``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from zeroshard.grads.placeholder import GradPlaceholder
from zeroshard.plan.layout import label_in

if TYPE_CHECKING:
    from zeroshard.engine import Engine
    from zeroshard.grads.exchange import GradExchange


class EarlySteps:
    """Counts the backwards that have stepped, and remembers the hyperparameters that they have stepped with.

    Args:
        engine: of the optimizer; its groups are read, and its ``refused`` is set.
        exchange: holds this object; its gradients are looked at.
    """

    def __init__(self, engine: Engine, exchange: GradExchange) -> None:
        self._engine, self._gradients, self._buckets = engine, exchange.gradients, exchange.buckets
        self._backwards = self._stepped_with = 0
        self._unstepped = ""
        """Why the last backward has not stepped, if it should have."""

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around the step of a backward."""
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
        return self._engine.hyperparameters.update(self._engine.groups) == self._stepped_with

    def accept_hyperparameters(self) -> None:
        """Treat the current hyperparameters as those that the last backward has stepped with."""
        self._stepped_with = self._engine.hyperparameters.update(self._engine.groups)

    def check_step(self) -> None:
        """Check a call of ``step()``: one backward has stepped, and nothing was changed that it would have seen.

        Raises:
            RuntimeError: if that is not so, from then on until a state is loaded; or if gradients were never reduced.
        """
        engine = self._engine
        engine.check_broken()
        refusal = engine.refused or self._unstepped or self._gradients.refusal
        if refusal:
            raise RuntimeError(refusal)
        dropped = self._dropped()
        assert engine.exchange is not None
        engine.exchange.check()
        backwards, self._backwards = self._backwards, 0
        found = ""
        if backwards > 1:
            found = f"{backwards} backwards have stepped since the last call of step()"
        elif backwards and not self.has_same_hyperparameters():
            found = "a hyperparameter was changed after the backward that has stepped with it"
        elif backwards and engine.debugging is not None and (edited := engine.debugging.edited_state()):
            found = f"the state of {edited} was changed after the backward that has stepped with it"
        elif backwards and dropped:
            found = f"the gradient of {dropped} was removed or set to zero after the backward that has stepped with it"
        elif not backwards and any(type(param.grad) is GradPlaceholder for param in engine.params):
            found = "step() was called again with the same gradients, and no backward has stepped in between"
        if found:
            engine.refused = (
                f"{found}: this communication hook steps during backward, which is for exactly one backward outside of "
                f"no_sync() per step(). Accumulate under no_sync(), and change hyperparameters, gradients and state "
                f"after step(); or use reduce_to_owner_hook, which leaves stepping to step(). Parameters differ from a "
                f"run without sharding: load a state before you go on"
            )
            raise RuntimeError(engine.refused)

    def _dropped(self) -> str:
        """Name a tensor whose gradient was removed or set to zero since the backward that has stepped, if there is."""
        for state in self._buckets.arrived:
            if not state.zeroed and self._gradients.has_placeholders(state):
                continue
            for tensor, param, present in zip(state.tensors, state.params, state.present, strict=True):
                is_there = type(param.grad) is GradPlaceholder or self._gradients.is_replaced(param)
                if present and (tensor in state.zeroed or not is_there):
                    return label_in(self._engine.layout.plan, tensor)
        return ""

    def reset(self) -> None:
        """Forget how ``step()`` was called: a state has been loaded."""
        self._backwards, self._unstepped = 0, ""
