"""Holds the 2-norms of reduced gradients on every rank, and a checksum of the loop's operations on gradients.

Owners compute the norms of each bucket when it is reduced, while it is in the cache, and ranks exchange them at the end
of a backward. The owner of a gradient applies the loop's operations to it, and every rank computes the new norm.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.nn.functional import pad
from zeroshard_comm import Coordinator
from zeroshard_core import Plan

from zeroshard._torch_private import foreach_norm, version_of
from zeroshard.grads.bucket import OwnedGradients

INF = float("inf")
_HALF = (torch.float16, torch.bfloat16)
Factor = float | torch.Tensor


class GradNorms:
    """Holds the norm of each gradient, and records the loop's operations on gradients.

    The norm of a tensor with one owner is computed as in torch, in the gradient's dtype. So is the norm of each part of
    a cut tensor; their squares are added in float64. Norms in half precision are computed in float32.

    Scaling takes a fixed number of operations on the device, for any number of gradients: the next read of a norm
    applies a factor to all norms at once. Only :meth:`exchange` communicates. The next step compares :attr:`checksum`,
    and raises on every rank if not all ranks made the same operations. If ``steps_early`` is True, shards are stepped
    during backward, so gradients cannot be changed.
    """

    def __init__(self, coordinator: Coordinator, device: torch.device, *, takes_norms: bool, steps_early: bool) -> None:
        self._coordinator, self._device = coordinator, device
        self.takes_norms, self.steps_early = takes_norms and not steps_early, steps_early
        self._known: torch.Tensor | None = None
        """The norms that ranks have exchanged, in float64, by tensor."""
        self._read: dict[torch.dtype, Sequence[torch.Tensor]] = {}
        self._scaled: dict[int, None] = {}
        """The tensors that were scaled by ``_factor`` and whose norms were not scaled yet."""
        self._factor: tuple[Factor, Factor, bool] = 1.0, 1.0, False
        """A factor, a copy of its absolute value, and whether it divides."""
        self._factor_key: tuple[object, ...] = ()
        self._clamped: set[int] = set()
        self._operations: dict[int, int] = {}
        self.log: list[list[Any]] | None = None
        """The operations with their tensors and arguments, in a block that repeats them on other ranks; else None."""

    def rebuild(self, plan: Plan) -> None:
        """Make a slot for the norm of each part of each tensor of a plan. Known norms are kept."""
        self._apply_factor()
        if self._known is not None:
            self._known = pad(self._known, (0, len(plan.owners) - len(self._known)))
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

    def compute(self, state: OwnedGradients, keep: Callable[[torch.Tensor], None]) -> None:
        """Compute the norms of this rank's parts of a bucket; ``keep`` keeps memory for the stream that computes."""
        gradients = state.owned_gradients() if self.takes_norms else {}
        if not gradients:
            return
        tensors = tuple(gradients)
        if tensors not in self._own_slots:
            # Made once, on the device, as in `rebuild`.
            self._own_slots[tensors] = torch.tensor([self._slot_of[i] for i in tensors], device=self._device)
        keep(self._numbers)
        self._numbers[self._own_slots[tensors]] = _norms(list(gradients.values()))

    def exchange(self) -> None:
        """Exchange the norms of all ranks, and forget all operations. Collective; ranks must agree before it."""
        self._known = None
        self._scaled.clear()
        self._read.clear()
        self._clamped.clear()
        self.forget()
        if not self.takes_norms:
            return
        combined = self._coordinator.combine_disjoint(self._numbers, "the end of backward()")
        values = combined[self._slots]
        if len(self._cut):
            values[self._cut] = torch.linalg.vector_norm(combined[self._parts], 2.0, dim=1)
        self._known = values
        self._numbers.zero_()

    def norm(self, tensor: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the 2-norm of a gradient, a 0-dim tensor on the gradients' device. The caller must not change it."""
        self._apply_factor()
        assert self._known is not None
        if dtype not in self._read:
            self._read[dtype] = self._known.to(dtype).unbind()
        return self._read[dtype][tensor]

    def record_scaling(self, tensor: int, operation: str, factor: Factor, *, divides: bool = False) -> None:
        """Record that the owners scale a gradient by the named operation, without waiting for an accelerator."""
        name = operation
        if not isinstance(factor, torch.Tensor) or factor.device.type == "cpu":
            factor = float(factor)
            operation = f"{operation}({factor})"
        self.record(tensor, operation)
        if self.log is not None:
            self.log.append([name, tensor, factor.clone() if isinstance(factor, torch.Tensor) else factor])
        if self._known is not None:
            self._add_factor(tensor, factor, divides=divides)

    def _add_factor(self, tensor: int, factor: Factor, *, divides: bool) -> None:
        key: tuple[object, ...] = (factor, divides)
        if isinstance(factor, torch.Tensor):
            # Comparing values would wait for the device.
            key = (id(factor), version_of(factor), divides)
        if not self._scaled or tensor in self._scaled or key != self._factor_key:
            self._apply_factor()
            copied = factor.detach().double().abs().view(()) if isinstance(factor, torch.Tensor) else abs(factor)
            self._factor_key, self._factor = key, (factor, copied, divides)
        self._scaled[tensor] = None

    def _apply_factor(self) -> None:
        tensors, (_, magnitude, divides) = tuple(self._scaled), self._factor
        if not tensors or self._known is None:
            return
        if tensors not in self._masks:
            chosen = [tensor in self._scaled for tensor in range(len(self._most))]
            self._masks[tensors] = torch.tensor(chosen, device=self._device)
        scaled = self._known / magnitude if divides else self._known * magnitude
        if isinstance(magnitude, torch.Tensor) or (magnitude < 1.0 if divides else magnitude > 1.0):
            # Elements that have become infinite stay so; the 2-norm is an upper bound of the largest magnitude.
            scaled = scaled.masked_fill(scaled > self._most, INF)
        self._known = torch.where(self._masks[tensors], scaled, self._known)
        self._scaled.clear()
        self._read.clear()

    def clipped(self, factor: Factor) -> None:
        """Record that all owners have multiplied all gradients by the same factor, which is at most 1."""
        self._apply_factor()
        if self._known is not None:
            self._known = self._known * factor
            self._read.clear()

    def record_clamp(self, tensor: int, low: float | None, high: float | None) -> None:
        """Record that the owners clamp a gradient."""
        self._clamped.add(tensor)
        self.record(tensor, f"clamp_({low}, {high})")
        if self.log is not None:
            self.log.append(["clamp_", tensor, low, high])

    @property
    def checksum(self) -> int:
        """The CRC-32 of operations on gradients since their reduction, or since a step; 0 without any."""
        return zlib.crc32(repr(sorted(self._operations.items())).encode()) if self._operations else 0

    def record(self, tensor: int, operation: str, *, erases: bool = False) -> None:
        """Add an operation on a gradient to :attr:`checksum`. It replaces earlier ones if it ``erases`` them."""
        before = 0 if erases else self._operations.get(tensor, 0)
        self._operations[tensor] = zlib.crc32(operation.encode(), before)

    def forget(self) -> None:
        """Forget operations on gradients, after all ranks have compared them or have new gradients."""
        self._operations.clear()
        if self.log is not None:
            self.log.clear()

    def advice(self, operation: str) -> str:
        """Return why an operation on a placeholder is refused, and what to do instead."""
        if not self.steps_early:
            return (
                "every rank knows its 2-norm, p.grad.norm(), which is finite if all values are.\n"
                "Multiply it by a number or clamp it in place; for other changes, use a tensor hook"
            )
        if operation == "unscaling":
            return (
                "this hook has stepped during backward, with the scaled gradients: load a checkpoint, and use "
                "reduce_to_owner_hook, or bfloat16, which needs no GradScaler"
            )
        return "this hook steps during backward. To clip or change gradients, use reduce_to_owner_hook"

    def why_unknown(self, tensor: int) -> str:
        """Return why the norm of a gradient is unknown, and what to do; empty if it is known."""
        if self._known is None:
            return (
                "ranks exchange norms at the end of each successful backward, but not with norms=False: call "
                "optimizer.clip_grad_norm_()"
            )
        return "it was clamped, so its norm is not known: take norms before clamping" if tensor in self._clamped else ""


def _norms(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of each tensor of one dtype, in float64."""
    return torch.stack(foreach_norm(list(grads), 2.0, torch.float32 if grads[0].dtype in _HALF else None)).double()
