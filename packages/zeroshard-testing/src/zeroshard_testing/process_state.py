"""What a worker process carries from one test into the next unless it is put back. Runs in workers only.

docs/testing.md lists what is put back; the list there and this module belong together.
"""

from __future__ import annotations

import decimal
import gc
import locale
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

import torch

from zeroshard_testing.ipc import Message


class ProcessState:
    """Gives every test the controller's surroundings and the same fresh defaults.

    Args:
        defaults: Environment variables to set where the controller's environment does not.
    """

    def __init__(self, defaults: Mapping[str, str]) -> None:
        self._defaults = {"OMP_NUM_THREADS": "1", **defaults}
        self._environment: dict[str, str] = {}
        self._interpreter = _Interpreter()

    def restore_surroundings(self, message: Message) -> None:
        """Put back what imports see: environment, folder, import path.

        Args:
            message: A request to run a test: ``environment`` (None when it is the last one's), ``cwd``, ``sys_path``,
                ``nodeid``, ``rank``, ``world_size`` and ``master_port``.
        """
        if message["environment"] is not None:
            self._environment = {**self._defaults, **message["environment"]}
        rank, world_size = str(message["rank"]), str(message["world_size"])
        wanted = {
            **self._environment,
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": world_size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(message["master_port"]),
        }
        for name in os.environ.keys() - wanted.keys():
            del os.environ[name]
        for name, value in wanted.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        os.chdir(message["cwd"])
        if sys.path != message["sys_path"]:
            sys.path[:] = message["sys_path"]

    def restore_defaults(self) -> None:
        """Put back what imports may have changed, too: seeds, and defaults of Python and torch."""
        self._interpreter.restore()
        _restore_torch()
        _restore_random_state()


class _Interpreter:
    """Python's own settings, as they were when the worker came up."""

    def __init__(self) -> None:
        self._signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._umask = os.umask(0o022)
        os.umask(self._umask)
        self._recursion_limit = sys.getrecursionlimit()
        self._switch_interval = sys.getswitchinterval()
        self._collects = gc.isenabled()
        self._thresholds = gc.get_threshold()
        self._hooks = sys.excepthook, threading.excepthook, sys.displayhook
        self._streams = sys.stdout, sys.stderr, sys.stdin
        self._argv = list(sys.argv)
        self._locale = locale.setlocale(locale.LC_ALL)
        self._level = logging.getLogger().level
        self._disabled = logging.root.manager.disable
        self._decimals = decimal.getcontext().copy()

    def restore(self) -> None:
        for number, handler in self._signals.items():
            if signal.getsignal(number) is not handler and handler is not None:
                signal.signal(number, handler)
        os.umask(self._umask)
        sys.setrecursionlimit(self._recursion_limit)
        sys.setswitchinterval(self._switch_interval)
        if gc.isenabled() != self._collects:
            (gc.enable if self._collects else gc.disable)()
        gc.set_threshold(*self._thresholds)
        sys.excepthook, threading.excepthook, sys.displayhook = self._hooks
        sys.stdout, sys.stderr, sys.stdin = self._streams
        sys.argv[:] = self._argv
        if locale.setlocale(locale.LC_ALL) != self._locale:
            locale.setlocale(locale.LC_ALL, self._locale)
        logging.getLogger().setLevel(self._level)
        logging.disable(self._disabled)
        decimal.setcontext(self._decimals.copy())


def _restore_random_state() -> None:
    random.seed(0)
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        # An attribute that imports what it names, so that the first test of a worker is seeded too.
        numpy.random.seed(0)


def _restore_torch() -> None:
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    if torch.get_default_device() != torch.device("cpu"):
        torch.set_default_device(None)
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)
    for getter, setter, value in _TORCH_DEFAULTS:
        if getter() != value:
            setter(value)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = False
    torch.set_printoptions(profile="default")
    if torch.is_autocast_enabled("cpu"):
        torch.set_autocast_enabled("cpu", False)


_TORCH_DEFAULTS: tuple[tuple[Any, Any, Any], ...] = (
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, False),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, False),
    (torch.is_warn_always_enabled, torch.set_warn_always, False),
)
