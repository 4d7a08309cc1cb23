"""Describes an optimizer and its traffic as a value, for ``print()``, logs and programs, without communication."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from zeroshard_comm import KINDS, Coordinator, Volume
from zeroshard_core import Plan

from zeroshard.byte_units import format_bytes
from zeroshard.grads.source import GradSource
from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.plan.group_classes import GroupClass, names_of
from zeroshard.plan.groups import ParamGroup
from zeroshard.plan.layout import Layout, Policy
from zeroshard.state.metadata import StateMetadata
from zeroshard.state.placeholder import leaves


@dataclass(frozen=True)
class TensorDescription:
    """Says which ranks own a parameter, and how many bytes it and its state take.

    Attributes:
        name: the name that the user passed, or ``"param.<index>"``.
        shape, dtype: the shape and dtype of the parameter.
        owners: the ranks that own a part of it, in the order of the parts.
        is_active: whether a step may change it: it is trainable, or still has a gradient.
        nbytes: bytes of the parameter.
        state_bytes_here: bytes of its state on this rank.
        state_bytes: bytes of its state on all ranks, as of the last exchange.
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
    """Says which parameters have their gradients in a bucket, and which ranks own them.

    Attributes:
        tensors: the indices of its parameters.
        nbytes: bytes of the gradients of its parameters.
        owners: the ranks that own a part of it.
        parts: bytes of the part of each of ``owners``.
    """

    tensors: tuple[int, ...]
    nbytes: int
    owners: tuple[int, ...]
    parts: tuple[int, ...]


