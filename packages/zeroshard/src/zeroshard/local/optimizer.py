"""The local optimizer: the user's own optimizer class, unmodified, over the shards that this rank owns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import optim
from zeroshard_core import Plan

from zeroshard._torch_private import step_post_hooks, step_pre_hooks
from zeroshard.local.extra_state import ExtraState
from zeroshard.local.master_weights import MasterWeights
from zeroshard.local.shard import LocalShard, gradient_of, rows_of
from zeroshard.plan.eligibility import check_differentiable, check_uncoupled
from zeroshard.plan.groups import ParamGroup

if TYPE_CHECKING:
    from zeroshard.plan.layout import Policy

Closure = Callable[[], Any]

NOT_SYNCED = frozenset({"params", "param_names"})
"""Keys of a param group that describe which parameters it has; they differ between the public and the local groups."""


class LocalOptimizer:
    """Owns the inner optimizer and the shards it works on.

    Only this class changes the members of the inner optimizer's param groups; hyperparameters are synced by
    :func:`sync_groups`. The state changes in a step, ``train()`` or ``eval()`` of the inner optimizer; in a load and in
    ``init_state()``, by :meth:`Engine.take_over_state`; when shards come and go, by :meth:`rebuild`; in
    :class:`AveragedParameters`; and where the user writes to this rank's entries of ``optimizer.state``.

    Args:
        policy: has the optimizer class, and says whether it may couple tensors, and step master weights.
        groups: the public param groups.
        plan: the plan over all their parameters.
        rank: group rank of this process.
        defaults: the user's keyword arguments for the class.

    Attributes:
        extra: state that is not the class's own.
        masters: the master weights; none without ``master_weights``.
        shards: this rank's, by tensor index, ascending; replaced, never changed in place.

    Raises:
        Exception: any error of the class's constructor, or as :func:`check_uncoupled`.
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
        self._accept(members)

    def dry_run(self, groups: Sequence[ParamGroup], plan: Plan) -> None:
        """Build another optimizer for this rank's shards of the last group, so that errors of the class occur now.

        Args:
            groups: the public param groups, the new one last.
            plan: the plan over all their parameters.

        Raises:
            Exception: as the constructor, for these hyperparameters or tensors.
        """
        self.build([_local_group(groups[-1], self._members(groups, plan)[-1])])

    def rebuild(self, groups: Sequence[ParamGroup], plan: Plan) -> None:
        """Take over a plan that adds groups or gives tensors without state another owner.

        State of shards that stay is untouched; a shard that leaves must not have been stepped on any rank.

        Args:
            groups: the public param groups; new ones at the end.
            plan: the new plan.
        """
        members, self._plan = self._members(groups, plan), plan
        known = {shard.tensor for shard in self.shards.values()}
        arrived = [shard for of_group in members for shard in of_group if shard.tensor not in known]
        for number in range(len(self.optim.param_groups), len(groups)):
            self.optim.add_param_group(_local_group(groups[number], members[number]))
        for local, group, of_group in zip(self.optim.param_groups, groups, members, strict=True):
            local.update(_membership(group, of_group))
        self._accept(members)
        kept = {shard.tensor for shard in self.shards.values()}
        for key in [key for key in self.optim.state if isinstance(key, torch.Tensor) and key not in kept]:
            del self.optim.state[key]
        # Some classes (Adagrad) make state in their constructor, so new shards get it from one more of the class.
        missing = [shard for shard in arrived if not self.optim.state.get(shard.tensor)]
        if missing:
            number_of = [number for number, group in enumerate(groups) for _ in group["params"]]
            built = self.build([_local_group(groups[number_of[shard.shard.tensor]], [shard]) for shard in missing])
            self.optim.state.update({tensor: state for tensor, state in built.state.items() if state})

    def rebind(self) -> None:
        """Point detached shards at their parameters' present storage, after a parameter's ``.data`` was rebound."""
        for shard in self._detached:
            (shard.tensor if shard.rounded is None else shard.rounded).data = rows_of(shard.shard, shard.param)
        self.extra.rebuild([*self.shards.values()])

    def detach_shards(self) -> None:
        """Permanently give every owned parameter its own tensor in the inner optimizer; its state moves with it."""
        if self._is_detached:
            return
        self._is_detached = True
        before = self.shards
        self.shards = {
            index: shard if shard.is_detached else LocalShard.of(shard.shard, shard.param, detached=True)
            for index, shard in before.items()
        }
        moved = {shard.tensor: self.shards[index].tensor for index, shard in before.items()}
        self._detached = [shard for shard in self.shards.values() if shard.is_detached]
        state = self.optim.state
        for old, new in moved.items():
            if old is not new and old in state:
                state[new] = state.pop(old)
        for group in self.optim.param_groups:
            group["params"] = [moved[tensor] for tensor in group["params"]]
        self.extra.rebuild([*self.shards.values()])

    def check_not_converted(self, before: Plan, now: Plan) -> None:
        """Raise if a parameter was converted whose state, on this rank, was made for it as it was.

        Args:
            before: the plan that the shards were made for.
            now: the plan that follows the model.

        Raises:
            ValueError: naming the tensor.
        """
        for index, shard in self.shards.items():
            old, new = before.tensors[index], now.tensors[index]
            has_state = shard.rounded is not None or bool(self.optim.state.get(shard.tensor))
            if has_state and (old.dtype, old.device, old.stride) != (new.dtype, new.device, new.stride):
                raise ValueError(
                    f"tensor {index} {new.name!r} has optimizer state, and has changed its dtype, device or memory "
                    f"format: convert the model before the optimizer is built, or convert it back before step() and "
                    f"load_state_dict()"
                )

    def check_gradients(self) -> None:
        """Raise if a gradient cannot be cut, before anything is stepped.

        Raises:
            RuntimeError: if a cut parameter has a sparse gradient.
        """
        for shard in self._cut:
            grad = shard.param.grad
            if grad is not None and grad.layout is not torch.strided:
                raise RuntimeError(
                    f"tensor {shard.shard.tensor} {self._plan.tensors[shard.shard.tensor].name!r} of shape "
                    f"{tuple(shard.param.shape)} has a sparse gradient, but is cut over several ranks; use "
                    f"partition='whole' for models with sparse gradients"
                )

    def step(self, arguments: Mapping[str, Any], unbound: Sequence[LocalShard] | None = None) -> Any:  # noqa: ANN401 - as the inner step
        """Step the inner optimizer, and call its own hooks.

        Without its profiling wrapper, so that hooks for all optimizers are called once per step.

        Args:
            arguments: keyword arguments of the inner step.
            unbound: detached shards that are stepped with their parameters' gradients, all if None; the tensors of the
                others have theirs.
        """
        unbound = self._detached if unbound is None else unbound
        try:
            bind_gradients(unbound)
            if not self.extra.kinds:
                return self._step(arguments)
            shards = [*self.shards.values()]
            with self.masters.stepped(shards), self.extra.stepped(self.optim.state, shards):
                return self._step(arguments)
        finally:
            unbind_gradients(unbound)

    def _step(self, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401 - as the inner step
        inner = self.optim
        if "step" in vars(inner):
            return inner.step(**arguments)
        positional: tuple[Any, ...] = (inner,)
        keywords = dict(arguments)
        for pre_hook in list(step_pre_hooks(inner).values()):
            changed = pre_hook(inner, positional, keywords)
            if changed is not None:
                positional, keywords = changed
        result = unwrapped_step(type(inner))(*positional, **keywords)
        for post_hook in list(step_post_hooks(inner).values()):
            post_hook(inner, positional, keywords)
        return result

    def state_of(self, shard: LocalShard) -> Any:  # noqa: ANN401 - a class may keep anything
        """Return the state of a shard, extra entries too; None if there is none."""
        return self.extra.merged(self.optim.state, shard)

    def build(self, groups: list[ParamGroup]) -> optim.Optimizer:
        """Build an optimizer of the user's class, with the user's defaults."""
        factory = self._policy.factory
        built = factory(groups, **self._defaults)
        keywords = factory.keywords if isinstance(factory, partial) else {}
        check_uncoupled(built, {**keywords, **self._defaults}, self._policy.coupled)
        check_differentiable(built)
        return built

    def _members(self, groups: Sequence[ParamGroup], plan: Plan) -> list[list[LocalShard]]:
        """Per group, the shards of this rank; those that exist already are kept."""
        params = [(number, param) for number, group in enumerate(groups) for param in group["params"]]
        members: list[list[LocalShard]] = [[] for _ in groups]
        for shard in plan.of_rank(self._rank):
            number, param = params[shard.tensor]
            known = self.shards.get(shard.tensor)
            if known is None or known.shard != shard:
                known = LocalShard.of(shard, param, detached=self._is_detached, master=self._policy.master_weights)
            members[number].append(known)
        return members

    def _accept(self, members: Iterable[Iterable[LocalShard]]) -> None:
        self.shards = {shard.shard.tensor: shard for of_group in members for shard in of_group}
        self._detached = [shard for shard in self.shards.values() if shard.is_detached]
        self._cut = [shard for shard in self._detached if shard.is_cut]
        self.extra.rebuild([*self.shards.values()])


class PartialStepper:
    """Steps some shards of a local optimizer: on a copy of it whose param groups have only these.

    The copy shares the inner optimizer's state and has param groups of its own, so the real groups are never
    changed. One thread steps it. Made once per plan and bucket.

    Args:
        local: the local optimizer; see :mod:`zeroshard.plan.eligibility`.
        shards: those of its shards that are stepped together.
    """

    def __init__(self, local: LocalOptimizer, shards: Sequence[LocalShard]) -> None:
        self._inner, self._extra, self._masters = local.optim, local.extra, local.masters
        self._shards = shards
        chosen = {shard.tensor for shard in shards}
        self._groups: list[tuple[int, ParamGroup]] = []
        for number, group in enumerate(self._inner.param_groups):
            places = [place for place, tensor in enumerate(group["params"]) if tensor in chosen]
            if places:
                narrowed = {key: [group[key][place] for place in places] for key in NOT_SYNCED if key in group}
                self._groups.append((number, narrowed))
        self._copy: optim.Optimizer = object.__new__(type(self._inner))

    def step(self, arguments: Mapping[str, Any]) -> None:
        """Step the shards that have a gradient, with the hyperparameters that the inner optimizer has now.

        Args:
            arguments: keyword arguments of the inner step.
        """
        if not self._groups:
            return
        inner, copied = self._inner, self._copy
        for number, narrowed in self._groups:
            narrowed.update({key: value for key, value in inner.param_groups[number].items() if key not in NOT_SYNCED})
        vars(copied).update(vars(inner))
        copied.param_groups = [narrowed for _, narrowed in self._groups]
        # Grad mode is per thread: the worker thread would record a graph.
        shards = self._shards
        with torch.no_grad(), self._masters.stepped(shards), self._extra.stepped(inner.state, shards):
            unwrapped_step(type(inner))(copied, **arguments)


def sync_groups(source: Sequence[Mapping[str, Any]], target: Sequence[ParamGroup]) -> None:
    """Copy every attribute except the members from each group of ``source`` to its counterpart, e.g. learning rates.

    Raises:
        ValueError: if the numbers of groups differ; then nothing is copied.
    """
    if len(source) != len(target):
        raise ValueError(
            f"there are {len(source)} param groups where there should be {len(target)}: add groups with "
            f"add_param_group(), and build a new optimizer to remove them"
        )
    for from_group, to_group in zip(source, target, strict=True):
        for key, value in from_group.items():
            if key not in NOT_SYNCED:
                to_group[key] = value


def bind_gradients(shards: Iterable[LocalShard]) -> None:
    """Give detached shards their parts of their parameters' gradients."""
    for shard in shards:
        shard.tensor.grad = shard.converted(gradient_of(shard))


def unbind_gradients(shards: Iterable[LocalShard]) -> None:
    """Take them back: a slice keeps the whole gradient alive, past the user's ``zero_grad()``."""
    for shard in shards:
        shard.tensor.grad = None


def unwrapped_step(kind: type[optim.Optimizer]) -> Callable[..., Any]:
    """The step function under the wrapper that fires hooks and profiles; torch marks that wrapper with ``hooked``."""
    step = kind.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def _local_group(group: ParamGroup, shards: Sequence[LocalShard]) -> ParamGroup:
    return {**{key: value for key, value in group.items() if key not in NOT_SYNCED}, **_membership(group, shards)}


def _membership(group: ParamGroup, shards: Sequence[LocalShard]) -> ParamGroup:
    found: ParamGroup = {"params": [shard.tensor for shard in shards]}
    if "param_names" in group:
        # Not as pairs: an empty list of pairs has no names, and torch refuses groups with and without together.
        names = {id(param): name for param, name in zip(group["params"], group["param_names"], strict=True)}
        found["param_names"] = [names[id(shard.param)] for shard in shards]
    return found
