"""Which optimizers may be stepped some tensors at a time."""

from __future__ import annotations

from torch import optim

from zeroshard._torch_private import step_post_hooks, step_pre_hooks

STEPPED_IN_PARTS: frozenset[type[optim.Optimizer]] = frozenset(
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


def may_step_in_parts(inner: optim.Optimizer) -> bool:
    """Tell whether an optimizer may be stepped some tensors at a time.

    That is right only if it keeps nothing for all its tensors together: one that counts its steps in a param group or
    in itself would count once per part, and one that wraps another would step all of that one's tensors. This cannot be
    detected, so only classes that are known to keep all state per tensor are stepped in parts.

    Args:
        inner: the local optimizer's.

    Returns:
        True for the classes of torch.optim that keep all state per tensor, and for a class with an attribute
        ``steps_in_pieces = True``; False if its step was replaced on the object, or it has step hooks of its own, which
        must be called once.
    """
    if "step" in vars(inner) or step_pre_hooks(inner) or step_post_hooks(inner):
        return False
    return type(inner) in STEPPED_IN_PARTS or getattr(type(inner), "steps_in_pieces", False) is True
