"""Predicts what ranks would hold and send from only the shapes of a model, with the code that makes real plans."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import chain
from typing import Any, Literal, get_args

import torch
from torch import nn
from zeroshard_comm import STAGING_BYTES, row_length
from zeroshard_core import (
    Cost,
    GroupBytes,
    GroupCost,
    Plan,
    Prediction,
    RankBytes,
    TensorSpec,
    repartition,
    update_bytes,
)
from zeroshard_core import predict as predict_plan

from zeroshard.grads.held import split_into_buckets
from zeroshard.grads.transient import IN_FLIGHT
from zeroshard.plan.costs import builder, stepped_spec, with_classes
from zeroshard.plan.eligibility import ELEMENTWISE, OptimizerFactory, check_shardable, class_of
from zeroshard.plan.group_classes import GroupClass, take_class
from zeroshard.plan.groups import ParamGroup, hyperparameters_of, parameters_of, read_groups
from zeroshard.plan.layout import Partition, Policy, first_layout, place

Backend = Literal["gloo", "nccl"]
"""Ranks send tensors by messages (gloo), or by collectives (all other backends), for which parts are smaller."""


class Planner:
    """Predicts memory and traffic of one model and its optimizers, at any number of ranks. It probes each class once.

    Args:
        model: a module, parameters or param groups, which may be on the meta device.
        optimizer_class: as for :class:`ZeroRedundancyOptimizer`; so are all arguments that are not listed here.
        buffers: the bytes of the model's buffers, unless ``model`` is a module.
        order: all parameters in the model's order, in which DDP makes buckets, if the groups have another order.
        backend: how ranks are connected; by default gloo if all parameters are on the CPU, else nccl.
        grad_dtype: the dtype of gradients; None for the parameters' own.

    Raises:
        TypeError, ValueError: if the optimizer's constructor refuses the arguments.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - a module, or what optimizers take
        optimizer_class: OptimizerFactory,
        *,
        buffers: int = 0,
        order: Iterable[torch.Tensor] = (),
        backend: Backend | None = None,
        cost: Cost | Mapping[str, float] | None = None,
        elementwise: bool = False,
        master_weights: bool = False,
        grad_dtype: torch.dtype | None = None,
        **defaults: Any,  # noqa: ANN401 - arguments of any optimizer class
    ) -> None:
        if backend not in (None, *get_args(Backend)):
            raise ValueError(f"`backend` should be one of {get_args(Backend)}, but is {backend!r}")
        check_shardable(optimizer_class)
        is_module = isinstance(model, nn.Module)
        self._buffers = sum(each.nbytes for each in {*model.buffers()}) if is_module else buffers
        constructors = GroupClass(optimizer_class, defaults, elementwise)
        given = read_groups(model.named_parameters() if is_module else model)
        groups, classes = zip(*[take_class(group, constructors) for group in given], strict=True)
        for chosen, group in zip(classes, groups, strict=True):
            shapes = [torch.empty_like(p, device="meta", requires_grad=p.requires_grad) for p in group["params"]]
            # Some classes cannot be built over tensors of the meta device. A step on the CPU finds all other errors.
            with suppress(RuntimeError):
                chosen.build([{**hyperparameters_of(group), "params": shapes}])
        params, places = parameters_of(groups), {param: place for place, param in enumerate(order)}
        if len({*params}) < len(params):
            raise ValueError("a parameter is in two param groups")
        self._order = sorted(range(len(params)), key=lambda index: places.get(params[index], index))
        on_cpu = all(param.device.type == "cpu" for param in params)
        self.backend, self._grad_dtype = backend or ("gloo" if on_cpu else "nccl"), grad_dtype
        sends = ("cpu", "meta") if self.backend == "gloo" else ()
        policy = Policy("whole", cost, False, 1, master_weights=master_weights, by_messages=sends)
        self._policy = with_classes(policy, classes, groups, strict=True)
        self._specs = first_layout(self._policy, groups).plan.tensors
        self._bytes = [self._bytes_of(*each) for each in zip(classes, self._policy.costs, groups, strict=True)]

    @cached_property
    def plain(self) -> RankBytes:
        """The bytes that each rank holds without sharding."""
        return self.predict(1).ranks[0]

    @property
    def is_plain(self) -> bool:
        """True if torch's ``ZeroRedundancyOptimizer`` works too: one class, one dtype, and no master weights."""
        dtypes = {spec.dtype for spec in self._specs if spec.trainable}
        return not (self._policy.has_several or self._policy.master_weights or len(dtypes) > 1)

    @property
    def is_elementwise(self) -> bool:
        """True if all tensors may be cut."""
        return all(each.may_be_cut for each in self._policy.classes)

    def predict(
        self,
        ranks: int,
        partition: Partition = "whole",
        *,
        reduces_to_owner: bool = True,
        interleaves: bool = False,
        shards_gradients: bool = False,
        bucket_mb: float = 25,
    ) -> Prediction:
        """Predict for a number of ranks and a partition; see :func:`predict`.

        Raises:
            ValueError: if there is no rank, or the partition cuts tensors of a class that is not elementwise.
        """
        plan = place(replace(self._policy, strategy=partition, world_size=ranks), self._specs)
        reduces, order = reduces_to_owner or shards_gradients, [*reversed(self._order)]
        buckets = _ddp_buckets(plan, order)
        if shards_gradients:
            trained = [index for index in order if plan.tensors[index].trainable]
            buckets = split_into_buckets(trained, plan.tensors, bucket_mb * 2**20)
        whole, *rows = [self._row(plan, bucket, reduces=reduces) for bucket in ([*chain(*buckets)], *buckets)]
        # A step gathers all buckets at once.
        turns, kept, transient = [whole], 0, None
        if shards_gradients:
            turns += rows
            transient = self._transient(plan, trained, buckets, rows)
        elif reduces:
            # The first iteration reduces all buckets as one. The means that a rank receives have their own rows.
            turns += [whole, *(row for row in rows for _ in range(2 if interleaves else 1))]
            kept = sum(rows)
        return predict_plan(
            plan,
            self._bytes,
            buffers=self._buffers,
            staging=_slots([ranks * row for row in turns]) + kept,
            reduces_to_owner=reduces,
            grad_dtype=self._grad_dtype,
            transient=transient,
        )

    def weighed(self, plan: Plan) -> Plan:
        """Return the plan with the work of updates as loads, in place of the costs by which its tensors were placed."""
        return repartition(plan, plan.tensors, groups=self._policy.costs)

    def _bytes_of(self, chosen: GroupClass, cost: GroupCost, group: ParamGroup) -> GroupBytes:
        settings = {**chosen.arguments, **hyperparameters_of(group)}
        # On accelerators, torch's elementwise classes update all tensors at once by default.
        by_default = self.backend == "nccl" and class_of(chosen.factory) in ELEMENTWISE
        foreach, is_fused = settings.get("foreach"), bool(settings.get("fused"))
        is_foreach = not is_fused and bool(by_default if foreach is None else foreach)
        build, stepped = builder(chosen, group), partial(stepped_spec, master_weights=self._policy.master_weights)

        def gradients(spec: TensorSpec) -> int:
            has_copy = stepped(spec) is not spec and (self._grad_dtype or spec.dtype) != torch.float32
            return 4 * spec.numel if has_copy else 0

        @cache
        def temporaries(shape: tuple[int, ...], dtype: torch.dtype) -> int:
            return 0 if is_fused else update_bytes(build, {}, TensorSpec("", shape, dtype), foreach=is_foreach)

        return GroupBytes(cost.state, gradients, lambda spec: temporaries(spec.shape, stepped(spec).dtype), is_foreach)

    def _width(self, spec: TensorSpec) -> int:
        """Return the bytes of an element of a gradient."""
        return (self._grad_dtype or spec.dtype).itemsize

    def _row(self, plan: Plan, indices: Iterable[int], *, reduces: bool) -> int:
        """Return the bytes of a row of the matrix that moves tensors by collectives; 0 if there is none."""
        if self.backend == "gloo" or all(len(owners) == 1 for owners in plan.owners):
            return 0
        cut, owned = [0] * plan.world_size, [0] * plan.world_size
        for index in indices:
            spec = plan.tensors[index]
            width = max(spec.dtype.itemsize, self._width(spec)) if reduces else spec.dtype.itemsize
            for shard in plan.of_tensor(index):
                owned[shard.rank] += shard.numel * width
                cut[shard.rank] += shard.numel * width if plan.is_cut(index) else 0
        return row_length(cut, owned)

    def _transient(
        self, plan: Plan, order: Sequence[int], buckets: Sequence[Sequence[int]], rows: Sequence[int]
    ) -> list[int]:
        """Return, for each rank, the bytes that a backward holds at its peak beyond all gradients the rank owns."""
        owned, peaks = [0] * plan.world_size, [0] * plan.world_size
        arriving, seen, arrived, sent = iter(order), set[int](), 0, 0
        in_flight, free = deque[tuple[int, int, bool]](), list[int]()

        def nbytes_of(index: int) -> int:
            return self._width(plan.tensors[index]) * plan.tensors[index].numel

        def raise_peaks(more: int) -> None:
            held = more + arrived - sent + sum(free) + sum(nbytes + row for nbytes, row, _ in in_flight)
            peaks[:] = [max(peak, own + held) for peak, own in zip(peaks, owned, strict=True)]

        for bucket, row in zip(buckets, rows, strict=True):
            gradients, is_packed = sum(map(nbytes_of, bucket)), len(bucket) > 1
            # Gradients of buckets that are not complete yet wait beside it.
            while bucket[-1] not in seen:
                seen.add(index := next(arriving))
                arrived += nbytes_of(index)
            sent += gradients
            # Autograd has made the gradients when the earliest bucket in flight has to leave.
            raise_peaks(gradients)
            if len(in_flight) == IN_FLIGHT:
                nbytes, _, was_packed = in_flight.popleft()
                free += [nbytes] * was_packed
            # Memory that is too small is freed before larger memory is made.
            buffer = max(gradients, free.pop()) if is_packed and free else gradients
            raise_peaks(buffer + gradients * is_packed)
            for shard in chain.from_iterable(map(plan.of_tensor, bucket)):
                owned[shard.rank] += shard.numel * self._width(plan.tensors[shard.tensor])
            in_flight.append((buffer, row, is_packed))
            raise_peaks(0)
        return [max(0, peak - own) for peak, own in zip(peaks, owned, strict=True)]


