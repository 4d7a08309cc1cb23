"""Letting parameters arrive during the next forward: each module waits for its own, everything else for all."""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from zeroshard import BackwardFollower
from zeroshard_comm import PeerLostError

_waits: weakref.WeakKeyDictionary[nn.Module, ForwardWaits] = weakref.WeakKeyDictionary()


class ForwardWaits:
    """Waits, before parameters of a model are read, until they have arrived.

    - A module waits for its own parameters when it is called. A parameter whose module was not called in the forward
      before (the model reads it itself, as with tied weights) is waited for when the model is called.
    - ``state_dict()``, ``parameters()``, ``named_parameters()``, ``train()`` and ``eval()``, copying and pickling, of
      the model and of its DDP wrapper, and the step of any optimizer wait for all.

    What reads ``module.weight`` itself outside of a forward must call :meth:`settle` first.

    Args:
        ddp: the model.
        follower: of its optimizer's backwards.
    """

    def __init__(self, ddp: DistributedDataParallel, follower: BackwardFollower) -> None:
        self._follower = follower
        self._called: set[nn.Module] = set()
        self._calling: set[nn.Module] = set()
        self._holders = {
            module: list(module.parameters(recurse=False))
            for module in ddp.module.modules()
            if next(module.parameters(recurse=False), None) is not None
        }
        for module in self._holders:
            module.register_forward_pre_hook(_Call(self._before_module))
        for module in ddp.modules():
            module.register_state_dict_pre_hook(_Call(self._before_reading))
            module.register_load_state_dict_pre_hook(_Call(self._before_reading))
        ddp.register_forward_pre_hook(_Call(self._before_model))
        for module in (ddp, ddp.module):
            _waits[module] = self
            module.__class__ = _waiting_class(type(module))
        self_of = weakref.ref(self)

        def before_any_step(optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG001 - torch's signature
            waits = self_of()
            if waits is not None:
                waits.settle()

        self._handle = register_optimizer_step_pre_hook(before_any_step)
        weakref.finalize(self, self._handle.remove)
        # Also when the process ends: the others need what this rank has stepped, though it waits for nothing itself.
        weakref.finalize(self, _deliver, follower)
        follower.defer()

    def settle(self) -> None:
        """Wait for all parameters; a no-op if nothing is arriving.

        Raises:
            PeerLostError: if a rank is gone.
            Exception: what a rank has met in its step.
        """
        if self._follower.arriving:
            self._follower.settle()

    def _before_model(self, module: nn.Module, inputs: object) -> None:  # noqa: ARG002 - torch's signature
        self._called, self._calling = self._calling, set()
        if self._follower.arriving:
            self._follower.wait_for(
                [param for holder, params in self._holders.items() if holder not in self._called for param in params]
            )

    def _before_module(self, module: nn.Module, inputs: object) -> None:  # noqa: ARG002 - torch's signature
        self._calling.add(module)
        if self._follower.arriving:
            self._follower.wait_for(self._holders[module])

    def _before_reading(self, *_: object) -> None:
        self.settle()


def _deliver(follower: BackwardFollower) -> None:
    """Finish what is on its way, for a model that nobody uses any more; a peer that is gone needs nothing."""
    with suppress(PeerLostError):
        if follower.arriving:
            follower.settle()


class _Call:
    """A hook of a module, that does nothing in copies of the module."""

    def __init__(self, method: Callable[..., None] | None = None) -> None:
        self._method = method

    def __call__(self, *arguments: object) -> None:
        if self._method is not None:
            self._method(*arguments)

    def __reduce__(self) -> tuple[type[_Call], tuple[()]]:
        return _Call, ()


class _Waiting(nn.Module):
    """Waits for all parameters before they are read; put in front of the classes of a model and its wrapper."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:  # noqa: ANN401
        _settle(self)
        return super().named_parameters(*args, **kwargs)

    def train(self, mode: bool = True) -> Any:  # noqa: ANN401 - the module itself
        _settle(self)
        return super().train(mode)

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401 - as in object
        """Copy and pickle as the class that it was."""
        _settle(self)
        reduced: Any = super().__reduce_ex__(protocol)
        # The standard library's way to make an object of a class without calling it, whatever __new__ was to be used.
        make = copyreg._reconstructor  # type: ignore[attr-defined] # every pickle of protocol 1 names it
        return make, (_plain_class(type(self)), object, None), *reduced[2:]


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _waiting_class(kind: type[nn.Module]) -> type[nn.Module]:
    if issubclass(kind, _Waiting):
        return kind
    if kind not in _classes:
        namespace: Mapping[str, Any] = {"__module__": kind.__module__, "__doc__": kind.__doc__}
        _classes[kind] = type(kind.__name__, (_Waiting, kind), dict(namespace))
    return _classes[kind]


def _plain_class(kind: type[nn.Module]) -> type[nn.Module]:
    return next(plain for plain, waiting in _classes.items() if waiting is kind)


def _settle(module: nn.Module) -> None:
    waits = _waits.get(module)
    if waits is not None:
        waits.settle()
