"""Predicts how many bytes each rank of a plan holds and sends, by kind, from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zeroshard_core.cost import Cost
from zeroshard_core.plan import Plan
from zeroshard_core.spec import Shard, TensorSpec


@dataclass(frozen=True)
class GroupBytes:
    """The memory that the optimizer of a param group allocates for a tensor, or for a part of one, in bytes.

    Attributes:
        state: the optimizer state, and copies of parameters in another dtype.
        gradients: copies of gradients in another dtype, which a step holds for all tensors until it ends.
        update: the peak of the temporaries of an update, besides these copies.
        is_foreach: whether an update works on all tensors of the group at once, so that ``update`` adds up.
    """

    state: Cost
    gradients: Cost
    update: Cost
    is_foreach: bool = False


@dataclass(frozen=True)
class RankBytes:
    """The memory of one rank at the peak of an iteration after the first, in bytes, without activations.

    Attributes:
        parameters: the parameters of the model, frozen ones included.
        buffers: the buffers of the model.
        gradients: DDP's buckets. With ``gradient_as_bucket_view=True`` every ``.grad`` is a view of one. If gradients
            are sharded, the parts that the rank owns.
        state: the optimizer state.
        staging: the staging buffers of collectives, which exist from the first iteration on.
        temporaries: the temporaries of an update.
        transient: the buckets in flight, if gradients are sharded. They are freed before an update.
    """

    parameters: int
    buffers: int
    gradients: int
    state: int
    staging: int
    temporaries: int
    transient: int = 0

    @property
    def total(self) -> int:
        """The sum in bytes; of temporaries and transient buckets, which never coexist, only the larger one counts."""
        kept = self.parameters + self.buffers + self.gradients + self.state + self.staging
        return kept + max(self.temporaries, self.transient)


@dataclass(frozen=True)
class Prediction:
    """The memory of each rank of a plan, and the bytes of gradients and of parameters that each rank sends.

    A rank sends ``sent_in_backward`` in an iteration with one backward, and ``sent_in_step`` in a step.
    """

    plan: Plan
    ranks: tuple[RankBytes, ...]
    sent_in_backward: tuple[int, ...]
    sent_in_step: tuple[int, ...]

    @property
    def sent(self) -> tuple[int, ...]:
        """The bytes that each rank sends in an iteration, without the few bytes of agreements."""
        return tuple(map(sum, zip(self.sent_in_backward, self.sent_in_step, strict=True)))

    @property
    def largest(self) -> RankBytes:
        """The memory of the rank that holds the most bytes."""
        return max(self.ranks, key=lambda rank: rank.total)


def predict(
    plan: Plan,
    groups: Sequence[GroupBytes],
    *,
    buffers: int = 0,
    staging: int = 0,
    reduces_to_owner: bool = True,
    grad_dtype: torch.dtype | None = None,
    transient: Sequence[int] | None = None,
) -> Prediction:
    """Predict how many bytes each rank of a plan holds and sends in data-parallel training.

    >>> plan = Plan(2, (TensorSpec("weight", (4, 64), torch.float32),), ((0, 1),), (128.0, 128.0))
    >>> adam = GroupBytes(lambda spec: 2 * spec.nbytes, gradients=lambda spec: 0, update=lambda spec: spec.nbytes)
    >>> found = predict(plan, [adam])
    >>> found.ranks[0].state, found.ranks[0].temporaries, found.sent[0]
    (1024, 512, 1024)

    Args:
        plan: which rank owns which elements. A single rank sends nothing.
        groups: the memory that each param group allocates.
        buffers: the size of the model's buffers, in bytes.
        staging: the size of each rank's staging buffers for cut tensors, in bytes.
        reduces_to_owner: whether a communication hook sends each gradient to its owner alone. If not, DDP all-reduces
            gradients in a ring: each of N ranks sends 2 (N - 1) / N of their bytes.
        grad_dtype: the dtype of gradients; None for the dtype of each parameter.
        transient: if gradients are sharded, the bytes that buckets in flight add to the gradients that each rank owns,
            at the peak of backward; None if DistributedDataParallel keeps all gradients.

    Raises:
        ValueError: if an optimizer class cannot step one of the tensors.
    """
    owned, state, copied = ([0.0] * plan.world_size for _ in range(3))
    updates = [[0.0 for _ in groups] for _ in owned]
    for index, spec in enumerate(plan.tensors):
        for shard in plan.of_tensor(index) if spec.trainable else ():
            rank, group, part = shard.rank, groups[spec.group], _part(spec, shard)
            owned[rank] += part.numel * (grad_dtype or spec.dtype).itemsize
            state[rank] += group.state(part)
            copied[rank] += group.gradients(part)
            both = updates[rank][spec.group], group.update(part)
            updates[rank][spec.group] = sum(both) if group.is_foreach else max(both)
    parameters, gradients = sum(spec.nbytes for spec in plan.tensors), int(sum(owned))
    temporaries = [copies + max(highest, default=0.0) for copies, highest in zip(copied, updates, strict=True)]
    kept = [gradients] * plan.world_size if transient is None else map(int, owned)
    held = zip(kept, map(int, state), map(int, temporaries), transient or [0] * plan.world_size, strict=True)
    all_reduced = 2 * gradients * (plan.world_size - 1) // plan.world_size
    return Prediction(
        plan,
        tuple([RankBytes(parameters, buffers, own, kept, staging, *peaks) for own, kept, *peaks in held]),
        tuple([gradients - int(owner) if reduces_to_owner else all_reduced for owner in owned]),
        tuple([nbytes * (plan.world_size - 1) for nbytes in plan.sent_loads]),
    )


def _part(spec: TensorSpec, shard: Shard) -> TensorSpec:
    if shard.numel == spec.numel:
        return spec
    shape = (*spec.shape[: shard.dim], shard.stop - shard.start, *spec.shape[shard.dim + 1 :])
    return TensorSpec(spec.name, shape, spec.dtype, spec.device, group=spec.group)
