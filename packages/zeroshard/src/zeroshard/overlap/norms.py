"""The norms of reduced gradients: taken at their owners at the end of a backward, and the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from zeroshard_comm import Control, combine_disjoint
from zeroshard_core import Plan

from zeroshard._torch_private import foreach_norm

INF = float("inf")
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Group:
    """Gradients whose norms are taken by the same calls, their slots, and whether they are parts of cut tensors."""

    tensors: Sequence[int]
    slots: torch.Tensor
    is_cut: bool


class GradNorms:
    """Holds the 2-norm and the largest magnitude of every gradient, on the gradients' device.

    The 2-norm of a tensor with one owner is torch's own, in the precision in which torch adds up; parts of a cut tensor
    add their squares in float64.

    Args:
        control: the channel of the ranks' agreements.
        device: of the gradients.

    Attributes:
        are_known: whether norms were exchanged in the last backward; GradOperations sets it.
        tensors: how many gradients there are.
    """

    def __init__(self, control: Control, device: torch.device) -> None:
        self._control, self._device, self.are_known = control, device, False
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
            self._control.check_consistent("the end of backward()")
        numbers = torch.zeros(2, self._total, dtype=torch.float64, device=self._device)
        for group in self._groups_of(gradients):
            grads = [gradients[tensor] for tensor in group.tensors]
            numbers[0, group.slots] = _norms(grads, group.is_cut)
            numbers[1, group.slots] = _largest(grads).double()
        combined = combine_disjoint(self._control, numbers.view(-1), "the end of backward()").view(2, -1)
        values = combined[:, self._slots]
        if len(self._cut):
            parts = combined[:, self._parts]
            values[0, self._cut] = parts[0].square().sum(1).sqrt()
            values[1, self._cut] = parts[1].amax(1)
        self._values, self._factors = values, [1.0] * self.tensors
        self._by_order.clear()

    def _groups_of(self, gradients: Mapping[int, torch.Tensor]) -> Sequence[_Group]:
        """Group gradients by what their norms are taken in."""
        key = tuple(gradients)
        if self._grouped is None or self._grouped[0] != key:
            groups: dict[tuple[torch.dtype, bool], list[int]] = {}
            for tensor, grad in gradients.items():
                # Those without elements have no largest one.
                if grad.numel():
                    groups.setdefault((grad.dtype, self._plan.is_cut(tensor)), []).append(tensor)
            self._grouped = (
                key,
                [
                    _Group(held, torch.tensor([self._slot_of[each] for each in held], device=self._device), is_cut)
                    for (_, is_cut), held in groups.items()
                ],
            )
        return self._grouped[1]

    def norm(self, tensor: int, order: float) -> torch.Tensor:
        """Return the 2-norm, or for the order ``inf`` the largest magnitude: 0-dim, float64."""
        by_tensor = self._by_order.get(order)
        if by_tensor is None:
            by_tensor = self._by_order[order] = self._values[int(order == INF)].unbind()
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
            # Elements that have become infinite stay so.
            largest, most = self._values[1, tensor], torch.finfo(self._plan.tensors[tensor].dtype).max
            if largest.device.type == "cpu":
                scaled = INF if float(largest) * scaled > most else scaled
            else:
                scaled = torch.ones_like(largest).mul_(scaled).masked_fill_(largest * scaled > most, INF)
        self._factors[tensor] = scaled


def _norms(grads: Sequence[torch.Tensor], is_cut: bool) -> torch.Tensor:
    """Return the 2-norm of each tensor of one dtype: torch's own, or for parts of cut tensors in float64."""
    own = torch.stack(foreach_norm(list(grads), 2.0, torch.float64 if is_cut else None)).double()
    if is_cut or grads[0].dtype not in _HALF:
        return own
    # In half precision it may overflow, where the norm of gradients that a GradScaler unscales does not.
    return torch.where(own.isfinite(), own, torch.stack(foreach_norm(list(grads), 2.0, torch.float32)).double())


def _largest(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the largest magnitude of each tensor, or NaN."""
    if grads[0].device.type != "cpu":
        return torch.stack(foreach_norm(list(grads), INF))
    # Ten times as fast there.
    pairs = [torch.aminmax(grad) for grad in grads]
    return torch.maximum(torch.stack([pair.max for pair in pairs]), -torch.stack([pair.min for pair in pairs]))