def predict(
    model: Any,  # noqa: ANN401 - as for the planner
    optimizer_class: OptimizerFactory,
    *,
    ranks: int,
    partition: Partition = "whole",
    reduces_to_owner: bool = True,
    interleaves: bool = False,
    shards_gradients: bool = False,
    bucket_mb: float = 25,
    **arguments: Any,  # noqa: ANN401 - as for the planner
) -> Prediction:
    """Predict what each rank holds and sends, from only shapes. It needs no process group, and allocates nothing.

    >>> found = predict(nn.Linear(1024, 1024, bias=False), torch.optim.AdamW, ranks=4, partition="split")
    >>> found.largest.state, found.sent[0]
    (2097156, 6291456)

    Args:
        model: a module, parameters or param groups, which may be on the meta device.
        optimizer_class: the optimizer class, as for :class:`ZeroRedundancyOptimizer`.
        ranks: the number of ranks.
        partition: the partition, as for the optimizer.
        reduces_to_owner: whether DDP has a communication hook that sends gradients only to their owners.
        interleaves: whether this hook steps a bucket while others are reduced.
        shards_gradients: whether :func:`zeroshard.shard_gradients` takes the place of DDP and its hook.
        bucket_mb: the size of its buckets in MiB.
        **arguments: arguments of the optimizer, and of :class:`Planner`.

    Raises:
        TypeError, ValueError: if the optimizer's constructor refuses the arguments.
    """
    planner = Planner(model, optimizer_class, **arguments)
    return planner.predict(
        ranks,
        partition,
        reduces_to_owner=reduces_to_owner,
        interleaves=interleaves,
        shards_gradients=shards_gradients,
        bucket_mb=bucket_mb,
    )


def _slots(sizes: Sequence[int]) -> int:
    """Return the bytes of the two buffers that matrices of these sizes use in turn; see zeroshard_comm.collectives."""
    chunks = [min(STAGING_BYTES, size - at) for size in sizes for at in range(0, size, STAGING_BYTES)]
    return max(chunks[::2], default=0) + max(chunks[1::2], default=0)


def _ddp_buckets(plan: Plan, order: Sequence[int]) -> list[list[int]]:
    """Return DDP's default buckets in the order of backward. The first one ends once it has 1 MiB, others at 25 MiB."""
    found, size = [list[int]()], 0
    for index in order:
        spec = plan.tensors[index]
        if size >= (1 if len(found) == 1 else 25) * 1024**2:
            found, size = [*found, []], 0
        if spec.trainable:
            found[-1].append(index)
            size += spec.nbytes
    return found
