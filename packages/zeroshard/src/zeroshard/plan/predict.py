"""Predicts what ranks would hold and send, with the code that plans, from the shapes of a model alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import nn
from zeroshard_comm import STAGING_BYTES, row_length
from zeroshard_core import Cost, GroupBytes, GroupCost, Plan, Prediction, RankBytes, TensorSpec, update_bytes
from zeroshard_core import predict as predict_plan

from zeroshard.plan.costs import builder, stepped_spec, with_classes
from zeroshard.plan.eligibility import ELEMENTWISE, OptimizerFactory, check_shardable, class_of
from zeroshard.plan.group_classes import GroupClass, take_class
from zeroshard.plan.groups import ParamGroup, hyperparameters_of, parameters_of, read_groups
from zeroshard.plan.layout import Partition, Policy, first_layout, first_plan, with_work

Backend = Literal["gloo", "nccl"]
"""Ranks send tensors by messages (gloo), or by collectives (all other backends), for which parts are smaller."""


class Planner:
    """Predicts for one model and its optimizers, at any number of ranks. It probes each class once.

    Args:
        model: a module, parameters or param groups, which may be on the meta device.
        optimizer_class: the class, as for :class:`ZeroRedundancyOptimizer`, like all arguments that are not listed.
        buffers: bytes of the model's buffers, unless ``model`` is a module.
        order: all parameters in the order of the model, in which DDP makes buckets, if groups have another order.
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
        self._groups, classes = zip(*[take_class(group, constructors) for group in given], strict=True)
        for chosen, group in zip(classes, self._groups, strict=True):
            _check_class(chosen, group)
        place = {param: number for number, param in enumerate(order)}
        params = parameters_of(self._groups)
        if len({*params}) < len(params):
            raise ValueError("a parameter is in two param groups, or twice in one")
        self._order = sorted(range(len(params)), key=lambda index: place.get(params[index], index))
        on_cpu = all(param.device.type == "cpu" for param in params)
        self.backend, self._grad_dtype = backend or ("gloo" if on_cpu else "nccl"), grad_dtype
        policy = Policy("whole", cost, as_bucket_view=False, world_size=1, master_weights=master_weights)
        by_messages = ("cpu", "meta") if self.backend == "gloo" else ()
        self._policy = with_classes(replace(policy, by_messages=by_messages), classes, self._groups, strict=True)
        self._specs = first_layout(self._policy, self._groups).plan.tensors
        self._bytes = [self._bytes_of(*each) for each in zip(classes, self._policy.costs, self._groups, strict=True)]

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
    ) -> Prediction:
        """Predict for a number of ranks and a partition; see :func:`predict`.

        Raises:
            ValueError: if there is no rank, or the partition cuts tensors of a class that is not elementwise.
        """
        plan = first_plan(replace(self._policy, strategy=partition, world_size=ranks), self._specs)
        by_messages = self.backend == "gloo" or all(len(owners) == 1 for owners in plan.owners)
        return predict_plan(
            plan,
            self._bytes,
            buffers=self._buffers,
            staging=0 if by_messages else self._staging(plan, reduces=reduces_to_owner, interleaves=interleaves),
            reduces_to_owner=reduces_to_owner,
            grad_dtype=self._grad_dtype,
        )

    def weighed(self, plan: Plan) -> Plan:
        """Return the plan with the work of updates as loads, in place of the costs by which its tensors were placed."""
        return with_work(self._policy, plan)

    def _bytes_of(self, chosen: GroupClass, cost: GroupCost, group: ParamGroup) -> GroupBytes:
        settings = {**chosen.arguments, **hyperparameters_of(group)}
        # On accelerators, torch's elementwise classes update all tensors at once by default.
        by_default = self.backend == "nccl" and class_of(chosen.factory) in ELEMENTWISE
        is_foreach = not settings.get("fused") and bool(by_default if (f := settings.get("foreach")) is None else f)
        build, known = builder(chosen, group), dict[tuple[tuple[int, ...], torch.dtype], int]()

        def gradients(spec: TensorSpec) -> int:
            has_master = stepped_spec(spec, master_weights=self._policy.master_weights) is not spec
            return 4 * spec.numel * (has_master and (self._grad_dtype or spec.dtype) != torch.float32)

        def update(spec: TensorSpec) -> int:
            spec = stepped_spec(spec, master_weights=self._policy.master_weights)
            if (key := (spec.shape, spec.dtype)) not in known:
                try:
                    known[key] = 0 if settings.get("fused") else update_bytes(build, {}, spec, foreach=is_foreach)
                except Exception as error:
                    text = f"an update by {chosen.name} of {spec.name!r}, of shape {spec.shape}, raises"
                    raise ValueError(f"{text} {type(error).__name__}: {error}") from error
            return known[key]

        return GroupBytes(cost.state, gradients, update, is_foreach)

    def _staging(self, plan: Plan, *, reduces: bool, interleaves: bool) -> int:
        """Return the bytes of the buffers in which collectives move cut tensors; see zeroshard_comm.collectives."""
        everything = [0] * plan.world_size, [0] * plan.world_size
        rows = []
        for bucket in _buckets(plan, self._order):
            cut, owned = [0] * plan.world_size, [0] * plan.world_size
            for index in bucket:
                dtype, is_cut = plan.tensors[index].dtype, plan.is_cut(index)
                nbytes = max(dtype.itemsize, (self._grad_dtype or dtype).itemsize if reduces else 0)
                for shard in plan.of_tensor(index):
                    owned[shard.rank] += shard.numel * nbytes
                    cut[shard.rank] += shard.numel * nbytes * is_cut
            rows.append(row_length(cut, owned))
            for total, of_bucket in zip(everything, (cut, owned), strict=True):
                total[:] = map(sum, zip(total, of_bucket, strict=True))
        # A step gathers all buckets at once; before that, the first iteration reduces them as one.
        turns = [row_length(*everything)] * (1 + reduces)
        turns += [row for row in rows for _ in range(1 + interleaves) if reduces]
        sizes = [plan.world_size * row for row in turns]
        chunks = [min(STAGING_BYTES, size - at) for size in sizes for at in range(0, size, STAGING_BYTES)]
        # Collectives alternate between two buffers. The means that a rank receives have their own rows.
        return max(chunks[::2], default=0) + max(chunks[1::2], default=0) + sum(rows) * reduces


