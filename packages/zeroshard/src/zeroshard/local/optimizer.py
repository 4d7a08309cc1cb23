"""The local optimizer: the user's own optimizer class, unmodified, over the shards that this rank owns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import optim
from zeroshard_core import Plan

from zeroshard._torch_private import step_post_hooks, step_pre_hooks
from zeroshard.local.extra_state import ExtraState
from zeroshard.local.master_weights import MasterWeights
from zeroshard.local.several import SeveralOptimizers
from zeroshard.local.shard import LocalShard, gradient_of
from zeroshard.plan.eligibility import (
    check_class_uncoupled,
    check_differentiable,
    check_uncoupled,
    may_step_in_parts,
    warn_of_own_state,
)
from zeroshard.plan.group_classes import GroupClass, assign, check_hyperparameters
from zeroshard.plan.groups import MEMBERS, ParamGroup, hyperparameters_of, parameters_of, same_place
from zeroshard.plan.layout import Policy, label_in

Closure = Callable[[], Any]


class LocalOptimizer:
    """Owns the inner optimizers, one for each class of the param groups, and the shards they work on.

    Only this class changes the members of the inner optimizers' param groups; hyperparameters are synced by
    :func:`sync_groups`. The state changes in a step, ``train()`` or ``eval()`` of the inner optimizer; outside of
    steps, by :class:`zeroshard.state.checkpoints.Checkpoints`; when shards come and go, by :meth:`rebuild`; in
    :class:`AveragedParameters`; and where the user writes to this rank's entries of ``optimizer.state``.

    Attributes:
        members: the inner optimizers, in the order in which their classes appear in the param groups.
        optim: the only inner optimizer, or all as one.
        extra: the state that this package adds to the class's.
        masters: the master weights; empty without ``master_weights``.
        shards: this rank's shards by tensor index, ascending; the dict is replaced, never changed in place.
        plan: the plan in use; see :meth:`use`.
        params: all parameters, by tensor index.
        classes: the class of each param group.
        groups: the public param groups.
    """

    def __init__(self, policy: Policy, groups: list[ParamGroup], plan: Plan, rank: int) -> None:
        self._policy, self._rank = policy, rank
        self.masters, self.extra = MasterWeights(), ExtraState()
        if policy.master_weights:
            self.extra.add(self.masters)
        self.shards: dict[int, LocalShard] = {}
        self._is_detached = False
        members = self._members(groups, plan)
        self.use(groups, plan)
        local = [_local_group(*group) for group in zip(groups, members, strict=True)]
        self.members = self._built(local, policy.classes)
        for number, own in enumerate(assign(policy.classes)):
            check_hyperparameters(f"param group {number}", groups[number], self.members, self.members[own])
        self._join(policy.classes)
        self._accept(chain.from_iterable(members))

    def use(self, groups: list[ParamGroup], plan: Plan) -> None:
        """Record a plan that has the same shards, and the parameters of the groups."""
        self.plan, self.params, self.groups = plan, parameters_of(groups), groups

    @property
    def may_step_in_parts(self) -> bool:
        """True if the inner optimizers may step some shards at a time."""
        return all(map(may_step_in_parts, self.members))

    def dry_run(self, groups: Sequence[ParamGroup], plan: Plan, classes: Sequence[GroupClass]) -> None:
        """Build another optimizer for this rank's shards of the last group, so that errors of the class occur now."""
        built = self._built([_local_group(groups[-1], self._members(groups, plan)[-1])], classes[-1:])
        check_hyperparameters(f"param group {len(groups) - 1}", groups[-1], [*self.members, *built], built[0])

    def rebuild(self, groups: list[ParamGroup], plan: Plan, classes: Sequence[GroupClass]) -> None:
        """Adopt a plan that adds groups, or in which tensors without state lie differently in memory."""
        members = self._members(groups, plan)
        self.use(groups, plan)
        known = {shard.tensor for shard in self.shards.values()}
        arrived = [shard for of_group in members for shard in of_group if shard.tensor not in known]
        assignment = assign(classes)
        for number in range(len(self.optim.param_groups), len(groups)):
            added = _local_group(groups[number], members[number])
            if assignment[number] < len(self.members):
                self.members[assignment[number]].add_param_group(added)
            else:
                self.members += self._built([added], [classes[number]])
        self._join(classes)
        for local, group, of_group in zip(self.optim.param_groups, groups, members, strict=True):
            local.update(_membership(group, of_group))
        self._accept(chain.from_iterable(members))
        kept = {shard.tensor for shard in self.shards.values()}
        for state in [member.state for member in self.members]:
            for key in [key for key in state if isinstance(key, torch.Tensor) and key not in kept]:
                del state[key]
        # Some classes (Adagrad) make state in their constructor, so new shards get it from one more of the class.
        missing = [shard for shard in arrived if not self.optim.state.get(shard.tensor)]
        if missing:
            numbers = [plan.tensors[shard.index].group for shard in missing]
            alone = [_local_group(groups[number], [shard]) for number, shard in zip(numbers, missing, strict=True)]
            for built in self._built(alone, [classes[number] for number in numbers]):
                self.optim.state.update({tensor: state for tensor, state in built.state.items() if state})

    def rebind(self) -> None:
        """Point detached shards at their parameters' current storage, and freeze or unfreeze them like these."""
        for shard in self._detached:
            shard.tensor.requires_grad_(shard.param.requires_grad)
            if not shard.is_master:
                shard.tensor.data = shard.local_view
        self.extra.rebuild([*self.shards.values()])

    def detach_shards(self) -> None:
        """Permanently give every owned parameter its own tensor in the inner optimizer; its state moves with it."""
        before, self._is_detached = self.shards.values(), True
        self._accept([s if s.is_detached else LocalShard.of(s.shard, s.param, detached=True) for s in before])
        moved = {shard.tensor: self.shards[shard.index].tensor for shard in before}
        for state in [member.state for member in self.members]:
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
                    f"{label_in(self.plan, shard.index)} of shape {tuple(shard.param.shape)} has a sparse gradient, "
                    f"but is cut over several ranks; use partition='whole' for models with sparse gradients"
                )

    def step(self, arguments: Mapping[str, Any], unbound: Sequence[LocalShard] | None = None) -> Any:  # noqa: ANN401 - as the inner step
        """Step the inner optimizers, and call their own hooks; ``unbound`` shards take their parameters' gradients."""
        unbound = self._detached if unbound is None else unbound
        with bound_gradients(unbound), self.extra.stepped(self.optim.state, self.shards.values()):
            result, *_ = [_step(member, arguments) for member in self.members]
            if isinstance(self.optim, SeveralOptimizers):
                self.optim.check_keys()
            return result

    def state_of(self, shard: LocalShard) -> Any:  # noqa: ANN401 - a class may keep anything
        """Return the state of a shard, the class's own dict if there are no extra entries; None if there is none."""
        own, extra = self.optim.state.get(shard.tensor), self.extra.entries(shard)
        return {**(own or {}), **extra} if extra else own

    def state_after_a_step(
        self, groups: Sequence[ParamGroup], step: Callable[[optim.Optimizer], None]
    ) -> dict[Any, Any]:
        """Build other optimizers of the same classes, let a function step each, and return their state."""
        built = self._built(groups, self.classes)
        for each in built:
            step(each)
        return {key: entries for each in built for key, entries in each.state.items()}

    def _built(self, groups: Sequence[ParamGroup], classes: Sequence[GroupClass]) -> list[optim.Optimizer]:
        """Build an optimizer for each class, over its groups, with the user's arguments."""
        built = []
        assignment = assign(classes)
        for number in range(max(assignment) + 1):
            own = [group for group, of_group in zip(groups, assignment, strict=True) if of_group == number]
            chosen = classes[assignment.index(number)]
            # The constructor of such a class may raise an error that does not say why.
            check_class_uncoupled(chosen.factory, self._policy.coupled)
            try:
                made = chosen.build(own)
            except (AssertionError, TypeError, ValueError) as error:
                if chosen.name in str(error) or type(error) not in (AssertionError, TypeError, ValueError):
                    raise
                raise type(error)(f"{chosen.name}: {error}") from error
            check_uncoupled(made, chosen.arguments, self._policy.coupled)
            check_differentiable(made)
            warn_of_own_state(made)
            built.append(made)
        return built

    def _join(self, classes: Sequence[GroupClass]) -> None:
        self.classes = classes
        several = len(self.members) > 1
        self.optim: Any = SeveralOptimizers(self.members, assign(classes)) if several else self.members[0]

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
    """Steps some shards of a local optimizer, on copies that share its state and have only these in their groups."""

    def __init__(self, local: LocalOptimizer, shards: Sequence[LocalShard]) -> None:
        self._local, self._shards = local, shards
        chosen = {shard.tensor for shard in shards}
        self._parts: list[tuple[optim.Optimizer, optim.Optimizer, list[tuple[int, ParamGroup]]]] = []
        for inner in local.members:
            groups: list[tuple[int, ParamGroup]] = []
            for number, group in enumerate(inner.param_groups):
                places = [place for place, tensor in enumerate(group["params"]) if tensor in chosen]
                if places:
                    narrowed = {key: [group[key][place] for place in places] for key in MEMBERS if key in group}
                    groups.append((number, narrowed))
            if groups:
                self._parts.append((inner, object.__new__(type(inner)), groups))

    def step(self, arguments: Mapping[str, Any]) -> None:
        """Step the shards that have a gradient, with the hyperparameters that the inner optimizers have now."""
        for inner, copied, groups in self._parts:
            for number, narrowed in groups:
                narrowed.update(hyperparameters_of(inner.param_groups[number]))
            vars(copied).update(vars(inner))
            copied.param_groups = [narrowed for _, narrowed in groups]
        if not self._parts:
            return
        # Grad mode is per thread: the worker thread would record a graph.
        with torch.no_grad(), self._local.extra.stepped(self._local.optim.state, self._shards):
            for inner, copied, _ in self._parts:
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
    """Set the gradients of detached shards to their parts of their parameters' gradients, in the block."""
    try:
        for shard in shards:
            shard.tensor.grad = shard.converted(gradient_of(shard))
        yield
    finally:
        # A slice keeps the whole gradient alive, past the user's `zero_grad()`.
        for shard in shards:
            shard.tensor.grad = None


