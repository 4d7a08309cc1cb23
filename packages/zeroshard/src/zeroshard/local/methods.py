"""Lets methods of an optimizer class, such as Sophia's ``update_hessian``, see this rank's shards."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

from torch import optim

Context = Callable[[], AbstractContextManager[None]]


def show_shards_to_methods(inner: optim.Optimizer, exchanged: Context, shown: Context) -> set[str]:
    """Make methods of an optimizer run within a context, a bound method of another object. Return their names.

    ``state_dict()`` runs within ``exchanged``, because scripts for torch's class save this rank's shards with it.
    Public methods that the class adds run within ``shown``, except generators, whose bodies run later.
    """
    kind, names = type(inner), {"state_dict"}
    vars(inner)["state_dict"] = _within(weakref.WeakMethod(exchanged), weakref.ref(inner), kind.state_dict)
    for name in dir(kind):
        method = inspect.getattr_static(kind, name)
        is_added = not name.startswith("_") and not hasattr(optim.Optimizer, name)
        if is_added and isinstance(method, FunctionType) and not inspect.isgeneratorfunction(inspect.unwrap(method)):
            vars(inner)[name] = _within(weakref.WeakMethod(shown), weakref.ref(inner), method)
            names.add(name)
    return names


def _within(
    context: weakref.WeakMethod[Context],
    reference: weakref.ref[optim.Optimizer],
    method: Callable[..., Any],
) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401 - of any method
        inner, shown = reference(), context()
        if shown is None:
            return method(inner, *arguments, **keywords)
        with shown():
            return method(inner, *arguments, **keywords)

    return call
