"""Which optimizers may work on cut tensors, and which cannot be sharded at all.

An optimizer is *elementwise* if the new value of an element depends on that element's own gradient and state (and on
numbers that are the same for the whole tensor, such as a step count). Cutting a tensor then changes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import optim

OptimizerFactory = Callable[..., optim.Optimizer]

ELEMENTWISE: frozenset[type[optim.Optimizer]] = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)
"""The classes of torch.optim that are elementwise. A subclass may not be, so it has to be declared."""


def class_of(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Look through ``functools.partial``."""
    while isinstance(factory, functools.partial):
        factory = factory.func
    return factory


def name_of(factory: Callable[..., Any]) -> str:
    """Return the name of an optimizer class or a strategy, for errors."""
    found = class_of(factory)
    return getattr(found, "__name__", repr(found))


def is_elementwise(factory: OptimizerFactory, *, declared: bool = False) -> bool:
    """Tell whether tensors may be cut for this optimizer class, or ``functools.partial`` of one.

    True for the elementwise classes of torch.optim, for a class with an attribute ``elementwise = True``, and for
    anything that the user has declared so.
    """
    found = class_of(factory)
    return declared or found in ELEMENTWISE or getattr(found, "elementwise", False) is True


def check_shardable(factory: OptimizerFactory) -> None:
    """Raise a TypeError for an object that cannot be called, and a ValueError for LBFGS, which cannot be sharded."""
    found = class_of(factory)
    if not callable(found):
        raise TypeError(f"`optimizer_class` must be an optimizer class, but got {found!r}")
    if isinstance(found, type) and issubclass(found, optim.LBFGS):
        raise ValueError(
            f"{found.__name__} cannot be sharded: its direction and line search couple all parameters, so no rank can "
            f"step only its own share. Use it unsharded."
        )


def check_elementwise(factory: OptimizerFactory, partition: str, *, declared: bool) -> None:
    """Raise a ValueError for a partition that cuts tensors, unless :func:`is_elementwise`."""
    if not is_elementwise(factory, declared=declared):
        raise ValueError(
            f"partition={partition!r} cuts tensors, but {name_of(factory)} is not known to be elementwise: it may look "
            f"at a whole tensor to update one element. Use partition='whole', or pass elementwise=True if it is."
        )
