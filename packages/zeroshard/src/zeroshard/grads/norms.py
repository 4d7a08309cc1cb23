"""What every rank knows of reduced gradients: their norms, and what a loop does to them before a step.

Owners take norms of each bucket when it has been reduced, while it is in the cache, and ranks exchange them at the end
of a backward. What is done to a gradient is done by its owner, and every rank knows the norms that follow.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from zeroshard_comm import Coordinator
from zeroshard_core import Plan

from zeroshard._torch_private import foreach_norm, version_of

if TYPE_CHECKING:
    from zeroshard.grads.bucket import BucketState

INF = float("inf")
_ORDERS = (2.0, INF)
_HALF = (torch.float16, torch.bfloat16)
Factor = float | torch.Tensor


def norm_orders(norms: bool | Sequence[float]) -> tuple[float, ...]:
    """Return the orders of the norms that ranks exchange, ascending; a ValueError if others are asked for."""
    if isinstance(norms, bool):
        return (2.0,) if norms else ()
    if isinstance(norms, (tuple, list)) and norms and all(order in _ORDERS for order in norms):
        return tuple(order for order in _ORDERS if order in norms)
    raise ValueError(
        f"norms={norms!r} is not supported: pass True for norms of order 2, a tuple of 2, math.inf or both, or False "
        f"for none; optimizer.clip_grad_norm_() takes every order"
    )


@dataclass
class _Pending:
    """A factor that the norms of some tensors do not have yet; ``magnitude`` is a copy of its own."""

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
    """Norms that all ranks know, which follow what gradients are multiplied by.

    What a loop does to all gradients costs the same number of operations on the device, however many there are.

    Args:
        values: float64, a row for each order and a column for each tensor.
        orders: of the norms, ascending.
        most: by tensor, the largest finite value of its dtype.
        masks: what was made on the device before, by the tensors that were chosen.
    """

    def __init__(
        self,
        values: torch.Tensor,
        orders: Sequence[float],
        most: torch.Tensor,
        masks: dict[tuple[int, ...], torch.Tensor],
    ) -> None:
        self._values, self._orders, self._most, self._masks = values, orders, most, masks
        self._pending: _Pending | None = None
        self._read: dict[tuple[float, torch.dtype], Sequence[torch.Tensor]] = {}

    def norm(self, tensor: int, order: float, dtype: torch.dtype) -> torch.Tensor:
        self._apply()
        if (order, dtype) not in self._read:
            self._read[order, dtype] = self._values[self._orders.index(order)].to(dtype).unbind()
        return self._read[order, dtype][tensor]

    def scale(self, tensor: int, factor: Factor, *, divides: bool) -> None:
        """Take note of a factor. It is applied to all gradients with this factor at once, when a norm is asked for."""
        version, pending = version_of(factor) if isinstance(factor, torch.Tensor) else 0, self._pending
        if pending is None or tensor in pending.tensors or not pending.is_by(factor, version, divides=divides):
            self._apply()
            copied = factor.detach().double().abs().view(()) if isinstance(factor, torch.Tensor) else abs(factor)
            pending = self._pending = _Pending(factor, version, divides, copied)
        pending.tensors[tensor] = None

    def scale_all(self, factor: Factor) -> None:
        """Multiply all by a factor of at most 1."""
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
            # Elements that have become infinite stay so. Without the largest magnitude, the 2-norm is its bound.
            scaled = scaled.masked_fill(scaled[-1] > self._most, INF)
        self._values = torch.where(self._masks[key], scaled, self._values)
        self._read.clear()


class GradOperations:
    """Knows norms of every gradient, and does to the owned part of one what is done to its placeholder.

    The norm of a tensor with one owner is torch's own, in the gradient's dtype. So is the norm of each part of a cut
    tensor; their squares are added in float64. Norms in half precision are taken in float32.

    Only :meth:`exchange_norms` communicates. The next step compares what was done on all ranks: after an
    operation on one rank alone it raises on every rank.

    Args:
        coordinator: the channel of the ranks' agreements.
        device: of the gradients.
        orders: of the norms, ascending; none are taken if there is none. Also an attribute; see :func:`norm_orders`.
        steps_early: whether shards are stepped during backward, so that nothing can be done; also an attribute.

    Attributes:
        found_inf: what a GradScaler has found in the gradients of the last backward; None before it has looked.
    """

    def __init__(
        self, coordinator: Coordinator, device: torch.device, orders: Sequence[float], *, steps_early: bool
    ) -> None:
        self._coordinator, self._device, self.orders, self.steps_early = coordinator, device, orders, steps_early
        self.found_inf: torch.Tensor | None = None
        self._known: _KnownNorms | None = None
        self._done: dict[int, str] = {}
        self._clamped: set[int] = set()
        self._zeroed: set[int] = set()

    def rebuild(self, plan: Plan) -> None:
        """Lay out slots of norms for a plan: one per part of a tensor."""
        rank, tensors = self._coordinator.ranks.rank, range(len(plan.owners))
        *slots, total = accumulate(map(len, plan.owners), initial=0)
        self._slot_of = {i: slots[i] + plan.owners[i].index(rank) for i in tensors if rank in plan.owners[i]}
        cut = {i: range(slots[i], slots[i] + len(plan.owners[i])) for i in tensors if plan.is_cut(i)}
        # The last slot is 0 on every rank: tensors with fewer parts are filled up with it.
        longest = max(map(len, cut.values()), default=0)
        rows = [[*parts, *[total] * (longest - len(parts))] for parts in cut.values()]
        # On the device: indexing by a list copies it there in every backward, and the host waits for the copy.
        self._cut, self._parts, self._slots = (
            torch.tensor(numbers, dtype=torch.int64, device=self._device) for numbers in (list(cut), rows, slots)
        )
        self._numbers = torch.zeros(len(self.orders), total + 1, dtype=torch.float64, device=self._device)
        self._own_slots: dict[tuple[int, ...], torch.Tensor] = {}
        self._masks: dict[tuple[int, ...], torch.Tensor] = {}
        largest = [torch.finfo(spec.dtype).max if spec.dtype.is_floating_point else INF for spec in plan.tensors]
        self._most = torch.tensor(largest, dtype=torch.float64, device=self._device)

    # ------------------------------------------------------------------ a backward

    def reduced(self, state: BucketState, kept: Set[int], keep: Callable[[torch.Tensor], None]) -> None:
        """Take norms of a bucket that was reduced; forget what was done to its gradients that are not ``kept``.

        ``keep`` keeps memory for the stream on which that is done.
        """
        for tensor in state.tensors if self._done else ():
            if tensor not in kept:
                self._done.pop(tensor, None)
        gradients = state.owned_gradients() if self.orders else {}
        if not gradients:
            return
        tensors, grads = tuple(gradients), list(gradients.values())
        slots = self._own_slots.get(tensors)
        if slots is None:
            # On the device, and once, as above.
            slots = self._own_slots[tensors] = torch.tensor([self._slot_of[i] for i in tensors], device=self._device)
        keep(self._numbers)
        for row, order in zip(self._numbers, self.orders, strict=True):
            row[slots] = _largest(grads) if order == INF else _norms(grads)

    def exchange_norms(self) -> None:
        """Learn the norms that all ranks took. Collective; agree on something first."""
        self._clamped.clear()
        self._zeroed.clear()
        self.found_inf = self._known = None
        if not self.orders:
            return
        numbers = self._numbers.view(-1)
        combined = self._coordinator.combine_disjoint(numbers, "the end of backward()").view_as(self._numbers)
        values = combined[:, self._slots]
        if len(self._cut):
            for row, parts, order in zip(values, combined[:, self._parts], self.orders, strict=True):
                row[self._cut] = torch.linalg.vector_norm(parts, order, dim=1)
        self._known = _KnownNorms(values, self.orders, self._most, self._masks)
        self._numbers.zero_()

    # ------------------------------------------------------------------ what a loop does

    def norm(self, tensor: int, order: float, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the norm of one of the orders of a gradient on the device of ``like``: 0-dim; not to be changed."""
        if tensor in self._zeroed:
            return torch.zeros((), dtype=dtype, device=like.device)
        assert self._known is not None
        return self._known.norm(tensor, order, dtype).to(like.device)

    def scale(self, tensor: int, owned: torch.Tensor | None, factor: Factor, *, divides: bool = False) -> None:
        """Multiply or divide a gradient, of which this rank may have a part, by a number or a tensor of one element."""
        # First, as a factor that is none raises on every rank.
        self.scaled(tensor, "div_" if divides else "mul_", factor, divides=divides)
        if owned is not None:
            _ = owned.div_(factor) if divides else owned.mul_(factor)

    def scaled(self, tensor: int, kind: str, factor: Factor, *, divides: bool = False) -> None:
        """Take note that owners multiply a gradient, without waiting for an accelerator; ``kind`` is for errors."""
        if isinstance(factor, torch.Tensor) and factor.device.type != "cpu":
            self._note(tensor, kind)
        else:
            factor = float(factor)
            self._note(tensor, f"{kind}({factor})")
        if self._known is not None:
            self._known.scale(tensor, factor, divides=divides)

    def clipped(self, factor: Factor) -> None:
        """Take note that all owners have multiplied all gradients by the same factor, which is at most 1."""
        if self._known is not None:
            self._known.scale_all(factor)

    def clamp(self, tensor: int, owned: torch.Tensor | None, low: float | None, high: float | None) -> None:
        """Clamp a gradient; arguments as for :meth:`scale`."""
        if owned is not None:
            owned.clamp_(low, high)
        self._clamped.add(tensor)
        self._note(tensor, f"clamp_({low}, {high})")

    def zeroed(self, tensor: int) -> None:
        """Take note that a gradient was set to zero."""
        self._zeroed.add(tensor)
        self._done[tensor] = "zero_()"

    def dropped(self, tensor: int) -> None:
        """Take note that a gradient was set to None after it was reduced."""
        self._done[tensor] = "set to None"

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

    # ------------------------------------------------------------------ what is refused, and why

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

    def why_unknown(self, tensor: int) -> str:
        """Say why the norm of a gradient is not known, and what to do; empty if it is."""
        if tensor in self._zeroed:
            return ""
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


def _largest(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the largest magnitude of each tensor of one dtype, or NaN, in float64; 0 if it has no elements."""
    grads = [grad if grad.numel() else grad.new_zeros(1) for grad in grads]
    if grads[0].device.type != "cpu":
        return torch.stack(foreach_norm(grads, INF)).double()
    # 15 times as fast there.
    pairs = [torch.aminmax(grad) for grad in grads]
    return torch.maximum(torch.stack([pair.max for pair in pairs]), -torch.stack([pair.min for pair in pairs])).double()
