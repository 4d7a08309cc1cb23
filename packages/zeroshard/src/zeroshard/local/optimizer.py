"""The local optimizer: the user's own optimizer class, unmodified, over the shards that this rank owns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import optim
from zeroshard_core import Plan

from zeroshard._torch_private import step_post_hooks, step_pre_hooks
from zeroshard.local.extra_state import ExtraState
from zeroshard.local.master_weights import MasterWeights
from zeroshard.local.shard import LocalShard, gradient_of
from zeroshard.plan.eligibility import check_differentiable, check_uncoupled
from zeroshard.plan.groups import MEMBERS, ParamGroup, hyperparameters_of, parameters_of, same_place
from zeroshard.plan.layout import Policy, label_in

Closure = Callable[[], Any]


class LocalOptimizer:
    """Owns the inner optimizer and the shards it works on.

    Only this class changes the members of the inner optimizer's param groups; hyperparameters are synced by
    :func:`sync_groups`. The state changes in a step, ``train()`` or ``eval()`` of the inner optimizer; in a load and in
    ``init_state()``, by :meth:`Engine.take_over_state`; when shards come and go, by :meth:`rebuild`; in
    :class:`AveragedParameters`; and where the user writes to this rank's entries of ``optimizer.state``.

    Attributes:
        extra: state that is not the class's own.
        masters: the master weights; none without ``master_weights``.
        shards: this rank's, by tensor index, ascending; replaced, never changed in place.
    """

    def __init__(
        self, policy: Policy, groups: Sequence[ParamGroup], plan: Plan, rank: int, defaults: Mapping[str, Any]
    ) -> None:
        self._policy, self._rank, self._defaults = policy, rank, dict(defaults)
        self.masters, self.extra = MasterWeights(), ExtraState()
        if policy.master_weights:
            self.extra.add(self.masters)
        self.shards: dict[int, LocalShard] = {}
        self._is_detached = False
        members, self._plan = self._members(groups, plan), plan
        self.optim = self.build([_local_group(*group) for group in zip(groups, members, strict=True)])
        self._accept(chain.from_iterable(members))

    def dry_run(self, groups: Sequence[ParamGroup], plan: Plan) -> None:
        """Build another optimizer for this rank's shards of the last group, so that errors of the class occur now."""
        self.build([_local_group(groups[-1], self._members(groups, plan)[-1])])

    def rebuild(self, groups: Sequence[ParamGroup], plan: Plan) -> None:
        """Take over a plan that adds groups, or gives tensors without state on any rank another owner."""
        members, self._plan = self._members(groups, plan), plan
        known = {shard.tensor for shard in self.shards.values()}
        arrived = [shard for of_group in members for shard in of_group if shard.tensor not in known]
        for number in range(len(self.optim.param_groups), len(groups)):
            self.optim.add_param_group(_local_group(groups[number], members[number]))
        for local, group, of_group in zip(self.optim.param_groups, groups, members, strict=True):
            local.update(_membership(group, of_group))
        self._accept(chain.from_iterable(members))
        kept = {shard.tensor for shard in self.shards.values()}
        for key in [key for key in self.optim.state if isinstance(key, torch.Tensor) and key not in kept]:
            del self.optim.state[key]
        # Some classes (Adagrad) make state in their constructor, so new shards get it from one more of the class.
        missing = [shard for shard in arrived if not self.optim.state.get(shard.tensor)]
        if missing:
            built = self.build([_local_group(groups[plan.tensors[shard.index].group], [shard]) for shard in missing])
            self.optim.state.update({tensor: state for tensor, state in built.state.items() if state})

    def rebind(self) -> None:
        """Point detached shards at their parameters' present storage, after a parameter's ``.data`` was rebound."""
        for shard in self._detached:
            if not shard.is_master:
                shard.tensor.data = shard.local_view
        self.extra.rebuild([*self.shards.values()])

    def detach_shards(self) -> None:
        """Permanently give every owned parameter its own tensor in the inner optimizer; its state moves with it."""
        before, self._is_detached = self.shards.values(), True
        self._accept([s if s.is_detached else LocalShard.of(s.shard, s.param, detached=True) for s in before])
        moved = {shard.tensor: self.shards[shard.index].tensor for shard in before}
        state = self.optim.state
        for old, new in moved.items():
            if old is not new and old in state:
                state[new] = state.pop(old)
        for group in self.optim.param_groups:
            group["params"] = [moved[tensor] for tensor in group["params"]]

    def check_not_converted(self, before: Plan, now: Plan) -> None:
        """Raise a ValueError if a parameter with state on this rank was converted between two plans."""
        for index, shard in self.shards.items():
            has_state = shard.is_master or bool(self.optim.state.get(shard.tensor))
            if has_state and not same_place(before.tensors[index], now.tensors[index]):
                raise ValueError(
                    f"{label_in(now, index)} has optimizer state, and has changed its dtype, device or memory format: "
                    f"convert the model before the optimizer is built, or convert it back before step() and "
                    f"load_state_dict()"
                )

    def check_gradients(self) -> None:
        """Raise a RuntimeError if a cut parameter has a sparse gradient, before anything is stepped."""
        for shard in self._cut:
            grad = shard.param.grad
            if grad is not None and grad.layout is not torch.strided:
                raise RuntimeError(
                    f"{label_in(self._plan, shard.index)} of shape {tuple(shard.param.shape)} has a sparse gradient, "
                    f"but is cut over several ranks; use partition='whole' for models with sparse gradients"
                )

    def step(self, arguments: Mapping[str, Any], unbound: Sequence[LocalShard] | None = None) -> Any:  # noqa: ANN401 - as the inner step
        """Step the inner optimizer, and call its own hooks; ``unbound`` shards take their parameters' gradients."""
        inner, unbound = self.optim, self._detached if unbound is None else unbound
        with bound_gradients(unbound), self.extra.stepped(inner.state, self.shards.values()):
            if "step" in vars(inner):
                return inner.step(**arguments)
            positional: tuple[Any, ...] = (inner,)
            keywords = dict(arguments)
            for pre_hook in list(step_pre_hooks(inner).values()):
                changed = pre_hook(inner, positional, keywords)
                if changed is not None:
                    positional, keywords = changed
            # Without the wrapper, so that hooks for all optimizers are called once per step.
            result = unwrapped_step(type(inner))(*positional, **keywords)
            for post_hook in list(step_post_hooks(inner).values()):
                post_hook(inner, positional, keywords)
            return result

    def state_of(self, shard: LocalShard) -> Any:  # noqa: ANN401 - a class may keep anything
        """Return the state of a shard, the class's own dict if there are no extra entries; None if there is none."""
        own, extra = self.optim.state.get(shard.tensor), self.extra.entries(shard)
        return {**(own or {}), **extra} if extra else own

    def build(self, groups: list[ParamGroup]) -> optim.Optimizer:
        """Build an optimizer of the user's class, with the user's defaults."""
        factory = self._policy.factory
        built = factory(groups, **self._defaults)
        keywords = factory.keywords if isinstance(factory, partial) else {}
        check_uncoupled(built, {**keywords, **self._defaults}, self._policy.coupled)
        check_differentiable(built)
        return built

    def _members(self, groups: Sequence[ParamGroup], plan: Plan) -> list[list[LocalShard]]:
        """Return the shards of this rank for each group, and keep shards that exist already."""
        params = parameters_of(groups)
        members: list[list[LocalShard]] = [[] for _ in groups]
        for shard in plan.of_rank(self._rank):
            param = params[shard.tensor]
            known = self.shards.get(shard.tensor)
            if known is None or known.shard != shard:
                known = LocalShard.of(shard, param, detached=self._is_detached, master=self._policy.master_weights)
            members[plan.tensors[shard.tensor].group].append(known)
        return members

    def _accept(self, shards: Iterable[LocalShard]) -> None:
        self.shards = {shard.index: shard for shard in shards}
        self._detached = [shard for shard in self.shards.values() if shard.is_detached]
        self._cut = [shard for shard in self._detached if shard.is_cut]
        self.extra.rebuild([*self.shards.values()])


