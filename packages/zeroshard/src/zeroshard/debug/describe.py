"""Describes what an optimizer is and has done as a value, for ``print()``, logs and programs, without communication."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from zeroshard_comm import KINDS, Coordinator, Volume
from zeroshard_core import GroupBytes, Plan, Prediction, predict

from zeroshard.byte_units import format_bytes
from zeroshard.grads.bucket import BucketState
from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.plan.group_classes import names_of
from zeroshard.plan.layout import Layout, Policy
from zeroshard.state.metadata import StateMetadata
from zeroshard.state.placeholder import leaves

_NOTHING = GroupBytes(lambda _: 0, lambda _: 0, lambda _: 0)


@dataclass(frozen=True)
class TensorDescription:
    """Says which ranks own a parameter, and how many bytes it and its state have.

    Attributes:
        name: the name that the user passed, or ``"param.<index>"``.
        shape, dtype: the shape and dtype of the parameter.
        owners: the ranks that own a part of it, in order.
        is_active: whether a step may change it: it is trainable, or still has a gradient.
        nbytes: bytes of the parameter.
        state_bytes_here: bytes of its state on this rank.
        state_bytes: bytes of its state on all ranks, by their last exchange.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    owners: tuple[int, ...]
    is_active: bool
    nbytes: int
    state_bytes_here: int
    state_bytes: int


@dataclass(frozen=True)
class BucketDescription:
    """Says which parameters a bucket of a communication hook has, and which ranks own them.

    Attributes:
        tensors: the indices of its parameters.
        nbytes: bytes of the gradients of its parameters.
        owners: the ranks that own a part of it.
    """

    tensors: tuple[int, ...]
    nbytes: int
    owners: tuple[int, ...]


@dataclass(frozen=True)
class OptimizerDescription:
    """Describes a sharded optimizer as one rank sees it. ``print(optimizer)`` shows :meth:`to_text`.

    ``dataclasses.asdict`` makes a dict of it that ``json.dumps`` accepts.

    Attributes:
        optimizer: the class of the local optimizer.
        rank, world_size: this rank, and the number of ranks, of the process group.
        partition: the name of the strategy.
        groups: the param groups, in words.
        imbalance: the largest load over the mean load of all ranks, see :attr:`zeroshard_core.Plan.imbalance`. Tensors
            that were never trainable in a step do not count.
        owned_bytes: bytes of parameters that this rank owns.
        state_bytes_here: bytes of state on this rank.
        tensors: the parameters.
        buckets: the buckets of a communication hook in the last backward; empty without a hook.
        step_bytes: bytes of parameters that this rank sends in a step, counted once for each receiver, as
            :func:`zeroshard_core.predict` computes them from the plan, without the padding of flat buffers.
        backward_bytes: bytes of gradients that this rank sends to their owners in a backward that reduces.
        traffic: the bytes that this rank has sent and received so far, by kind.
    """

    optimizer: str
    rank: int
    world_size: int
    partition: str
    groups: tuple[str, ...]
    imbalance: float
    owned_bytes: int
    state_bytes_here: int
    tensors: tuple[TensorDescription, ...]
    buckets: tuple[BucketDescription, ...]
    step_bytes: int
    backward_bytes: int
    traffic: Mapping[str, Volume]

    def to_text(self) -> str:
        """Return a few lines about the rank: what it owns, the size of its state, and what it has sent so far."""
        owned = sum(self.rank in tensor.owners for tensor in self.tensors)
        everything = sum(tensor.nbytes for tensor in self.tensors)
        everywhere = sum(tensor.state_bytes for tensor in self.tensors)
        here = f"state here: {format_bytes(self.state_bytes_here)} of {format_bytes(everywhere)}"
        lines = [
            f"{self.optimizer}, rank {self.rank} of {self.world_size}, partition {self.partition!r}",
            f"parameters here: {owned} of {len(self.tensors)} tensors, {format_bytes(self.owned_bytes)} of "
            f"{format_bytes(everything)}",
            f"imbalance: {self.imbalance:.3f}",
            here if everywhere else "state: none yet",
            *[f"group {number}: {group}" for number, group in enumerate(self.groups)],
            f"a step sends from here: {format_bytes(self.step_bytes)}",
        ]
        if self.buckets:
            nbytes = format_bytes(sum(bucket.nbytes for bucket in self.buckets))
            lines.append(f"buckets: {len(self.buckets)}, {nbytes} in all")
            lines.append(f"a backward sends from here: {format_bytes(self.backward_bytes)}")
        lines += [
            f"{kind} so far: {format_bytes(volume.bytes_sent)} sent, {format_bytes(volume.bytes_received)} received, "
            f"{volume.calls} calls"
            for kind, volume in self.traffic.items()
            if volume.calls
        ]
        return "\n  ".join(lines)


