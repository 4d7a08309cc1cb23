"""The local optimizer: the user's own optimizer class, unmodified, over the shards that this rank owns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import optim
from zeroshard_core import Plan

from zeroshard._torch_private import step_post_hooks, step_pre_hooks
from zeroshard.local.build import build_optimizers
from zeroshard.local.extra_state import ExtraState
from zeroshard.local.master_weights import MasterWeights
from zeroshard.local.methods import show_shards_to_methods
from zeroshard.local.one_loss import with_one_loss
from zeroshard.local.shard import LocalShard, check_exact, gradient_of
from zeroshard.local.shard_state import ShardState
from zeroshard.plan.eligibility import may_step_in_parts
from zeroshard.plan.group_classes import GroupClass, assign, check_hyperparameters
from zeroshard.plan.groups import MEMBERS, ParamGroup, hyperparameters_of, parameters_of
from zeroshard.plan.layout import Policy, explain_index_error, label_in

Closure = Callable[[], Any]


class LocalOptimizer:
    """Owns the inner optimizers, one for each class of the param groups, and the shards that they step.

    The param groups of the inner optimizers are the public dicts, which list parameters. While a class steps or loads,
    or its ``state_dict()`` runs, they list this rank's shards; see :meth:`exchanged`.

    The state changes in a step, ``train()`` or ``eval()`` of an inner optimizer; outside of steps, by
    :class:`zeroshard.state.checkpoints.Checkpoints`; when shards come and go, by :meth:`rebuild`; in
    :class:`AveragedParameters`; and when the user writes to this rank's entries of ``optimizer.state``.

    Attributes:
        members: the inner optimizers, in the order of their classes in the param groups.
        local_groups: for each param group, its ``"params"`` and ``"param_names"`` on this rank.
        shards: this rank's shards by tensor index, ascending; the dict is replaced, never changed in place.
        extra, masters: the state that this package adds to the class's, and the master weights among it.
        hook_gradients: a weak reference to a function that returns a context in which shards have reduced gradients.
    """

    def __init__(self, policy: Policy, groups: list[ParamGroup], plan: Plan, rank: int) -> None:
        self._policy, self._rank = policy, rank
        self.masters, self.extra = MasterWeights(), ExtraState()
        if policy.master_weights:
            self.extra.add(self.masters)
        self.shards: dict[int, LocalShard] = {}
        self._is_detached, self._depth = False, 0
        self.hook_gradients: Callable[[], Callable[[], AbstractContextManager[None]] | None] | None = None
        self._checked: list[int] = []
        self.shown_methods: set[str] = set()
        self._copied: dict[torch.Tensor, dict[str, Any]] = {}
        self.use(groups, plan)
        self.members: list[optim.Optimizer] = []
        self.classes, self.assignment = policy.classes, assign(policy.classes)
        self._accept(self._members(groups, plan))
        written = [dict(group) for group in groups]
        with self.exchanged():
            self._add(self.build(groups, policy.classes))
        for number, own in enumerate(self.assignment):
            check_hyperparameters(f"param group {number}", written[number], self.members, self.members[own])
        self.publish_groups()

    def use(self, groups: list[ParamGroup], plan: Plan) -> None:
        """Record a plan that has the same shards, and the parameters of the groups."""
        self.plan, self.params, self.groups = plan, parameters_of(groups), groups

    # ------------------------------------------------------------------ param groups

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """Let the param groups list this rank's shards in place of parameters, in the block."""
        pairs = [*zip(self.groups, self.local_groups, strict=True)]
        public = [{key: group[key] for key in MEMBERS if key in group} for group in self.groups]
        self._depth += 1
        try:
            if self._depth == 1:
                for group, own in pairs:
                    group.update(own)
            yield
        except IndexError as error:
            explain_index_error(error, self.plan, self._rank)
        finally:
            self._depth -= 1
            if not self._depth:
                for (group, _), members in zip(pairs, public, strict=True):
                    group.update(members)

    def use_groups(self) -> None:
        """Give the inner optimizers the public groups, some of which the user may have replaced."""
        if len(self.groups) != len(self.assignment):
            raise ValueError(
                f"expected {len(self.assignment)} param groups, but there are {len(self.groups)}: add groups with "
                f"add_param_group(), and build a new optimizer to remove them"
            )
        for number, member in enumerate(self.members):
            pairs = zip(self.groups, self.assignment, strict=True)
            # In place, because an optimizer that wraps another may share the list with it.
            member.param_groups[:] = [group for group, own in pairs if own == number]

    def publish_groups(self) -> None:
        """Make the inner optimizers' groups the public ones if a class has made or loaded its own dicts."""
        for member in self.members:
            is_wrapper = any(isinstance(value, optim.Optimizer) for value in vars(member).values())
            # A wrapper may share the dict with the optimizer that it wraps.
            if type(member.state) is defaultdict and not is_wrapper:
                member.state = ShardState(member.state, self._stepped_for)
        for number, inner in enumerate(self.inner_groups()):
            group = self.groups[number]
            if inner is not group:
                inner.update({key: value for key, value in group.items() if key in MEMBERS or key not in inner})
                self.groups[number] = inner

    def inner_groups(self) -> list[ParamGroup]:
        """Return the inner optimizers' groups, in the order of the public ones."""
        rest = [iter(member.param_groups) for member in self.members]
        return [next(rest[number]) for number in self.assignment]

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the first inner optimizer that all of them have."""
        first, *others = self.members
        return {key: value for key, value in first.defaults.items() if all(key in each.defaults for each in others)}

    def with_defaults(self, groups: Sequence[ParamGroup]) -> list[ParamGroup]:
        """Return copies of groups, one for each public group, with the defaults of their classes."""
        pairs = zip(groups, self.assignment, strict=True)
        return [{**self.members[number].defaults, **group} for group, number in pairs]

    # ------------------------------------------------------------------ state

    def member_of(self, index: int) -> optim.Optimizer:
        """Return the inner optimizer that steps a tensor."""
        return self.members[self.assignment[self.plan.tensors[index].group]]

    def own_state(self, shard: LocalShard) -> Any:  # noqa: ANN401 - a class may keep anything
        """Return the class's own dict of a shard's state; None if there is none."""
        return self.member_of(shard.index).state.get(shard.tensor)

    def state_of(self, shard: LocalShard) -> Any:  # noqa: ANN401 - a class may keep anything
        """Return the state of a shard, the class's own dict if there are no extra entries; None if there is none."""
        own, extra = self.own_state(shard), self.extra.entries(shard)
        return {**(own or {}), **extra} if extra else own

    def _stepped_for(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor that is stepped for a parameter, None if it is not owned here; other tensors unchanged."""
        return self._stepped.get(param, None if param in self._others else param)

    @property
    def states(self) -> list[MutableMapping[Any, Any]]:
        """The state of each inner optimizer, by shard; a class may keep other keys."""
        return [member.state for member in self.members]

    def other_state(self) -> dict[Any, Any]:
        """Return the state that belongs to no parameter, by its own keys."""
        items = chain.from_iterable(state.items() for state in self.states)
        return {key: value for key, value in items if not isinstance(key, torch.Tensor)}

    def replace_state(self, state: Mapping[torch.Tensor, Any]) -> None:
        """Replace the state of all shards."""
        for member in self.members:
            member.state = ShardState({}, self._stepped_for)
        for shard in self.shards.values():
            if shard.tensor in state:
                self.member_of(shard.index).state[shard.tensor] = state[shard.tensor]

    # ------------------------------------------------------------------ shards

    @property
    def may_step_in_parts(self) -> bool:
        """True if the inner optimizers may step some shards at a time."""
        return all(map(may_step_in_parts, self.members))

    def dry_run(self, plan: Plan, classes: Sequence[GroupClass]) -> dict[str, Any]:
        """Build another optimizer for the last group, so that errors of its class occur now; return its defaults."""
        groups = self.groups
        try:
            [built] = self.build([_local_group(groups[-1], self._members(groups, plan)[-1])], classes[-1:])
        except IndexError as error:
            explain_index_error(error, plan, self._rank)
        check_hyperparameters(f"param group {len(groups) - 1}", groups[-1], [*self.members, built], built)
        return built.defaults

    def rebuild(self, groups: list[ParamGroup], plan: Plan, classes: Sequence[GroupClass]) -> None:
        """Adopt a plan that adds groups, or in which tensors without state have another memory format."""
        members = self._members(groups, plan)
        self.use(groups, plan)
        known = {shard.tensor for shard in self.shards.values()}
        arrived = [shard for of_group in members for shard in of_group if shard.tensor not in known]
        first = len(self.assignment)
        self.classes, self.assignment = classes, assign(classes)
        self._accept(members)
        with self.exchanged():
            for number in range(first, len(groups)):
                if self.assignment[number] < len(self.members):
                    self.members[self.assignment[number]].add_param_group(groups[number])
                else:
                    self._add(self.build([groups[number]], [classes[number]]))
        self.publish_groups()
        kept = {shard.tensor for shard in self.shards.values()}
        for state in self.states:
            for key in [key for key in state if isinstance(key, torch.Tensor) and key not in kept]:
                del state[key]
        # Some classes (Adagrad) make state in their constructor, so new shards get it from another instance.
        for shard in arrived:
            if not self.own_state(shard):
                number = plan.tensors[shard.index].group
                [built] = self.build([_local_group(groups[number], [shard])], [classes[number]])
                if built.state.get(shard.tensor):
                    self.member_of(shard.index).state[shard.tensor] = built.state[shard.tensor]

    def rebind(self) -> None:
        """Point detached shards at their parameters' current storage, and freeze or unfreeze them as these are."""
        for shard in self._detached:
            shard.tensor.requires_grad_(shard.param.requires_grad)
            if not shard.is_master:
                shard.tensor.data = shard.local_view
        self.extra.rebuild([*self.shards.values()])

    def check_may_detach(self) -> None:
        """Raise the TypeError of :meth:`detach_shards`, on the owner of the tensor only."""
        for index, shard in self.shards.items():
            check_exact(shard.param, label_in(self.plan, index))

    def detach_shards(self) -> None:
        """Permanently give every owned parameter its own tensor in the inner optimizer; its state moves with it.

        Hooks that step while backward runs need this, because autograd and DDP still use ``param.grad`` then.
        """
        before, self._is_detached = self.shards, True
        self.shards = {index: shard for index, shard in before.items() if shard.is_detached}
        self._accept(self._members(self.groups, self.plan))
        for index, shard in before.items():
            state, new = self.member_of(index).state, self.shards[index]
            if new is not shard and shard.tensor in state:
                state[new.tensor] = state.pop(shard.tensor)

    def check_gradients(self) -> None:
        """Raise a RuntimeError if a cut parameter has a sparse gradient, before anything is stepped."""
        for shard in self._cut:
            grad = shard.param.grad
            if grad is not None and grad.layout is not torch.strided:
                raise RuntimeError(
                    f"{label_in(self.plan, shard.index)} of shape {tuple(shard.param.shape)} has a sparse gradient, "
                    f"but is cut over several ranks; use partition='whole' for models with sparse gradients"
                )

    # ------------------------------------------------------------------ steps

    def step(self, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401 - as the inner step
        """Step the inner optimizers, and call their own hooks."""
        self.copy_attributes()
        with self._bound_gradients(), self.keeping_extra(self.shards.values()):
            result, *_ = [self._step(member, arguments) for member in self.members]
        if len(self.members) > 1:
            self._check_keys()
        return result

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Let the inner optimizers see this rank's shards and their gradients, in the block. No-op within a step."""
        if self._depth:
            yield
            return
        self.copy_attributes()
        with self._bound_gradients(), self.exchanged():
            yield

    def copy_attributes(self) -> None:
        """Give detached shards the attributes that were set on their parameters since the last call.

        A class may read them, and write its own attributes to the shards. Call it in the thread that trains.
        """
        for shard in self._detached:
            attributes, own = vars(shard.param), vars(shard.tensor)
            before = self._copied[shard.tensor]
            if not attributes and not before:
                continue
            for key in before.keys() - attributes.keys():
                own.pop(key, None)
            own.update({key: value for key, value in attributes.items() if before.get(key, self) is not value})
            self._copied[shard.tensor] = dict(attributes)

    def _bound_gradients(self) -> AbstractContextManager[None]:
        if self.hook_gradients is None:
            return bound_gradients(self._detached)
        return (self.hook_gradients() or nullcontext)()

    def keeping_extra(self, shards: Collection[LocalShard]) -> AbstractContextManager[None]:
        """Return a context for a step of some shards, which keeps their extra entries up to date."""
        return self.extra.stepped(self.own_state, shards) if self.extra.kinds else nullcontext()

    def _step(self, inner: optim.Optimizer, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401 - what it returns
        if "step" in vars(inner):
            with self.exchanged():
                return inner.step(**with_one_loss(inner, arguments))
        positional: tuple[Any, ...] = (inner,)
        keywords = dict(arguments)
        for pre_hook in list(step_pre_hooks(inner).values()):
            changed = pre_hook(inner, positional, keywords)
            if changed is not None:
                positional, keywords = changed
        with self.exchanged():
            if "closure" in keywords:
                keywords = with_one_loss(inner, keywords)
            # Call it without the wrapper, so that hooks for all optimizers are called once per step.
            result = unwrapped_step(type(inner))(*positional, **keywords)
        for post_hook in list(step_post_hooks(inner).values()):
            post_hook(inner, positional, keywords)
        return result

    def _check_keys(self) -> None:
        """Raise a RuntimeError if one of several classes keeps state of no parameter, which no checkpoint can hold."""
        counts = [len(state) for state in self.states]
        if counts == self._checked:
            return
        for member in self.members:
            for key in member.state:
                if not isinstance(key, torch.Tensor):
                    raise RuntimeError(
                        f"{type(member).__name__} keeps state under the key {key!r}, which belongs to no parameter: "
                        f"that is not supported with several optimizer classes"
                    )
        self._checked = counts

    # ------------------------------------------------------------------ construction

    def build(self, groups: Sequence[ParamGroup], classes: Sequence[GroupClass]) -> list[optim.Optimizer]:
        """Build optimizers over groups; see :func:`build_optimizers`."""
        return build_optimizers(groups, classes, self._policy.coupled)

    def _add(self, built: Iterable[optim.Optimizer]) -> None:
        """Add inner optimizers. Their ``state_dict()`` lists this rank's shards, as in torch's class."""
        for inner in built:
            self.shown_methods |= show_shards_to_methods(inner, self.exchanged, self.shown)
            self.members.append(inner)

    def _members(self, groups: Sequence[ParamGroup], plan: Plan) -> list[list[LocalShard]]:
        """Return the shards of this rank for each group, and keep shards that exist already."""
        params = parameters_of(groups)
        members: list[list[LocalShard]] = [[] for _ in groups]
        for shard in plan.of_rank(self._rank):
            param = params[shard.tensor]
            known = self.shards.get(shard.tensor)
            if known is None or known.shard != shard:
                known = LocalShard.of(shard, param, detached=self._is_detached, master=self._policy.master_weights)
                if known.is_detached:
                    check_exact(param, label_in(plan, shard.tensor))
            members[plan.tensors[shard.tensor].group].append(known)
        return members

    def _accept(self, members: Sequence[Sequence[LocalShard]]) -> None:
        """Adopt the shards of each group."""
        self.shards = {shard.index: shard for of_group in members for shard in of_group}
        self.local_groups = [_membership(*each) for each in zip(self.groups, members, strict=True)]
        self._detached = [shard for shard in self.shards.values() if shard.is_detached]
        self._cut = [shard for shard in self._detached if shard.is_cut]
        self._copied = {shard.tensor: self._copied.get(shard.tensor, {}) for shard in self._detached}
        self._stepped = {tensor: s.tensor for s in self.shards.values() for tensor in (s.tensor, s.param)}
        self._others = {*self.params} - self._stepped.keys()
        self.extra.rebuild([*self.shards.values()])


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


def _local_group(group: ParamGroup, shards: Sequence[LocalShard]) -> ParamGroup:
    return {**hyperparameters_of(group), **_membership(group, shards)}


def _membership(group: ParamGroup, shards: Sequence[LocalShard]) -> ParamGroup:
    found: ParamGroup = {"params": [shard.tensor for shard in shards]}
    if "param_names" in group:
        # Not as pairs: an empty list of pairs has no names, and torch refuses a mix of groups with and without names.
        names = dict(zip(group["params"], group["param_names"], strict=True))
        found["param_names"] = [names[shard.param] for shard in shards]
    return found
