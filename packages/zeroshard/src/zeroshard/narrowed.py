"""Stepping some pieces of the local optimizer at a time: on a copy of it that is narrowed to them.

The copy shares the inner optimizer's state and has param groups of its own, so nobody ever sees the real ones narrowed.
That is right only for optimizers that keep nothing for all their tensors together: one that counts its steps in a param
group or in itself would count once per portion, and one that wraps another would step all of that one's tensors. It
cannot be seen from outside whether a class does such things, so only classes that are known not to are stepped in
pieces; all others are stepped whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import optim

from zeroshard._torch_private import step_post_hooks, step_pre_hooks
from zeroshard.local import NOT_SYNCED, LocalOptimizer, Piece, unwrapped_step
from zeroshard.param_groups import ParamGroup

STEPPED_IN_PIECES: frozenset[type[optim.Optimizer]] = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adafactor,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.Muon,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
        optim.SparseAdam,
    }
)
"""The classes of torch.optim that keep all state per tensor. A subclass may not."""


def may_step_in_pieces(inner: optim.Optimizer) -> bool:
    """Tell whether an optimizer may be stepped tensor by tensor.

    Args:
        inner: the local optimizer's.

    Returns:
        True for the classes of torch.optim that keep all state per tensor, and for a class with an attribute
        ``steps_in_pieces = True``; False if its step was replaced on the object, or it has step hooks of its own, which
        are to be called once.
    """
    if "step" in vars(inner) or step_pre_hooks(inner) or step_post_hooks(inner):
        return False
    return type(inner) in STEPPED_IN_PIECES or getattr(type(inner), "steps_in_pieces", False) is True


class Portion:
    """Some pieces of a local optimizer, and the copy of the inner optimizer that steps them.

    Made once per plan and bucket. One thread steps it.

    Args:
        local: the local optimizer.
        pieces: those of its pieces that are stepped together; each in place of its parameter, see
            :meth:`LocalOptimizer.set_apart`.
    """

    def __init__(self, local: LocalOptimizer, pieces: Sequence[Piece]) -> None:
        self.pieces = tuple(pieces)
        self._inner = local.optim
        chosen = {piece.tensor for piece in pieces}
        self._groups: list[tuple[int, ParamGroup]] = []
        for number, group in enumerate(self._inner.param_groups):
            members = [tensor for tensor in group["params"] if tensor in chosen]
            if members:
                narrowed: ParamGroup = {"params": members}
                if "param_names" in group:
                    names = zip(group["params"], group["param_names"], strict=True)
                    narrowed["param_names"] = [name for tensor, name in names if tensor in chosen]
                self._groups.append((number, narrowed))
        self._copy: optim.Optimizer = object.__new__(type(self._inner))

    def step(self, arguments: Mapping[str, Any]) -> None:
        """Step the pieces that have a gradient, with the hyperparameters that the inner optimizer has now.

        Args:
            arguments: keyword arguments of the inner step.
        """
        if not self._groups:
            return
        inner, copied = self._inner, self._copy
        for number, narrowed in self._groups:
            for key, value in inner.param_groups[number].items():
                if key not in NOT_SYNCED:
                    narrowed[key] = value
        vars(copied).update(vars(inner))
        copied.param_groups = [narrowed for _, narrowed in self._groups]
        # In a thread of our own gradients would be recorded.
        with torch.no_grad():
            unwrapped_step(type(inner))(copied, **arguments)