def describe(
    coordinator: Coordinator,
    policy: Policy,
    layout: Layout,
    local: LocalOptimizer,
    metadata: StateMetadata,
    states: Iterable[BucketState],
) -> OptimizerDescription:
    """Describe an optimizer as it is now. Not collective.

    Args:
        coordinator: knows the rank, and the traffic so far.
        policy: how tensors are partitioned.
        layout: who owns what, and which tensors are active.
        local: has the param groups, and the state of this rank.
        metadata: knows the state of all ranks.
        states: the buckets of a communication hook; none without one.
    """
    plan, active, ranks = layout.plan, layout.active, coordinator.ranks
    state = {index: local.state_of(shard) for index, shard in local.shards.items()}
    tensors = tuple(
        TensorDescription(
            spec.name,
            spec.shape,
            str(spec.dtype).removeprefix("torch."),
            plan.owners[index],
            active[index],
            spec.nbytes,
            _nbytes(state.get(index)),
            _nbytes(metadata.placeholders(index)),
        )
        for index, spec in enumerate(plan.tensors)
    )
    buckets = tuple(
        BucketDescription(
            bucket.tensors,
            sum(tensors[index].nbytes for index in bucket.tensors),
            tuple(sorted({owner for index in bucket.tensors for owner in plan.owners[index]})),
        )
        for bucket in states
    )
    reduced = {index for bucket in buckets for index in bucket.tensors}
    is_reduced = [index in reduced for index in range(len(tensors))]
    return OptimizerDescription(
        names_of(policy.classes),
        ranks.rank,
        ranks.world_size,
        policy.name,
        tuple(
            f"{len(group['params'])} tensors"
            + (f", {each.name}" if policy.has_several else "")
            + (f", lr {group['lr']}" if "lr" in group else "")
            for group, each in zip(local.groups, policy.classes, strict=True)
        ),
        plan.imbalance,
        sum(s.numel * plan.tensors[s.tensor].dtype.itemsize for s in plan.of_rank(ranks.rank)),
        sum(map(_nbytes, [*state.values(), *local.other_state().values()])),
        tensors,
        buckets,
        _predicted(plan, active).sent_in_step[ranks.rank],
        _predicted(plan, is_reduced).sent_in_backward[ranks.rank],
        {kind: coordinator.traffic.of(kind) for kind in KINDS},
    )


def _predicted(plan: Plan, trains: Sequence[bool]) -> Prediction:
    """Predict for a plan in which only the flagged tensors are trainable."""
    specs = tuple([replace(spec, trainable=flag) for spec, flag in zip(plan.tensors, trains, strict=True)])
    return predict(replace(plan, tensors=specs), [_NOTHING] * (1 + max([spec.group for spec in specs], default=0)))


def _nbytes(value: object) -> int:
    """Return the bytes of all tensors in a state entry, or in a container of entries."""
    tensors = [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]
    sparse = [tensor.coalesce() for tensor in tensors if tensor.layout is not torch.strided]
    parts = [part for tensor in sparse for part in (tensor.indices(), tensor.values())]
    return sum(tensor.nbytes for tensor in (*tensors, *parts) if tensor.layout is torch.strided)
