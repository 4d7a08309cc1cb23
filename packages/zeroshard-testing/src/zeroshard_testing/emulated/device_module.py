"""The module ``torch.emu``, which torch asks for what it asks ``torch.cuda``, and the registration of the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType, TracebackType
from typing import Any

import torch

from zeroshard_testing._torch_private import register_device_module

_NOT_EMULATED = ("CUDAGraph", "Graph", "graph", "graphs", "make_graphed_callables", "graph_pool_handle")


class device:  # noqa: N801 - torch's name
    """Makes a device the current one: there is one."""

    def __init__(self, device: object) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass


def register_device(name: str, install: Callable[[], None]) -> None:
    """Make the device known to torch under a name, once in a process."""
    torch.utils.rename_privateuse1_backend(name)
    install()
    register_device_module(name, _module(name))
    torch.utils.generate_methods_for_privateuse1_backend()


def _module(name: str) -> ModuleType:
    module = ModuleType(f"torch.{name}")
    module.__dict__.update(
        device=device,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _lazy_init=lambda: None,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        get_device_name=lambda device=None: "emulated accelerator",
        synchronize=lambda device=None: torch.accelerator.synchronize(),
        Stream=_stream,
        Event=_event,
        stream=_as_current,
        current_stream=lambda device=None: torch.accelerator.current_stream(),
        default_stream=lambda device=None: torch.Stream(device=name, stream_id=0, device_index=0, device_type=20),
        set_stream=lambda stream: torch.accelerator.set_stream(stream),
        # The generator is the CPU's.
        manual_seed=lambda seed: None,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        is_bf16_supported=lambda: True,
        empty_cache=lambda: None,
        __getattr__=lambda attribute: _refuse(name, attribute),
    )
    return module


def _stream(device: object = None, priority: int = 0) -> torch.Stream:
    return torch.Stream(device="emu", priority=priority)


def _event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    return torch.Event(device="emu", enable_timing=enable_timing)


def _as_current(stream: Any) -> AbstractContextManager[Any]:  # noqa: ANN401 - a stream, or None for the current one
    return torch.accelerator.current_stream() if stream is None else stream  # type: ignore[no-any-return]


def _refuse(name: str, attribute: str) -> Any:  # noqa: ANN401 - never returns
    if attribute in _NOT_EMULATED:
        raise NotImplementedError(f"torch.{name}.{attribute}: the emulated accelerator has no graphs of kernels")
    raise AttributeError(f"module 'torch.{name}' has no attribute {attribute!r}")
