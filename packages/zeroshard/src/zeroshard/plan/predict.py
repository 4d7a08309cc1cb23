"""What ranks would hold and send, by the code that plans, from the shapes of a model alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from zeroshard_comm import STAGING_BYTES, row_length
from zeroshard_core import Cost, GroupBytes, Level, Plan, Prediction, Strategy, TensorSpec, state_bytes, update_bytes
from zeroshard_core import predict as predict_plan

from zeroshard.plan.costs import with_classes
from zeroshard.plan.eligibility import ELEMENTWISE, OptimizerFactory, check_shardable, class_of
from zeroshard.plan.group_classes import GroupClass, take_class
from zeroshard.plan.groups import hyperparameters_of, parameters_of, read_groups
from zeroshard.plan.layout import Policy, first_layout

Backend = Literal["gloo", "nccl"]
"""Tensors travel by messages, or by collectives, as on all backends but gloo: there parts are smaller."""


class Planner:
    """Predicts for one model and its optimizers, whatever the number of ranks: classes are probed once for all.

    Args:
        model: a module, parameters or param groups, which may be on the meta device.
        optimizer_class: as for :class:`ZeroRedundancyOptimizer`, as are the arguments that are not named here.
        buffers: bytes of buffers of the model; a module's own are known.
        order: all parameters in the order of the model, in which DDP makes buckets, where groups have another one.
        backend: how ranks are connected; by default as for the device that the parameters are on.
        grad_dtype: of gradients; None for the parameters' own.

    Raises:
        TypeError, ValueError: as the optimizer's constructor.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - a module, or what optimizers take
        optimizer_class: OptimizerFactory,
        *,
        buffers: int = 0,
        order: Iterable[torch.Tensor] = (),
        backend: Backend | None = None,
        cost: Cost | None = None,
        elementwise: bool = False,
        master_weights: bool = False,
        grad_dtype: torch.dtype | None = None,
        **defaults: Any,  # noqa: ANN401 - arguments of any optimizer class
    ) -> None:
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
        self._policy = with_classes(replace(policy, by_messages=by_messages), classes, self._groups)
        self._bytes = [self._bytes_of(*each) for each in zip(classes, self._groups, strict=True)]
        # The same, but an error where the optimizer would make do with a guess.
        costs = [replace(cost, state=own.state) for cost, own in zip(self._policy.costs, self._bytes, strict=True)]
        self._policy = replace(self._policy, costs=costs)

    @property
    def is_plain(self) -> bool:
        """Whether one class steps parameters as they are, so that torch's ``ZeroRedundancyOptimizer`` could, too."""
        return not (self._policy.has_several or self._policy.master_weights)

    @property
    def is_elementwise(self) -> bool:
        """Whether all tensors may be cut."""
        return all(each.may_be_cut for each in self._policy.classes)

    def predict(
        self, ranks: int, partition: str | Strategy | Level = "whole", *, reduces_to_owner: bool = True
    ) -> Prediction:
        """Predict for so many ranks and a partition; ``reduces_to_owner`` says whether DDP has a hook of ours.

        Raises:
            ValueError: if there is no rank, or the partition cuts tensors of a class that is not elementwise.
        """
        policy = replace(self._policy, strategy=partition, world_size=ranks)
        plan = first_layout(policy, self._groups).plan
        return predict_plan(
            plan,
            self._bytes,
            buffers=self._buffers,
            staging=self._staging_bytes(plan, reduces=reduces_to_owner) if self.backend == "nccl" else 0,
            reduces_to_owner=reduces_to_owner,
            grad_dtype=self._grad_dtype,
        )

    def _bytes_of(self, chosen: GroupClass, group: Mapping[str, Any]) -> GroupBytes:
        written = hyperparameters_of(group)
        settings, kind = {**chosen.arguments, **written}, class_of(chosen.factory)
        # On accelerators torch's elementwise classes do so by default.
        by_default = self.backend == "nccl" and kind in ELEMENTWISE
        is_foreach = not settings.get("fused") and bool(by_default if (f := settings.get("foreach")) is None else f)
        build = _builder(chosen, written)
        measured, known = state_bytes(build), dict[tuple[tuple[int, ...], torch.dtype], int]()

        def stepped(spec: TensorSpec) -> TensorSpec:
            has_copy = self._policy.master_weights and spec.dtype in (torch.float16, torch.bfloat16)
            return replace(spec, dtype=torch.float32) if has_copy else spec

        def state(spec: TensorSpec) -> float:
            return measured(stepped(spec)) + (stepped(spec).nbytes if stepped(spec) is not spec else 0)

        def gradients(spec: TensorSpec) -> int:
            is_copied = stepped(spec) is not spec and (self._grad_dtype or spec.dtype) != torch.float32
            return 4 * spec.numel * is_copied

        def update(spec: TensorSpec) -> int:
            spec = stepped(spec)
            if (key := (spec.shape, spec.dtype)) not in known:
                known[key] = 0 if settings.get("fused") else _tried(build, spec, foreach=is_foreach)
            return known[key]

        return GroupBytes(state, gradients, update, is_foreach)

    def _staging_bytes(self, plan: Plan, *, reduces: bool) -> int:
        """Return the bytes of the buffers in which collectives move cut tensors, see zeroshard_comm.collectives."""
        if plan.world_size == 1:
            return 0
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
        # All buckets are one in the first iteration, and in a step.
        matrix = plan.world_size * max(row_length(*everything), max(rows) if reduces else 0)
        # The two buffers are taken in turn; the means that a rank receives lie in rows of their own.
        return (2 if reduces or matrix > STAGING_BYTES else 1) * min(STAGING_BYTES, matrix) + sum(rows) * reduces