def unwrapped_step(kind: type[optim.Optimizer]) -> Callable[..., Any]:
    """Return the step function without the wrapper that calls hooks and profiles; torch marks it with ``hooked``."""
    step = kind.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def _step(inner: optim.Optimizer, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401 - what it returns
    if "step" in vars(inner):
        return inner.step(**arguments)
    positional: tuple[Any, ...] = (inner,)
    keywords = dict(arguments)
    for pre_hook in list(step_pre_hooks(inner).values()):
        changed = pre_hook(inner, positional, keywords)
        if changed is not None:
            positional, keywords = changed
    # Call it without the wrapper, so that hooks for all optimizers are called once per step.
    result = unwrapped_step(type(inner))(*positional, **keywords)
    for post_hook in list(step_post_hooks(inner).values()):
        post_hook(inner, positional, keywords)
    return result


def _local_group(group: ParamGroup, shards: Sequence[LocalShard]) -> ParamGroup:
    return {**hyperparameters_of(group), **_membership(group, shards)}


def _membership(group: ParamGroup, shards: Sequence[LocalShard]) -> ParamGroup:
    found: ParamGroup = {"params": [shard.tensor for shard in shards]}
    if "param_names" in group:
        # Not as pairs: an empty list of pairs has no names, and torch refuses groups with and without together.
        names = dict(zip(group["params"], group["param_names"], strict=True))
        found["param_names"] = [names[shard.param] for shard in shards]
    return found
