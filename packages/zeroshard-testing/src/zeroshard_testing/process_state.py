"""What a worker process carries from one test into the next unless it is put back. Runs in workers only."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Mapping

import torch

from zeroshard_testing.wire import Message


class ProcessState:
    """Gives every test the controller's surroundings and the same fresh defaults.

    Args:
        defaults: Environment variables to set where the controller's environment does not.
    """

    def __init__(self, defaults: Mapping[str, str]) -> None:
        self._defaults = {"OMP_NUM_THREADS": "1", **defaults}
        self._environment: dict[str, str] = {}

    def restore(self, message: Message) -> None:
        """Put back environment, folder, import path, random seeds and torch's defaults.

        Args:
            message: A request to run a test: ``environment`` (None when it is the last one's), ``cwd``, ``sys_path``,
                ``name``, ``rank`` and ``world_size``.
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
            "PYTEST_CURRENT_TEST": message["nodeid"],
        }
        _change_environment(wanted)
        os.chdir(message["cwd"])
        if sys.path != message["sys_path"]:
            sys.path[:] = message["sys_path"]
        _restore_random_state()
        _restore_torch_defaults()


def _change_environment(wanted: Mapping[str, str]) -> None:
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _restore_random_state() -> None:
    random.seed(0)
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(0)


def _restore_torch_defaults() -> None:
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    if torch.get_default_device() != torch.device("cpu"):
        torch.set_default_device(None)
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)