@dataclass(frozen=True)
class OptimizerDescription:
    """Describes a sharded optimizer as one rank sees it. ``print(optimizer)`` shows :meth:`to_text`.

    ``dataclasses.asdict`` makes a dict of it that ``json.dumps`` accepts.

    Attributes:
        optimizer: the class of the local optimizer.
        rank, world_size: this rank, and the number of ranks, of the process group.
        partition: the name of the strategy.
        groups: one line of text for each param group.
        imbalance: the largest load over the mean load of all ranks, see :attr:`zeroshard_core.Plan.imbalance`. Tensors
            that were never trainable in a step do not count.
        owned_bytes: bytes of parameters that this rank owns.
        state_bytes_here: bytes of state on this rank.
        tensors: the parameters.
        buckets: the buckets of a communication hook in the last backward, or of sharded gradients, in the order in
            which they are reduced; empty if DistributedDataParallel all-reduces gradients.
        shards_gradients: whether a rank keeps only its own parts of gradients; see :func:`zeroshard.shard_gradients`.
        gradient_bytes_here: bytes of gradients in buckets that this rank keeps after a backward.
        transient_bytes: the most bytes of buckets in flight during a backward; 0 unless gradients are sharded.
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
    shards_gradients: bool
    gradient_bytes_here: int
    transient_bytes: int
    step_bytes: int
    backward_bytes: int
    traffic: Mapping[str, Volume]

    def to_text(self) -> str:
        """Return a few lines about the rank: what it owns, the size of its state, and what it has sent so far."""
        owned = sum(self.rank in tensor.owners for tensor in self.tensors)
        nbytes = sum(tensor.nbytes for tensor in self.tensors)
        state = sum(tensor.state_bytes for tensor in self.tensors)
        share = f"{format_bytes(self.owned_bytes)} of {format_bytes(nbytes)}"
        lines = [
            f"{self.optimizer}, rank {self.rank} of {self.world_size}, partition {self.partition!r}",
            f"parameters here: {owned} of {len(self.tensors)} tensors, {share}",
            f"imbalance: {self.imbalance:.3f}",
            f"state here: {format_bytes(self.state_bytes_here)} of {format_bytes(state)}"
            if state
            else "state: none yet",
            *[f"group {number}: {group}" for number, group in enumerate(self.groups)],
            f"sent by this rank in a step: {format_bytes(self.step_bytes)}",
        ]
        if self.buckets:
            reduced = sum(bucket.nbytes for bucket in self.buckets)
            lines.append(f"buckets: {len(self.buckets)}, {format_bytes(reduced)} in total")
            if self.shards_gradients:
                kept, transient = format_bytes(self.gradient_bytes_here), format_bytes(self.transient_bytes)
                lines.append(f"gradients are sharded: {kept} here, and at most {transient} in flight")
            lines.append(f"sent by this rank in a backward: {format_bytes(self.backward_bytes)}")
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
    source: GradSource | None,
) -> OptimizerDescription:
    """Describe an optimizer as it is now, and the buckets of ``source``, which reduces its gradients, if any."""
    plan, ranks = layout.plan, coordinator.ranks
    owned = {s.tensor: s.numel * plan.tensors[s.tensor].dtype.itemsize for s in plan.of_rank(ranks.rank)}
    state = {index: _nbytes(local.state_of(shard)) for index, shard in local.shards.items()}
    tensors = tuple(
        TensorDescription(
            name=spec.name,
            shape=spec.shape,
            dtype=str(spec.dtype).removeprefix("torch."),
            owners=plan.owners[index],
            is_active=layout.active[index],
            nbytes=spec.nbytes,
            state_bytes_here=state.get(index, 0),
            state_bytes=_nbytes(metadata.placeholders(index)),
        )
        for index, spec in enumerate(plan.tensors)
    )
    states = source.states if source is not None else ()
    transient = source.transient_bytes if source is not None else None
    buckets = tuple(_describe_bucket(bucket.tensors, plan) for bucket in states)
    reduced = {index for bucket in buckets for index in bucket.tensors}
    owned_gradients = sum(owned.get(index, 0) for index in reduced)
    all_gradients = sum(bucket.nbytes for bucket in buckets)
    return OptimizerDescription(
        optimizer=names_of(policy.classes),
        rank=ranks.rank,
        world_size=ranks.world_size,
        partition=policy.name,
        groups=tuple(_group_text(policy, *group) for group in zip(local.groups, policy.classes, strict=True)),
        imbalance=plan.imbalance,
        owned_bytes=sum(owned.values()),
        state_bytes_here=sum(state.values()) + _nbytes(local.other_state()),
        tensors=tensors,
        buckets=buckets,
        shards_gradients=transient is not None,
        gradient_bytes_here=all_gradients if transient is None else owned_gradients,
        transient_bytes=transient or 0,
        step_bytes=(ranks.world_size - 1) * sum(nbytes for index, nbytes in owned.items() if layout.active[index]),
        backward_bytes=all_gradients - owned_gradients,
        traffic={kind: coordinator.traffic.of(kind) for kind in KINDS},
    )


def _describe_bucket(indices: tuple[int, ...], plan: Plan) -> BucketDescription:
    parts = Counter[int]()
    for index in indices:
        for shard in plan.of_tensor(index):
            parts[shard.rank] += shard.numel * plan.tensors[index].dtype.itemsize
    owners = tuple(sorted(rank for rank, nbytes in parts.items() if nbytes))
    return BucketDescription(
        indices, sum(plan.tensors[index].nbytes for index in indices), owners, tuple(parts[rank] for rank in owners)
    )


def _group_text(policy: Policy, group: ParamGroup, chosen: GroupClass) -> str:
    name = f", {chosen.name}" if policy.has_several else ""
    rate = f", lr {group['lr']}" if "lr" in group else ""
    return f"{len(group['params'])} tensors{name}{rate}"


def _nbytes(value: object) -> int:
    """Return the bytes of all tensors in a state entry, or in a container of entries."""
    tensors = [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]
    sparse = [tensor.coalesce() for tensor in tensors if tensor.layout is not torch.strided]
    parts = [part for tensor in sparse for part in (tensor.indices(), tensor.values())]
    return sum(tensor.nbytes for tensor in (*tensors, *parts) if tensor.layout is torch.strided)
