"""The fixtures of a rank test, as each rank's pytest has them. Registered in workers only."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zeroshard_testing.faults import Faults
from zeroshard_testing.marker import SPEC_FIXTURE


@dataclass
class RankValues:
    """What the fixtures of the current test give; the worker's main thread sets it before each test."""

    rank: int = 0
    world_size: int = 0
    device: torch.device | None = None
    process_group: dist.ProcessGroup | None = None
    faults: Faults | None = None
    tmp_path: Path = Path()


_current = RankValues()


def set_rank_values(values: RankValues) -> None:
    """Say what the fixtures give from now on."""
    vars(_current).update(vars(values))


@pytest.fixture(name=SPEC_FIXTURE)
def _ranks_spec(request: pytest.FixtureRequest) -> object:
    return request.param


@pytest.fixture(scope="session")
def world_size() -> int:
    """Number of ranks. A worker never changes it, nor its rank or device."""
    return _current.world_size


@pytest.fixture(scope="session")
def rank() -> int:
    """This process's rank in the default process group."""
    return _current.rank


@pytest.fixture(scope="session")
def device() -> torch.device | None:
    """The `torch.device` that the backend communicates on: the CPU, or this rank's CUDA device."""
    return _current.device


@pytest.fixture
def process_group() -> dist.ProcessGroup | None:
    """The default process group, initialised for this test; None with ``init=False``."""
    return _current.process_group


@pytest.fixture
def faults() -> Faults | None:
    """The faults that this test asks for."""
    return _current.faults


@pytest.fixture
def device_costs(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """A function that counts what a block costs on the device: see `zeroshard_testing.emulated.costs`."""
    from zeroshard_testing.emulated import costs

    return partial(costs.device_costs, device)


@pytest.fixture
def host_never_waits(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """A function that raises where the host waits for the device within a block."""
    from zeroshard_testing.emulated import costs

    return partial(costs.host_never_waits, device)


@pytest.fixture
def tmp_path() -> Path:
    """A temporary folder, the same one on all ranks of the test."""
    # Made by the rank that comes first.
    _current.tmp_path.mkdir(parents=True, exist_ok=True)
    return _current.tmp_path


@pytest.fixture
def ranks_tmp_path(tmp_path: Path) -> Path:
    """The same as ``tmp_path``, by a name that says so."""
    return tmp_path
