"""Lets methods of an optimizer class, such as Sophia's ``update_hessian``, see this rank's shards."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

from torch import optim


def show_shards_to_methods(inner: optim.Optimizer, shown: Callable[[], AbstractContextManager[None]]) -> None:
    """Make the public methods that the class of ``inner`` adds to torch's run within ``shown()``, a bound method."""
    kind, context = type(inner), weakref.WeakMethod(shown)
    for name in dir(kind):
        method = inspect.getattr_static(kind, name)
        if isinstance(method, FunctionType) and not name.startswith("_") and not hasattr(optim.Optimizer, name):
            setattr(inner, name, _within(context, weakref.ref(inner), method))


def _within(
    context: weakref.WeakMethod[Callable[[], AbstractContextManager[None]]],
    reference: weakref.ref[optim.Optimizer],
    method: FunctionType,
) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401 - of any method
        inner, shown = reference(), context()
        if shown is None:
            return method(inner, *arguments, **keywords)
        with shown():
            return method(inner, *arguments, **keywords)

    return call


def weakly(method: Callable[[], None]) -> Callable[..., None]:
    """Return a hook that calls a method of an object that it does not keep alive."""
    reference = weakref.WeakMethod(method)

    def hook(*_: object) -> None:
        found = reference()
        if found is not None:
            found()

    return hook
