"""The norms of reduced gradients: taken at their owners at the end of a backward, and the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from zeroshard_comm import Control, combine_disjoint
from zeroshard_core import Plan

from zeroshard._torch_private import foreach_norm

INF = float("inf")
_ORDERS = (2.0, INF)
_HALF = (torch.float16, torch.bfloat16)


def norm_orders(norms: bool | Sequence[float]) -> tuple[float, ...]:
    """Return the orders of the norms that ranks exchange, in ascending order.

    Args:
        norms: True for order 2, False for none, or a tuple of 2, ``math.inf`` or both.

    Raises:
        ValueError: if it is anything else.
    """
    if isinstance(norms, bool):
        return (2.0,) if norms else ()
    if isinstance(norms, (tuple, list)) and norms and all(order in _ORDERS for order in norms):
        return tuple(order for order in _ORDERS if order in norms)
    raise ValueError(
        f"norms={norms!r} is not supported: pass True for norms of order 2, a tuple of 2, math.inf or both, or False "
        f"for none; optimizer.clip_grad_norm_() takes every order"
    )


@dataclass(frozen=True)
class _Group:
    """Gradients of one dtype, whose norms are taken by the same calls, and their slots."""

    tensors: Sequence[int]
    slots: torch.Tensor


class GradNorms:
    """Holds norms of every gradient, on the gradients' device.

    The norm of a tensor with one owner is torch's own, in the gradient's dtype. So is the norm of each part of a cut
    tensor; their squares are added in float64. Norms in half precision are taken in float32.

    Args:
        control: the channel of the ranks' agreements.
        device: of the gradients.
        orders: of the norms, ascending; also an attribute. See :func:`norm_orders`.

    Attributes:
        are_known: whether norms were exchanged in the last backward; GradOperations sets it.
        tensors: how many gradients there are.
    """

    def __init__(self, control: Control, device: torch.device, orders: Sequence[float]) -> None:
        self._control, self._device, self.orders, self.are_known = control, device, orders, False
        self._factors: list[float | torch.Tensor] = []
        self._by_order: dict[float, Sequence[torch.Tensor]] = {}

    def follow(self, plan: Plan) -> None:
        """Lay out slots for a plan: one per part of a tensor."""
        self._plan, self.tensors, rank = plan, len(plan.tensors), self._control.ranks.rank
        self._slot_of: dict[int, int] = {}
        slots, cut, total = list[int](), dict[int, range](), 0
        for tensor in range(self.tensors):
            owners = [shard.rank for shard in plan.of_tensor(tensor)]
            slots.append(total)
            if rank in owners:
                self._slot_of[tensor] = total + owners.index(rank)
            if len(owners) > 1:
                cut[tensor] = range(total, total + len(owners))
            total += len(owners)
        # The last slot is 0 on every rank: tensors with fewer parts are filled up with it.
        longest = max(map(len, cut.values()), default=0)
        rows = [[*parts, *[total] * (longest - len(parts))] for parts in cut.values()]
        # On the device: indexing by a list copies it there in every backward, and the host waits for the copy.
        self._cut, self._parts, self._slots = (
            torch.tensor(numbers, dtype=torch.int64, device=self._device) for numbers in (list(cut), rows, slots)
        )
        self._total = total + 1
        self._grouped: tuple[tuple[int, ...], Sequence[_Group]] | None = None
        # Tensors keep their numbers, and new ones come last.
        self._factors += [1.0] * (len(slots) - len(self._factors))

    def exchange(self, gradients: Mapping[int, torch.Tensor], *, agreed: bool) -> None:
        """Take the norms of this rank's parts of gradients, and learn those of all others. Collective.

        Args:
            gradients: by tensor.
            agreed: whether ranks have just agreed on something else, with nothing in between.

        Raises:
            DisagreementError: if a rank is in another call.
            PeerLostError: if a rank is gone.
            Exception: an error that another rank reports in another call.
        """
        # gloo aborts the process if ranks combine different numbers of words.
        if not agreed:
            self._control.agree("the end of backward()")
        numbers = torch.zeros(len(self.orders), self._total, dtype=torch.float64, device=self._device)
        for group in self._groups_of(gradients):
            grads = [gradients[tensor] for tensor in group.tensors]
            for row, order in zip(numbers, self.orders, strict=True):
                row[group.slots] = _largest(grads) if order == INF else _norms(grads)
        combined = combine_disjoint(self._control, numbers.view(-1), "the end of backward()").view_as(numbers)
        values = combined[:, self._slots]
        if len(self._cut):
            for row, parts, order in zip(values, combined[:, self._parts], self.orders, strict=True):
                row[self._cut] = torch.linalg.vector_norm(parts, order, dim=1)
        self._values, self._factors = values, [1.0] * self.tensors
        self._by_order.clear()

    def _groups_of(self, gradients: Mapping[int, torch.Tensor]) -> Sequence[_Group]:
        """Group gradients by dtype."""
        key = tuple(gradients)
        if self._grouped is None or self._grouped[0] != key:
            groups: dict[torch.dtype, list[int]] = {}
            for tensor, grad in gradients.items():
                # Those without elements have no largest one.
                if grad.numel():
                    groups.setdefault(grad.dtype, []).append(tensor)
            self._grouped = (
                key,
                [
                    _Group(held, torch.tensor([self._slot_of[each] for each in held], device=self._device))
                    for held in groups.values()
                ],
            )
        return self._grouped[1]

    def norm(self, tensor: int, order: float) -> torch.Tensor:
        """Return the norm of one of the orders: 0-dim, float64."""
        by_tensor = self._by_order.get(order)
        if by_tensor is None:
            by_tensor = self._by_order[order] = self._values[self.orders.index(order)].unbind()
        return by_tensor[tensor] * self._factors[tensor]

    def scale(self, tensor: int, factor: float | torch.Tensor) -> None:
        """Follow a multiplication of a gradient; the host does not wait for an accelerator.

        Args:
            tensor: its index.
            factor: a number, or a tensor of one element on an accelerator.
        """
        magnitude: float | torch.Tensor = factor.abs() if isinstance(factor, torch.Tensor) else abs(factor)
        scaled = self._factors[tensor] * magnitude
        if not isinstance(magnitude, torch.Tensor) and magnitude > 1.0:
            # Elements that have become infinite stay so. Without the largest magnitude, the 2-norm is its bound.
            largest, most = self._values[-1, tensor], torch.finfo(self._plan.tensors[tensor].dtype).max
            if largest.device.type == "cpu":
                scaled = INF if float(largest) * scaled > most else scaled
            else:
                scaled = torch.ones_like(largest).mul_(scaled).masked_fill_(largest * scaled > most, INF)
        self._factors[tensor] = scaled


def _norms(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of each tensor of one dtype, in float64."""
    return torch.stack(foreach_norm(list(grads), 2.0, torch.float32 if grads[0].dtype in _HALF else None)).double()


def _largest(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the largest magnitude of each tensor of one dtype, or NaN, in float64."""
    if grads[0].device.type != "cpu":
        return torch.stack(foreach_norm(list(grads), INF)).double()
    # 15 times as fast there.
    pairs = [torch.aminmax(grad) for grad in grads]
    return torch.maximum(torch.stack([pair.max for pair in pairs]), -torch.stack([pair.min for pair in pairs])).double()
