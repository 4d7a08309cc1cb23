"""The fixtures of rank tests, for the pytest of each rank. Registered in workers only."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from zeroshard_testing.marker import SPEC_FIXTURE

_current: dict[str, Any] = {}


def set_rank_values(**values: object) -> None:
    """Set the values of fixtures, by name. The worker's main thread calls it before each test."""
    _current.clear()
    _current.update(values)


def rank_and_world_size() -> tuple[int, int]:
    """Return values of the fixtures of the current test, even if it makes no process group."""
    if not _current:
        raise RuntimeError("this process is not a rank: it has no process group, and runs no test on ranks")
    return _current["rank"], _current["world_size"]


def _given(name: str, scope: Any = "function") -> Any:  # noqa: ANN401 - pytest's fixture object, whose type is private
    return pytest.fixture(lambda: _current[name], name=name, scope=scope)


def _counted(name: str) -> Any:  # noqa: ANN401 - a fixture object of pytest
    def fixture(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
        from zeroshard_testing.emulated import costs

        return partial(getattr(costs, name), device)

    return pytest.fixture(fixture, name=name)


# These values never change in a worker.
rank, world_size, device = (_given(name, "session") for name in ("rank", "world_size", "device"))
process_group, faults = _given("process_group"), _given("faults")
device_costs, host_never_waits = _counted("device_costs"), _counted("host_never_waits")


@pytest.fixture(name=SPEC_FIXTURE)
def _ranks_spec(request: pytest.FixtureRequest) -> object:
    return request.param


@pytest.fixture
def tmp_path() -> Path:
    """A temporary folder that all ranks of the test share."""
    # The first rank makes it.
    path: Path = _current["tmp_path"]
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture
def ranks_tmp_path(tmp_path: Path) -> Path:
    """The same folder as ``tmp_path``, under a name that says that ranks share it."""
    return tmp_path
