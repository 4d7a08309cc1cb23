"""The interface of a step to gradients that are reduced during backward, from any source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from itertools import chain
from typing import Any

import torch
from zeroshard_comm import Coordinator

from zeroshard.grads.bucket import OwnedGradients
from zeroshard.grads.early_steps import EarlySteps
from zeroshard.grads.table import GradTable
from zeroshard.param_buffers import ParamBroadcast
from zeroshard.plan.layout import Layout

END = "the end of backward()"


class StepMode(Enum):
    """The time at which shards are stepped."""

    IN_STEP = "in step()"
    AFTER_BACKWARD = "after the last bucket"
    PER_BUCKET = "as soon as a bucket is reduced"


class GradSource(ABC):
    """Reduces the gradients of each backward, and fills the table of their states.

    There are two sources: communication hooks of DistributedDataParallel, which owns the memory of its buckets, and
    :func:`zeroshard.shard_gradients`, which keeps only this rank's parts.
    """

    table: GradTable
    early_steps: EarlySteps | None = None
    """Checks calls of ``step()`` if shards are stepped during backward; else None."""

    @property
    @abstractmethod
    def states(self) -> Sequence[OwnedGradients]:
        """The buckets of the last backward, in order."""

    @property
    def transient_bytes(self) -> int | None:
        """The largest number of bytes of buckets in flight; None if DDP owns the memory of the buckets."""
        return None

    def _bound(self) -> AbstractContextManager[None]:
        """Set the gradients of this rank's shards to the reduced ones, in the block."""
        return self.table.bound(self.states)

    @abstractmethod
    def check_layout(self, params: Sequence[torch.Tensor], layout: Layout) -> None:
        """Raise a ValueError, on this rank only, if a layout cannot be used. Call it before ranks agree."""

    @abstractmethod
    def lay_out(self, layout: Layout) -> None:
        """Adopt a layout that has passed :meth:`check_layout`, or parameters that have moved."""

    def settings(self, params: Sequence[torch.Tensor], layout: Layout, first: int = 0) -> Mapping[str, int]:  # noqa: ARG002 - for subclasses
        """Return settings of the parameters from ``first`` on, which must be equal on all ranks."""
        return {}

    @abstractmethod
    def prepare_step(self) -> None:
        """Determine which gradients the next step uses; raise a RuntimeError if a gradient was never reduced.

        Raises a RuntimeError on every rank if a backward has not ended.
        """

    def unreduced_gradients(self) -> Sequence[torch.Tensor | None]:
        """Return the gradients of this rank's shards of parameters that are in no bucket."""
        return []

    def gradients_to_clip(self) -> list[torch.Tensor]:
        """Return this rank's parts of all gradients that the next step uses."""
        self.prepare_step()
        found = [*self.unreduced_gradients()]
        for state in self.states:
            found += state.gradients(self.table.steppable(state.tensors))
        return [gradient for gradient in found if gradient is not None]

    @abstractmethod
    def release(self) -> None:
        """Free the memory of gradients that no step can use."""

    @abstractmethod
    def check_hook(self, mode: StepMode) -> None:
        """Raise a ValueError if a communication hook of this mode cannot use this source."""

    @property
    def broadcasts(self) -> Sequence[ParamBroadcast]:
        """The broadcasts for which a step waits, by bucket; empty if all parameters are broadcast together."""
        return []

    def accept_step(self) -> None:
        """Accept a call of ``step()`` for a backward that has stepped already."""
        raise NotImplementedError

    def step_rest(self, arguments: Mapping[str, Any]) -> None:
        """Step and broadcast the shards that backward has not stepped."""
        raise NotImplementedError


def check_norms(norms: bool) -> None:
    """Raise a ValueError if an argument ``norms`` is not a bool."""
    if not isinstance(norms, bool):
        raise ValueError(f"norms={norms!r} is not supported: pass True for the 2-norms of all gradients, or False")


def on_any_rank(coordinator: Coordinator, bits: Sequence[Sequence[bool]]) -> list[tuple[bool, ...]]:
    """Return for each bit of each row whether any rank has set it. Collective, after ranks have agreed on END."""
    combined = iter(coordinator.any_of([*chain.from_iterable(bits)], END))
    return [tuple([next(combined) for _ in row]) for row in bits]
