"""The local optimizer: the user's own optimizer class, unmodified, over the shards that this rank owns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import optim
from zeroshard_core import Plan, Shard

from zeroshard._torch_private import step_post_hooks, step_pre_hooks
from zeroshard.elementwise import OptimizerFactory
from zeroshard.param_groups import ParamGroup
from zeroshard.reduced_gradient import ReducedGradient

Closure = Callable[[], Any]

NOT_SYNCED = frozenset({"params", "param_names"})
"""Keys of a param group that describe which parameters it has; they differ between the public and the local groups."""


@dataclass(frozen=True, eq=False)
class Piece:
    """One shard of this rank and the tensor that stands for it in the local optimizer.

    Attributes:
        shard: what is owned.
        param: the whole parameter.
        tensor: ``param`` itself where the shard is all of it, else a leaf of its own that views the parameter's rows.
            Once gradients come bucket by bucket, a leaf of its own in both cases, so that shards can be stepped while
            autograd and DDP still work with ``param.grad``.
    """

    shard: Shard
    param: torch.Tensor
    tensor: torch.Tensor

    @property
    def is_cut(self) -> bool:
        """Whether the shard is only a part of the parameter."""
        return self.shard.numel != self.param.numel()

    @property
    def is_stand_in(self) -> bool:
        """Whether the local optimizer holds a tensor of its own in place of the parameter."""
        return self.tensor is not self.param


class LocalOptimizer:
    """Owns the inner optimizer and the pieces it works on.

    Only this class changes the inner optimizer's param groups' members; hyperparameters are synced by
    :func:`sync_groups`, state is changed by the inner optimizer's own step and by a load.

    Args:
        factory: the user's optimizer class.
        groups: the public param groups.
        plan: the plan over all their parameters.
        rank: group rank of this process.
        defaults: the user's keyword arguments for the class.

    Raises:
        Exception: whatever the class raises when it cannot be built.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        groups: Sequence[ParamGroup],
        plan: Plan,
        rank: int,
        defaults: Mapping[str, Any],
    ) -> None:
        self._factory, self._rank, self._defaults = factory, rank, dict(defaults)
        self.pieces: dict[int, Piece] = {}
        """The owned pieces by tensor index, ascending."""
        self._stand_ins: list[Piece] = []
        self._cut: list[Piece] = []
        self._apart = False
        members = self._members(groups, plan)
        self.optim: optim.Optimizer = factory(
            [self._local_group(g, m) for g, m in zip(groups, members, strict=True)], **defaults
        )
        self._accept(members)

    def rehearse(self, groups: Sequence[ParamGroup], plan: Plan) -> None:
        """Build another optimizer for this rank's pieces of the last group, so that it raises now if it ever will.

        Args:
            groups: the public param groups, the new one last.
            plan: the plan over all their parameters.

        Raises:
            Exception: whatever the class raises for these hyperparameters or tensors.
        """
        self._factory([self._local_group(groups[-1], self._members(groups, plan)[-1])], **self._defaults)

    def follow(self, groups: Sequence[ParamGroup], plan: Plan) -> None:
        """Take over a plan that adds groups or gives tensors without state another owner.

        State of pieces that stay is untouched; a piece that leaves must not have been stepped on any rank.

        Args:
            groups: the public param groups; new ones at the end.
            plan: the new plan.
        """
        members = self._members(groups, plan)
        known = {piece.tensor for piece in self.pieces.values()}
        arrived = [piece for of_group in members for piece in of_group if piece.tensor not in known]
        for number, group in enumerate(groups[len(self.optim.param_groups) :], len(self.optim.param_groups)):
            self.optim.add_param_group(self._local_group(group, members[number]))
        for number, (group, of_group) in enumerate(zip(groups, members, strict=True)):
            local = self.optim.param_groups[number]
            local["params"] = [piece.tensor for piece in of_group]
            if "param_names" in group:
                local["param_names"] = _names(group, of_group)
        self._accept(members)
        kept = {piece.tensor for piece in self.pieces.values()}
        for key in [key for key in self.optim.state if isinstance(key, torch.Tensor) and key not in kept]:
            del self.optim.state[key]
        self._initialise(arrived, groups)

    def rebind(self) -> None:
        """Point the stand-ins at their parameters' present storage, after a parameter's ``.data`` was rebound."""
        for piece in self._stand_ins:
            piece.tensor.data = _values(piece.shard, piece.param)

    def set_apart(self) -> None:
        """Give every owned parameter a stand-in in the inner optimizer, for good; its state moves with it."""
        if self._apart:
            return
        self._apart = True
        moved: dict[torch.Tensor, torch.Tensor] = {}
        for index, piece in self.pieces.items():
            if not piece.is_stand_in:
                apart = _piece(piece.shard, piece.param, apart=True)
                moved[piece.param] = apart.tensor
                self.pieces[index] = apart
        self.pieces = dict(self.pieces)
        self._stand_ins = [piece for piece in self.pieces.values() if piece.is_stand_in]
        state = self.optim.state
        for param, tensor in moved.items():
            if param in state:
                state[tensor] = state.pop(param)
        for group in self.optim.param_groups:
            group["params"] = [moved.get(param, param) for param in group["params"]]

    def refuse_reordered(self, before: Plan, now: Plan) -> None:
        """Raise if a cut tensor's rows lie along another dimension now, and this rank holds state for its part.

        That state belongs to the old rows: it would be used for other elements.

        Args:
            before: the plan that the pieces were made for.
            now: the plan that follows the model.

        Raises:
            ValueError: naming the tensor.
        """
        for index, piece in self.pieces.items():
            if not piece.is_cut or before.tensors[index].cut_dim == now.tensors[index].cut_dim:
                continue
            if not all(map(_is_number, self.optim.state.get(piece.tensor, {}).values())):
                raise ValueError(
                    f"tensor {index} {now.tensors[index].name!r} is cut over several ranks, and has changed its memory "
                    f"format: the optimizer state of its parts no longer fits. Call consolidate_state_dict(), build a "
                    f"new optimizer for the converted model and load the state into that"
                )

    def check_gradients(self) -> None:
        """Raise if a gradient cannot be cut, before anything is stepped.

        Raises:
            RuntimeError: if a cut parameter has a sparse gradient.
        """
        for piece in self._cut:
            grad = piece.param.grad
            if grad is not None and grad.layout is not torch.strided:
                raise RuntimeError(
                    f"tensor {piece.shard.tensor} of shape {tuple(piece.param.shape)} has a sparse gradient, but is "
                    f"cut over several ranks; use partition='whole' for models with sparse gradients"
                )

    def step(self, closure: Closure | None, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401 - as the inner step
        """Step the inner optimizer once, without its profiling wrapper, so that global hooks fire once per step.

        Args:
            closure: re-evaluates the model; passed on only if not None.
            arguments: further keyword arguments of the inner step.

        Returns:
            What the inner step returned.
        """
        try:
            if closure is None:
                self.bind_gradients()
                return self.step_bound(arguments)

            def evaluate() -> Any:  # noqa: ANN401 - the closure's own result
                loss = closure()
                self.check_gradients()
                self.bind_gradients()
                return loss

            return self.step_bound({**arguments, "closure": evaluate})
        finally:
            # A slice keeps the whole gradient alive, past the user's zero_grad().
            for piece in self._stand_ins:
                piece.tensor.grad = None

    def step_with(self, gradients: Mapping[int, torch.Tensor], arguments: Mapping[str, Any]) -> None:
        """Step the inner optimizer once with other gradients than those of the parameters, which stay as they are.

        Args:
            gradients: by tensor, each in the shape of what this rank owns of it. A tensor that is missing is not
                stepped.
            arguments: keyword arguments of the inner step.
        """
        before = [piece.tensor.grad for piece in self.pieces.values()]
        try:
            for index, piece in self.pieces.items():
                piece.tensor.grad = gradients.get(index)
            self.step_bound(arguments)
        finally:
            for piece, grad in zip(self.pieces.values(), before, strict=True):
                piece.tensor.grad = grad

    def step_bound(self, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401 - as the inner step
        """Step the inner optimizer with the gradients that its tensors have."""
        inner = self.optim
        if "step" in vars(inner):
            return inner.step(**arguments)
        positional, keywords = self.before_step(arguments)
        result = unwrapped_step(type(inner))(*positional, **keywords)
        self.after_step(positional, keywords)
        return result

    def before_step(self, arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Call the inner optimizer's own pre-hooks, and return the arguments of its step as they left them."""
        inner = self.optim
        positional: tuple[Any, ...] = (inner,)
        keywords = dict(arguments)
        for pre_hook in list(step_pre_hooks(inner).values()):
            changed = pre_hook(inner, positional, keywords)
            if changed is not None:
                positional, keywords = changed
        return positional, keywords

    def after_step(self, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Call the inner optimizer's own post-hooks."""
        inner = self.optim
        for post_hook in list(step_post_hooks(inner).values()):
            post_hook(inner, positional, keywords)

    def bind_gradients(self, pieces: Iterable[Piece] | None = None) -> None:
        """Hand stand-ins their parts of their parameters' gradients; all of them if none are named."""
        for piece in self._stand_ins if pieces is None else pieces:
            grad = piece.param.grad
            if grad is None:
                piece.tensor.grad = None
                continue
            if type(grad) is ReducedGradient:
                # Whoever reduced it binds it.
                continue
            if not piece.is_cut:
                piece.tensor.grad = grad.detach()
                continue
            if grad.stride() != piece.param.stride():
                laid_out = torch.empty_strided(grad.shape, piece.param.stride(), dtype=grad.dtype, device=grad.device)
                grad = laid_out.copy_(grad)
            piece.tensor.grad = piece.shard.box(grad.detach())

    def _members(self, groups: Sequence[ParamGroup], plan: Plan) -> list[list[Piece]]:
        """Per group, the pieces of this rank; pieces that exist already are kept."""
        params = [(number, param) for number, group in enumerate(groups) for param in group["params"]]
        members: list[list[Piece]] = [[] for _ in groups]
        for shard in plan.of_rank(self._rank):
            number, param = params[shard.tensor]
            known = self.pieces.get(shard.tensor)
            kept = known is not None and known.shard == shard
            members[number].append(known if known is not None and kept else _piece(shard, param, apart=self._apart))
        return members

    def _accept(self, members: Iterable[Iterable[Piece]]) -> None:
        self.pieces = {piece.shard.tensor: piece for of_group in members for piece in of_group}
        self._stand_ins = [piece for piece in self.pieces.values() if piece.is_stand_in]
        self._cut = [piece for piece in self._stand_ins if piece.is_cut]

    def _local_group(self, group: ParamGroup, pieces: Sequence[Piece]) -> ParamGroup:
        local = {key: value for key, value in group.items() if key not in NOT_SYNCED}
        local["params"] = [piece.tensor for piece in pieces]
        if "param_names" in group:
            # Not as pairs: an empty list of pairs has no names, and torch refuses groups with and without together.
            local["param_names"] = _names(group, pieces)
        return local

    def _initialise(self, arrived: Sequence[Piece], groups: Sequence[ParamGroup]) -> None:
        """Give new pieces the state that the class makes in its constructor (Adagrad does): build it once more."""
        missing = [piece for piece in arrived if not self.optim.state.get(piece.tensor)]
        if not missing:
            return
        positions = [number for number, group in enumerate(groups) for _ in group["params"]]
        built = self._factory(
            [
                {
                    **{k: v for k, v in groups[positions[piece.shard.tensor]].items() if k not in NOT_SYNCED},
                    "params": [piece.tensor],
                }
                for piece in missing
            ],
            **self._defaults,
        )
        for piece in missing:
            if built.state.get(piece.tensor):
                self.optim.state[piece.tensor] = built.state[piece.tensor]


def sync_groups(source: Sequence[Mapping[str, Any]], target: Sequence[ParamGroup]) -> None:
    """Copy every attribute but the members from each group of ``source`` to its counterpart, e.g. learning rates.

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


def _piece(shard: Shard, param: torch.Tensor, *, apart: bool) -> Piece:
    if shard.numel == param.numel() and not (apart and param.layout is torch.strided):
        return Piece(shard, param, param)
    return Piece(shard, param, torch.nn.Parameter(_values(shard, param), requires_grad=param.requires_grad))


def _values(shard: Shard, param: torch.Tensor) -> torch.Tensor:
    """What a stand-in views: the parameter itself, or some rows of it."""
    return param.detach() if shard.numel == param.numel() else shard.box(param.detach())


def _is_number(value: object) -> bool:
    """Whether a state entry is one value for the whole tensor, and not one per element."""
    return value.dim() == 0 if isinstance(value, torch.Tensor) else isinstance(value, (int, float, str, type(None)))


def _names(group: Mapping[str, Any], pieces: Sequence[Piece]) -> list[str]:
    by_identity = {id(param): name for param, name in zip(group["params"], group["param_names"], strict=True)}
    return [by_identity[id(piece.param)] for piece in pieces]


def unwrapped_step(kind: type[optim.Optimizer]) -> Callable[..., Any]:
    """The step function under the wrapper that fires hooks and profiles; torch marks that wrapper with ``hooked``."""
    step = kind.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
