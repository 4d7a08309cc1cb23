"""What a loop does to reduced gradients before a step: owners do it, and every rank knows the norms that follow."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from zeroshard_core import Plan

from zeroshard.grads.norms import GradNorms

if TYPE_CHECKING:
    from zeroshard.grads.bucket import BucketState


class GradOperations:
    """Does to the owned part of a gradient what is done to its placeholder, and follows its norms.

    Nothing is communicated. The next step compares what was done on all ranks: an operation on one rank alone is an
    error of that step on every rank.

    Args:
        norms: of the gradients; None if they are not exchanged.
        steps_early: whether shards are stepped during backward, so that nothing can be done.

    Attributes:
        norms, steps_early: as given.
        orders: of the norms that are exchanged.
        takes_norms: whether norms are exchanged at the end of this backward; GradExchange sets it.
        found_inf: what a GradScaler has found in the gradients of the last backward; None before it has looked.
    """

    def __init__(self, norms: GradNorms | None, *, steps_early: bool) -> None:
        self.norms, self.steps_early, self.takes_norms = norms, steps_early, False
        self.orders: Sequence[float] = norms.orders if norms is not None else ()
        self._done: dict[int, str] = {}
        self.found_inf: torch.Tensor | None = None
        self._clamped: set[int] = set()
        self._zeroed: set[int] = set()

    def advice(self, operation: str) -> str:
        """Say why an operation on a placeholder cannot be done, and what to do instead."""
        if self.steps_early and operation == "unscaling":
            return (
                "this hook has stepped during backward, with the scaled gradients: load a checkpoint, and use "
                "reduce_to_owner_hook, or bfloat16, which needs no GradScaler"
            )
        if self.steps_early:
            return (
                "this hook steps during backward, so gradients can be neither clipped nor changed. Use "
                "reduce_to_owner_hook for that"
            )
        return (
            "every rank knows its norm, p.grad.norm(), which is finite if all values are, and its largest magnitude, "
            "p.grad.norm(math.inf), with register_reduce_to_owner(..., norms=(2, math.inf)); it can be multiplied by a "
            "number or clamped in place, as torch's functions for clipping do; to change gradients in another way, do "
            "it in a hook of the tensor, or train without a communication hook"
        )

    @property
    def stepping(self) -> str:
        """Say how to accumulate gradients if shards are stepped during backward; else empty."""
        advice = (
            ". To accumulate gradients of several backwards, make all but the last one under no_sync(), or use "
            "reduce_to_owner_hook: this hook steps in every backward"
        )
        return advice if self.steps_early else ""

    def why_unchangeable(self) -> str:
        """Say why gradients cannot be changed by the loop, and what to do; empty if they can."""
        if self.takes_norms or self.norms is None:
            return ""
        return "inside Join a rank without data does not follow that: call optimizer.clip_grad_norm_()"

    def why_unknown(self, tensor: int) -> str:
        """Say why the norm of a gradient is not known, and what to do; empty if it is."""
        if tensor in self._zeroed:
            return ""
        if self.norms is None or not self.norms.are_known:
            return (
                "norms are exchanged at the end of a backward, if it succeeds, but neither inside Join nor with "
                "norms=False: call optimizer.clip_grad_norm_()"
            )
        if tensor in self._clamped:
            return "it was clamped, after which its norm is not known: take norms before"
        return ""

    def norm(self, tensor: int, order: float, device: torch.device) -> torch.Tensor:
        """Return the norm of a gradient on ``device``; see :meth:`GradNorms.norm`."""
        if tensor in self._zeroed:
            return torch.zeros((), dtype=torch.float64, device=device)
        assert self.norms is not None
        return self.norms.norm(tensor, order)

    def scale(
        self, tensor: int, owned: torch.Tensor | None, factor: float | torch.Tensor, *, divides: bool = False
    ) -> None:
        """Multiply a gradient.

        Args:
            tensor: its index.
            owned: this rank's part of it, if it owns some.
            factor: a number, or a tensor of one element.
            divides: whether to divide instead.
        """
        # First, as a factor that is none raises on every rank.
        self.scaled(tensor, "div_" if divides else "mul_", factor, divides=divides)
        if owned is not None:
            _ = owned.div_(factor) if divides else owned.mul_(factor)

    def clamp(self, tensor: int, owned: torch.Tensor | None, low: float | None, high: float | None) -> None:
        """Clamp a gradient; arguments as for :meth:`scale`."""
        if owned is not None:
            owned.clamp_(low, high)
        self._clamped.add(tensor)
        self._note(tensor, f"clamp_({low}, {high})")

    def clipped(self, factor: float) -> None:
        """Take note that all owners have multiplied all gradients by the same factor."""
        if self.norms is not None:
            for tensor in range(self.norms.tensors):
                self.norms.scale(tensor, factor)

    def scaled(self, tensor: int, kind: str, factor: float | torch.Tensor, *, divides: bool = False) -> None:
        """Take note that owners multiply a gradient; ``kind`` names the operation in errors."""
        if isinstance(factor, torch.Tensor) and factor.device.type != "cpu":
            # The host does not wait for an accelerator.
            factor = factor.detach().double().view(())
            self._note(tensor, kind)
        else:
            factor = float(factor)
            self._note(tensor, f"{kind}({factor})")
        if self.norms is not None:
            if divides:
                factor = 1.0 / factor if not isinstance(factor, float) or factor else math.inf
            self.norms.scale(tensor, factor)

    def _note(self, tensor: int, what: str) -> None:
        done = f"{self._done[tensor]}, {what}" if tensor in self._done else what
        # A checksum in place of a long list.
        self._done[tensor] = done if len(done) < 200 else f"... ({zlib.crc32(done.encode()):08x}), {what}"

    # ------------------------------------------------------------------ what the next step compares

    @property
    def skips_step(self) -> bool:
        """Whether a GradScaler skips the next step; the host may wait for an accelerator."""
        return self.found_inf is not None and bool(self.found_inf)

    @property
    def to_text(self) -> Mapping[str, str]:
        """What was done to each gradient since it was reduced, for the agreement of a step."""
        return {f"what was done to the gradient of tensor {tensor}": done for tensor, done in self._done.items()}

    def agreed(self) -> None:
        """Forget what was done: all ranks have compared it, and step."""
        self._done.clear()

    def replaced(self, tensors: Iterable[int]) -> None:
        """Forget what was done to gradients that have been replaced by new ones."""
        for tensor in tensors if self._done else ():
            self._done.pop(tensor, None)

    def zeroed(self, tensor: int) -> None:
        """Take note that a gradient was set to zero."""
        self._zeroed.add(tensor)
        self._done.pop(tensor, None)

    def rebuild(self, plan: Plan) -> None:
        """Take over a plan."""
        if self.norms is not None:
            self.norms.rebuild(plan)

    def exchange_norms(self, buckets: Sequence[BucketState], *, agreed: bool) -> None:
        """Exchange norms after a backward; or leave them unknown until the next one. Collective.

        Args:
            buckets: of that backward.
            agreed: as for :meth:`GradNorms.exchange`.

        Raises:
            DisagreementError, PeerLostError: as :meth:`GradNorms.exchange`.
        """
        self._clamped.clear()
        self._zeroed.clear()
        self.found_inf = None
        if self.norms is not None:
            self.norms.are_known = False
            if self.takes_norms:
                owned = {tensor: part for bucket in buckets for tensor, part in bucket.owned_gradients().items()}
                self.norms.exchange(owned, agreed=agreed)
                self.norms.are_known = True