def predict(
    model: Any,  # noqa: ANN401 - as for the planner
    optimizer_class: OptimizerFactory,
    *,
    ranks: int,
    partition: Partition = "whole",
    reduces_to_owner: bool = True,
    interleaves: bool = False,
    **arguments: Any,  # noqa: ANN401 - as for the planner
) -> Prediction:
    """Predict what each rank holds and sends, from shapes alone. It needs no process group, and allocates nothing.

    >>> found = predict(nn.Linear(1024, 1024, bias=False), torch.optim.AdamW, ranks=4, partition="split")
    >>> found.largest.state, found.sent[0]
    (2097156, 6291456)

    Args:
        model: a module, parameters or param groups, which may be on the meta device.
        optimizer_class: the class, as for :class:`ZeroRedundancyOptimizer`.
        ranks: the number of ranks.
        partition: the partition, as for the optimizer.
        reduces_to_owner: whether DDP has a communication hook that sends gradients to their owners alone.
        interleaves: whether this hook steps a bucket while others are reduced.
        **arguments: arguments of the optimizer, and of :class:`Planner`.

    Raises:
        TypeError, ValueError: if the optimizer's constructor refuses the arguments.
    """
    planner = Planner(model, optimizer_class, **arguments)
    return planner.predict(ranks, partition, reduces_to_owner=reduces_to_owner, interleaves=interleaves)


def _buckets(plan: Plan, order: Sequence[int]) -> list[list[int]]:
    """Return DDP's default buckets in the order of backward: 1 MiB and then 25 MiB each, or one tensor more."""
    found, size = [list[int]()], 0
    for index in reversed(order):
        spec = plan.tensors[index]
        if size >= (1 if len(found) == 1 else 25) * 1024**2:
            found, size = [*found, []], 0
        if spec.trainable:
            found[-1].append(index)
            size += spec.nbytes
    return found


def _check_class(chosen: GroupClass, group: Mapping[str, Any]) -> None:
    """Raise the error that a class raises for tensors of these shapes, without their values."""
    shapes = [(param.shape, param.dtype, param.requires_grad) for param in group["params"]]
    params = [torch.empty(s, dtype=d, device="meta", requires_grad=trained) for s, d, trained in shapes]
    # Some classes cannot be built over tensors of the meta device. A step on the CPU finds all other errors.
    with suppress(RuntimeError):
        chosen.build([{**hyperparameters_of(group), "params": params}])