class PartialStepper:
    """Steps some shards of a local optimizer, on a copy that shares its state and has only these in its groups."""

    def __init__(self, local: LocalOptimizer, shards: Sequence[LocalShard]) -> None:
        self._inner, self._extra, self._shards = local.optim, local.extra, shards
        chosen = {shard.tensor for shard in shards}
        self._groups: list[tuple[int, ParamGroup]] = []
        for number, group in enumerate(self._inner.param_groups):
            places = [place for place, tensor in enumerate(group["params"]) if tensor in chosen]
            if places:
                narrowed = {key: [group[key][place] for place in places] for key in MEMBERS if key in group}
                self._groups.append((number, narrowed))
        self._copy: optim.Optimizer = object.__new__(type(self._inner))

    def step(self, arguments: Mapping[str, Any]) -> None:
        """Step the shards that have a gradient, with the hyperparameters that the inner optimizer has now."""
        if not self._groups:
            return
        inner, copied = self._inner, self._copy
        for number, narrowed in self._groups:
            narrowed.update(hyperparameters_of(inner.param_groups[number]))
        vars(copied).update(vars(inner))
        copied.param_groups = [narrowed for _, narrowed in self._groups]
        # Grad mode is per thread: the worker thread would record a graph.
        with torch.no_grad(), self._extra.stepped(inner.state, self._shards):
            unwrapped_step(type(inner))(copied, **arguments)


def sync_groups(source: Sequence[Mapping[str, Any]], target: Sequence[ParamGroup]) -> None:
    """Copy every attribute but the members from each group to its counterpart; ValueError if their numbers differ."""
    if len(source) != len(target):
        raise ValueError(
            f"there are {len(source)} param groups where there should be {len(target)}: add groups with "
            f"add_param_group(), and build a new optimizer to remove them"
        )
    for from_group, to_group in zip(source, target, strict=True):
        to_group.update({key: value for key, value in from_group.items() if key not in MEMBERS})


@contextmanager
def bound_gradients(shards: Iterable[LocalShard]) -> Iterator[None]:
    """Give detached shards their parts of their parameters' gradients, in the block that follows."""
    try:
        for shard in shards:
            shard.tensor.grad = shard.converted(gradient_of(shard))
        yield
    finally:
        # A slice keeps the whole gradient alive, past the user's `zero_grad()`.
        for shard in shards:
            shard.tensor.grad = None


def unwrapped_step(kind: type[optim.Optimizer]) -> Callable[..., Any]:
    """The step function under the wrapper that calls hooks and profiles; torch marks that wrapper with ``hooked``."""
    step = kind.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def _local_group(group: ParamGroup, shards: Sequence[LocalShard]) -> ParamGroup:
    return {**hyperparameters_of(group), **_membership(group, shards)}


def _membership(group: ParamGroup, shards: Sequence[LocalShard]) -> ParamGroup:
    found: ParamGroup = {"params": [shard.tensor for shard in shards]}
    if "param_names" in group:
        # Not as pairs: an empty list of pairs has no names, and torch refuses groups with and without together.
        names = dict(zip(group["params"], group["param_names"], strict=True))
        found["param_names"] = [names[shard.param] for shard in shards]
    return found
