"""Keeps the 2-norms of reduced gradients on every rank, and a checksum of the loop's operations on gradients.

Owners compute the norms of each bucket when it is reduced, while it is in the cache, and ranks exchange them at the end
of a backward. The owner of a gradient applies the loop's operations to it, and every rank computes the new norm.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from zeroshard_comm import Coordinator
from zeroshard_core import Plan

from zeroshard._torch_private import foreach_norm, version_of
from zeroshard.grads.bucket import BucketState

INF = float("inf")
_HALF = (torch.float16, torch.bfloat16)
Factor = float | torch.Tensor


@dataclass
class _Pending:
    """A factor by which gradients were scaled, but not yet their norms; ``magnitude`` copies its absolute value."""

    factor: Factor
    version: int
    divides: bool
    magnitude: Factor
    tensors: dict[int, None] = field(default_factory=dict)

    def is_by(self, factor: Factor, version: int, *, divides: bool) -> bool:
        if isinstance(factor, torch.Tensor) or isinstance(self.factor, torch.Tensor):
            return self.factor is factor and (self.version, self.divides) == (version, divides)
        return self.factor == factor and self.divides == divides


class _KnownNorms:
    """Holds the norms that ranks have exchanged, and the factors by which gradients were scaled since.

    Scaling all gradients takes a fixed number of operations on the device, for any number of gradients.

    Args:
        values: the norms, float64, by tensor.
        most: the largest finite value of each tensor's dtype.
        masks: the masks on the device, by the tensors that they select.
    """

    def __init__(self, values: torch.Tensor, most: torch.Tensor, masks: dict[tuple[int, ...], torch.Tensor]) -> None:
        self._values, self._most, self._masks = values, most, masks
        self._pending: _Pending | None = None
        self._read: dict[torch.dtype, Sequence[torch.Tensor]] = {}

    def norm(self, tensor: int, dtype: torch.dtype) -> torch.Tensor:
        self._apply()
        if dtype not in self._read:
            self._read[dtype] = self._values.to(dtype).unbind()
        return self._read[dtype][tensor]

    def scale(self, tensor: int, factor: Factor, *, divides: bool) -> None:
        """Record a factor. The next read of a norm applies it to all tensors with this factor at once."""
        version, pending = version_of(factor) if isinstance(factor, torch.Tensor) else 0, self._pending
        if pending is None or tensor in pending.tensors or not pending.is_by(factor, version, divides=divides):
            self._apply()
            copied = factor.detach().double().abs().view(()) if isinstance(factor, torch.Tensor) else abs(factor)
            pending = self._pending = _Pending(factor, version, divides, copied)
        pending.tensors[tensor] = None

    def scale_all(self, factor: Factor) -> None:
        """Multiply all norms by a factor of at most 1."""
        self._apply()
        self._values = self._values * factor
        self._read.clear()

    def _apply(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        magnitude, key = pending.magnitude, tuple(pending.tensors)
        if key not in self._masks:
            chosen = [tensor in pending.tensors for tensor in range(len(self._most))]
            self._masks[key] = torch.tensor(chosen, device=self._values.device)
        scaled = self._values / magnitude if pending.divides else self._values * magnitude
        if isinstance(magnitude, torch.Tensor) or (magnitude < 1.0 if pending.divides else magnitude > 1.0):
            # Elements that have become infinite stay so; the 2-norm is a bound of the largest magnitude.
            scaled = scaled.masked_fill(scaled > self._most, INF)
        self._values = torch.where(self._masks[key], scaled, self._values)
        self._read.clear()


class GradNorms:
    """Holds the norm of each gradient, and applies operations on a placeholder to the part that this rank owns.

    The norm of a tensor with one owner is torch's own, in the gradient's dtype. So is the norm of each part of a cut
    tensor; their squares are added in float64. Norms in half precision are computed in float32.

    Only :meth:`exchange` communicates. The next step compares :attr:`checksum`: after an operation on one rank alone it
    raises on every rank.

    Args:
        coordinator: the channel of the ranks' agreements.
        device: the device of the gradients.
        takes_norms: whether norms are computed; also an attribute.
        steps_early: whether shards are stepped during backward, so that gradients cannot be changed; also an attribute.
    """

    def __init__(self, coordinator: Coordinator, device: torch.device, *, takes_norms: bool, steps_early: bool) -> None:
        self._coordinator, self._device = coordinator, device
        self.takes_norms, self.steps_early = takes_norms, steps_early
        self._known: _KnownNorms | None = None
        self._clamped: set[int] = set()
        self._done: dict[int, int] = {}

    def rebuild(self, plan: Plan) -> None:
        """Make a slot for the norm of each part of each tensor of a plan. Norms must be computed again afterwards."""
        rank, tensors = self._coordinator.ranks.rank, range(len(plan.owners))
        *slots, total = accumulate(map(len, plan.owners), initial=0)
        self._slot_of = {i: slots[i] + plan.owners[i].index(rank) for i in tensors if rank in plan.owners[i]}
        cut = {i: range(slots[i], slots[i] + len(plan.owners[i])) for i in tensors if plan.is_cut(i)}
        # The last slot is 0 on every rank, and pads the rows of tensors with fewer parts.
        longest = max(map(len, cut.values()), default=0)
        rows = [[*parts, *[total] * (longest - len(parts))] for parts in cut.values()]
        # On the device, because indexing by a list copies it there in every backward, and the host waits for that.
        self._cut, self._parts, self._slots = (
            torch.tensor(numbers, dtype=torch.int64, device=self._device) for numbers in (list(cut), rows, slots)
        )
        self._numbers = torch.zeros(total + 1, dtype=torch.float64, device=self._device)
        self._own_slots: dict[tuple[int, ...], torch.Tensor] = {}
        self._masks: dict[tuple[int, ...], torch.Tensor] = {}
        largest = [torch.finfo(spec.dtype).max if spec.dtype.is_floating_point else INF for spec in plan.tensors]
        self._most = torch.tensor(largest, dtype=torch.float64, device=self._device)

    # ------------------------------------------------------------------ a backward

    def take(self, state: BucketState, keep: Callable[[torch.Tensor], None]) -> None:
        """Compute the norms of this rank's parts of a bucket; ``keep`` keeps memory for the stream that computes."""
        gradients = state.owned_gradients() if self.takes_norms else {}
        if not gradients:
            return
        tensors = tuple(gradients)
        slots = self._own_slots.get(tensors)
        if slots is None:
            # Made once, on the device, as in `rebuild`.
            slots = self._own_slots[tensors] = torch.tensor([self._slot_of[i] for i in tensors], device=self._device)
        keep(self._numbers)
        self._numbers[slots] = _norms(list(gradients.values()))

    def exchange(self) -> None:
        """Exchange the norms of all ranks, and forget all operations. Collective; ranks must agree before it."""
        self._clamped.clear()
        self._known = None
        self.forget()
        if not self.takes_norms:
            return
        combined = self._coordinator.combine_disjoint(self._numbers, "the end of backward()")
        values = combined[self._slots]
        if len(self._cut):
            values[self._cut] = torch.linalg.vector_norm(combined[self._parts], 2.0, dim=1)
        self._known = _KnownNorms(values, self._most, self._masks)
        self._numbers.zero_()

    # ------------------------------------------------------------------ what a loop does

    def norm(self, tensor: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the 2-norm of a gradient, a 0-dim tensor on the gradients' device. The caller must not change it."""
        assert self._known is not None
        return self._known.norm(tensor, dtype)

    def scale(self, tensor: int, owned: torch.Tensor | None, factor: Factor, *, divides: bool = False) -> None:
        """Multiply or divide a gradient by a number or a tensor of one element; ``owned`` is this rank's part."""
        # Record it first, because a factor that is not a number raises on every rank.
        self.scaled(tensor, "div_" if divides else "mul_", factor, divides=divides)
        if owned is not None:
            _ = owned.div_(factor) if divides else owned.mul_(factor)

    def scaled(self, tensor: int, kind: str, factor: Factor, *, divides: bool = False) -> None:
        """Record that the owners scale a gradient, without waiting for an accelerator; ``kind`` names the operation."""
        if isinstance(factor, torch.Tensor) and factor.device.type != "cpu":
            self.note(tensor, kind)
        else:
            factor = float(factor)
            self.note(tensor, f"{kind}({factor})")
        if self._known is not None:
            self._known.scale(tensor, factor, divides=divides)

    def clipped(self, factor: Factor) -> None:
        """Record that all owners have multiplied all gradients by the same factor, which is at most 1."""
        if self._known is not None:
            self._known.scale_all(factor)

    def clamp(self, tensor: int, owned: torch.Tensor | None, low: float | None, high: float | None) -> None:
        """Clamp a gradient; ``owned`` is this rank's part."""
        if owned is not None:
            owned.clamp_(low, high)
        self._clamped.add(tensor)
        self.note(tensor, f"clamp_({low}, {high})")

    @property
    def checksum(self) -> int:
        """The CRC-32 of operations on gradients since their reduction, or since a step; 0 without any."""
        return zlib.crc32(repr(sorted(self._done.items())).encode()) if self._done else 0

    def note(self, tensor: int, operation: str, *, erases: bool = False) -> None:
        """Add an operation on a gradient to :attr:`checksum`. It replaces earlier ones if it ``erases`` them."""
        before = 0 if erases else self._done.get(tensor, 0)
        self._done[tensor] = zlib.crc32(operation.encode(), before)

    def forget(self) -> None:
        """Forget operations on gradients, after all ranks have compared them or have new gradients."""
        self._done.clear()

    # ------------------------------------------------------------------ what is refused, and why

    def advice(self, operation: str) -> str:
        """Return why an operation on a placeholder is refused, and what to do instead."""
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
            "every rank knows its 2-norm, p.grad.norm(), which is finite if all values are; it can be multiplied by a "
            "number or clamped in place, as torch's functions for clipping do; to change gradients in another way, do "
            "it in a hook of the tensor, or train without a communication hook"
        )

    def why_unknown(self, tensor: int) -> str:
        """Return why the norm of a gradient is unknown, and what to do; empty if it is known."""
        if self._known is None:
            return (
                "norms are exchanged at the end of a backward, if it succeeds, but not with norms=False: call "
                "optimizer.clip_grad_norm_()"
            )
        if tensor in self._clamped:
            return "it was clamped, after which its norm is not known: take norms before"
        return ""


def _norms(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of each tensor of one dtype, in float64."""
    return torch.stack(foreach_norm(list(grads), 2.0, torch.float32 if grads[0].dtype in _HALF else None)).double()
