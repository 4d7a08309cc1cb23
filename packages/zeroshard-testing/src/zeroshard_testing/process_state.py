"""Restores the state of a worker process that one test could leave to the next. Runs in workers only.

docs/testing.md lists this state; keep the list equal to this module.
"""

from __future__ import annotations

import decimal
import gc
import locale
import logging
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

# Type checkers do not see that torch exports these.
from torch.distributed import distributed_c10d, get_debug_level, set_debug_level  # type: ignore[attr-defined]

from zeroshard_testing._torch_private import module_hooks
from zeroshard_testing.ipc import Message


class ProcessState:
    """Gives every test the environment of the controller and the same defaults.

    Python's own settings are restored to their values at construction.
    """

    def __init__(self) -> None:
        # Values that fixtures of a wider scope than one test have set, by setting.
        self._held: dict[Any, dict[Any, Any]] = {}
        handlers = (_accessors(signal.getsignal, signal.signal, number) for number in signal.valid_signals())
        # A signal handler that C has installed reads as None, and cannot be restored.
        python = [*_PYTHON_SETTINGS, *(handler for handler in handlers if handler[0]() is not None)]
        if numpy := sys.modules.get("numpy"):
            python += [(numpy.geterr, lambda errors: numpy.seterr(**errors))]
            python += [(numpy.get_printoptions, lambda options: numpy.set_printoptions(**options))]
        self._settings = [*((read, write, read()) for read, write in python), *_TORCH_DEFAULTS]

    def restore_surroundings(self, message: Message) -> None:
        """Stop timers, and restore the environment, the working directory and the import path, which imports read."""
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        held = self._held_now()
        wanted = {
            **_ENVIRONMENT,
            **message["environment"],
            **dict.fromkeys(("RANK", "LOCAL_RANK"), str(message["rank"])),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(message["world_size"])),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(message["master_port"]),
            **{key[1]: value for key, value in held.items() if isinstance(key, tuple)},
        }
        wanted = {name: value for name, value in wanted.items() if value is not None}
        for name in os.environ.keys() - wanted.keys():
            del os.environ[name]
        os.environ.update(wanted.items() - os.environ.items())
        now = {"cwd": message["cwd"], "sys.path": message["sys_path"], **held}
        os.chdir(now["cwd"])
        sys.path[:] = now["sys.path"]

    def restore_defaults(self) -> None:
        """Restore settings that imports may have changed too: seeds, and defaults of Python and torch."""
        held = self._held_now()
        for place, (read, write, default) in enumerate(self._settings):
            value = held.get(place, default)
            if read() != value:
                write(value)
        torch.set_printoptions(profile="default")
        random.seed(0)
        torch.default_generator.manual_seed(0)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)
        if numpy := sys.modules.get("numpy"):
            # Accessing the attribute imports the module, so that the first test of a worker is seeded too.
            numpy.random.seed(0)

    def seen(self) -> dict[Any, Any]:
        """Return the current values of all settings that are restored, except seeds and print options."""
        environment = {("environment", name): value for name, value in os.environ.items()}
        settings = {place: read() for place, (read, _, _) in enumerate(self._settings)}
        return {**environment, **settings, "cwd": os.getcwd(), "sys.path": list(sys.path)}  # noqa: PTH109 - a string

    def hold(self, before: Mapping[Any, Any]) -> Callable[[], object]:
        """Keep the changes since `seen` returned ``before`` in later tests, until the returned function is called."""
        now, holder = self.seen(), object()
        changed = [key for key in before.keys() | now.keys() if before.get(key) != now.get(key)]
        self._held[holder] = {key: now.get(key) for key in changed}
        return partial(self._held.pop, holder)

    def _held_now(self) -> dict[Any, Any]:
        return {key: value for changed in self._held.values() for key, value in changed.items()}


_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # The flight recorder keeps the latest collectives.
    "TORCH_FR_BUFFER_SIZE": "256",
    # NCCL lets ranks share a GPU if it can.
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    # Gloo binds to the loopback interface, which needs no name lookup and passes firewalls.
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
}
"""Environment variables of workers for torch. Values of the user take precedence."""


def _accessors(read: Callable[..., Any], write: Callable[..., Any], *target: object) -> tuple[Any, Any]:
    """Return a function that reads, and one that writes, a setting such as an attribute of an object."""
    return partial(read, *target), partial(write, *target)


def _set_default_device(device: torch.device) -> None:
    # None means the CPU, without a mode that intercepts every call.
    torch.set_default_device(None if device == torch.device("cpu") else device)


def _set_module_hooks(there: bool) -> None:
    for hooks in () if there else module_hooks():
        hooks.clear()


def _umask() -> int:
    found = os.umask(0o022)
    os.umask(found)
    return found


_PYTHON_SETTINGS: tuple[tuple[Any, Any], ...] = (
    (_umask, os.umask),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (sys.getswitchinterval, sys.setswitchinterval),
    (gc.isenabled, lambda collects: gc.enable() if collects else gc.disable()),
    (gc.get_threshold, lambda thresholds: gc.set_threshold(*thresholds)),
    _accessors(locale.setlocale, locale.setlocale, locale.LC_ALL),
    (logging.getLogger().getEffectiveLevel, logging.getLogger().setLevel),
    (lambda: logging.root.manager.disable, logging.disable),
    # Contexts are never equal, so that each test gets a copy of its own.
    (lambda: decimal.getcontext().copy(), lambda context: decimal.setcontext(context.copy())),
    _accessors(getattr, setattr, sys, "excepthook"),
    _accessors(getattr, setattr, sys, "displayhook"),
    (sys.getprofile, sys.setprofile),
    (threading.getprofile, threading.setprofile),
    (socket.getdefaulttimeout, socket.setdefaulttimeout),
    _accessors(getattr, setattr, threading, "excepthook"),
    _accessors(getattr, setattr, sys, "stdout"),
    _accessors(getattr, setattr, sys, "stderr"),
    _accessors(getattr, setattr, sys, "stdin"),
    (lambda: list(sys.argv), lambda arguments: sys.argv.__setitem__(slice(None), arguments)),
)

_TORCH_DEFAULTS: tuple[tuple[Any, Any, Any], ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled, True),
    (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    (torch.get_default_device, _set_default_device, torch.device("cpu")),
    (torch.get_num_threads, torch.set_num_threads, 1),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, False),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, False),
    (get_debug_level, set_debug_level, get_debug_level()),
    (torch.is_warn_always_enabled, torch.set_warn_always, False),
    (*_accessors(torch.is_autocast_enabled, torch.set_autocast_enabled, "cpu"), False),
    (*_accessors(torch.get_autocast_dtype, torch.set_autocast_dtype, "cpu"), torch.bfloat16),
    (*_accessors(getattr, setattr, distributed_c10d, "default_pg_timeout"), distributed_c10d.default_pg_timeout),
    (*_accessors(getattr, setattr, torch.utils.deterministic, "fill_uninitialized_memory"), True),
    # torch has no function that returns it; Python's own floats are flushed, too.
    (lambda: sys.float_info.min / 2 == 0, torch.set_flush_denormal, False),
    (lambda: any(module_hooks()), _set_module_hooks, any(module_hooks())),
    (*_accessors(getattr, setattr, torch.backends.cudnn, "benchmark"), False),
    (*_accessors(getattr, setattr, torch.backends.cudnn, "deterministic"), False),
)
