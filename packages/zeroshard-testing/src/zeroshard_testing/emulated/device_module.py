"""Registers the device and the module ``torch.emu``, which has the functions that torch calls in ``torch.cuda``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch

from zeroshard_testing._torch_private import register_device_module

_GRAPHS = ("CUDAGraph", "Graph", "graph", "graphs", "make_graphed_callables", "graph_pool_handle")


def register_device(name: str, install: Callable[[], None]) -> None:
    """Register the device with torch under a name, once in a process."""
    torch.utils.rename_privateuse1_backend(name)  # type: ignore[attr-defined]  # not explicit exports
    install()
    register_device_module(name, _module(name))
    torch.utils.generate_methods_for_privateuse1_backend()  # type: ignore[attr-defined]


def _module(name: str) -> ModuleType:
    module = ModuleType(f"torch.{name}")
    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _lazy_init=_nothing,
        _is_in_bad_fork=lambda: False,
        # There is one device, which is always current.
        device=lambda _: nullcontext(),
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=_nothing,
        get_device_name=lambda _=None: "emulated accelerator",
        synchronize=lambda _=None: torch.accelerator.synchronize(),
        Stream=lambda _=None, priority=0: torch.Stream(device=name, priority=priority),
        Event=lambda enable_timing=False, **_: torch.Event(device=name, enable_timing=enable_timing),
        stream=_as_current,
        current_stream=lambda _=None: torch.accelerator.current_stream(),
        set_stream=torch.accelerator.set_stream,
        # The generator is the CPU's.
        manual_seed=_nothing,
        manual_seed_all=_nothing,
        get_rng_state=lambda _=None: torch.get_rng_state(),
        set_rng_state=lambda state, _=None: torch.set_rng_state(state),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        is_bf16_supported=lambda: True,
        empty_cache=_nothing,
        __getattr__=lambda attribute: _refuse(name, attribute),
    )
    return module


def _nothing(*_: object) -> None:
    pass


def _as_current(stream: Any) -> AbstractContextManager[Any]:  # noqa: ANN401 - a stream, or None for the current one
    return nullcontext() if stream is None else stream


def _refuse(name: str, attribute: str) -> Any:  # noqa: ANN401 - never returns
    if attribute in _GRAPHS:
        raise NotImplementedError(f"torch.{name}.{attribute}: the emulated accelerator has no graphs of kernels")
    raise AttributeError(f"module 'torch.{name}' has no attribute {attribute!r}")