def predict(
    model: Any,  # noqa: ANN401 - as for the planner
    optimizer_class: OptimizerFactory,
    *,
    ranks: int,
    partition: str | Strategy | Level = "whole",
    reduces_to_owner: bool = True,
    **arguments: Any,  # noqa: ANN401 - as for the planner
) -> Prediction:
    """Predict what each rank holds and sends, from shapes alone: without a process group, and nothing is allocated.

    >>> found = predict(nn.Linear(1024, 1024, bias=False), torch.optim.AdamW, ranks=4, partition="split")
    >>> found.largest.state, found.sent[0]
    (2097156, 6291456)

    Args:
        model: a module, parameters or param groups, which may be on the meta device.
        optimizer_class: as for :class:`ZeroRedundancyOptimizer`.
        ranks: how many.
        partition: as for the optimizer.
        reduces_to_owner: whether DDP has a communication hook that sends gradients to their owners alone.
        **arguments: as for the optimizer, and for :class:`Planner`.

    Raises:
        TypeError, ValueError: as the optimizer's constructor.
    """
    planner = Planner(model, optimizer_class, **arguments)
    return planner.predict(ranks, partition, reduces_to_owner=reduces_to_owner)


def _buckets(plan: Plan, order: Sequence[int]) -> list[list[int]]:
    """DDP's buckets by default: in the order of backward, of 1 MiB and then 25 MiB, or one tensor more."""
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
    """Raise what a class raises for tensors of these shapes, without their values."""
    shapes = [(param.shape, param.dtype, param.requires_grad) for param in group["params"]]
    params = [torch.empty(s, dtype=d, device="meta", requires_grad=trained) for s, d, trained in shapes]
    # Some classes cannot be built over tensors of the meta device; whatever else is wrong, a step on the CPU tells.
    with suppress(RuntimeError):
        chosen.build([{**hyperparameters_of(group), "params": params}])


def _builder(chosen: GroupClass, written: Mapping[str, Any]) -> Callable[[list[torch.Tensor]], torch.optim.Optimizer]:
    def build(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        return chosen.build([{**written, "params": params}])

    # For errors.
    build.__name__ = chosen.name
    return build


def _tried(build: Callable[..., torch.optim.Optimizer], spec: TensorSpec, *, foreach: bool) -> int:
    try:
        return update_bytes(build, {}, spec, foreach=foreach)
    except Exception:  # noqa: BLE001 - a class that refuses tensors without values, in whatever way
        return spec.nbytes
