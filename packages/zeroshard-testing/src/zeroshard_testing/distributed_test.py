"""The base class of DeepSpeed's own tests: `from zeroshard_testing.distributed_test import DistributedTest`.

A class that derives from it runs unchanged: each ``test*`` method on every rank, as if marked with ``ranks``, and once
for each world size. Fixtures run on each rank; `class_tmpdir` and ``tmpdir`` are shared by all ranks.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, ClassVar

import pytest

# DeepSpeed keeps values of a process group, which are wrong for the process group of the next test.
_STATE_OF_A_GROUP = ("deepspeed.comm.comm", "deepspeed.utils.groups")
_LAUNCHER = {"run", "_dist_run", "_launch_procs", "_launch_daemonic_procs", "_launch_non_daemonic_procs"}


class DistributedTest:
    """Base class of tests that run on ranks; ``@pytest.mark.world_size(n)`` on a method goes before `world_size`.

    It has the attributes of DeepSpeed's class. A `backend` of None is ``"nccl"`` if CUDA is available, otherwise
    ``"gloo"``; `exec_timeout` is in seconds; `requires_cuda_env` is False by default. `reuse_dist_env` and
    `non_daemonic_procs` have no effect: workers are always kept, and may start processes.
    """

    world_size: int | Sequence[int] = 2
    backend: str | None = None
    init_distributed = True
    set_dist_env = True
    requires_cuda_env = False
    exec_timeout = float(os.environ.get("DS_UNITTEST_TIMEOUT", "600"))
    reuse_dist_env = False
    non_daemonic_procs = False
    _pool_cache: ClassVar[dict[int, object]] = {}  # DeepSpeed's conftest.py closes what is in it

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if own := sorted(_LAUNCHER & set(vars(cls))):
            raise TypeError(f"{cls.__name__}.{own[0]}: how ranks are started cannot be overridden; remove the method")
        for name, test in inspect.getmembers(cls, inspect.isfunction):
            if name.startswith("test"):
                setattr(cls, name, _marked(getattr(test, "_unmarked", test), cls))

    @pytest.fixture
    def class_tmpdir(self, tmpdir: Any) -> Any:  # noqa: ANN401 - a py.path.local, which pytest keeps to itself
        """One folder for all tests and ranks of the class, a ``py.path.local``."""
        return tmpdir.dirpath(f"{type(self).__module__}.{type(self).__qualname__}").ensure(dir=True)

    @pytest.fixture(autouse=True)
    def _environment(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Run the test on the rank as DeepSpeed's class does."""
        size = os.environ["WORLD_SIZE"]
        if "world_size" in request.fixturenames and str(request.getfixturevalue("world_size")) != size:
            pytest.fail("a DistributedTest takes its world sizes from @pytest.mark.world_size([2, 4]) only", False)
        if self.requires_cuda_env and not _cuda():
            pytest.skip("this test needs CUDA")
        monkeypatch.setenv("LOCAL_SIZE", size)
        for name in () if self.set_dist_env else ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        modules = [sys.modules[name] for name in _STATE_OF_A_GROUP if name in sys.modules]
        before = [_copied(module) for module in modules]
        if modules and self.init_distributed:
            sys.modules["deepspeed.comm"].init_distributed(self.backend)
        yield
        for module, state in zip(modules, before, strict=True):
            vars(module).update(state)


class DistributedFixture:
    """Raise, because ordinary fixtures run on each rank, with the world size of the test."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        text = "is not supported: use a rank_fixture, or call run_on_ranks(fn, n) for each number of ranks"
        raise TypeError(f"{cls.__name__}: DistributedFixture {text}")


def _marked(test: Callable[..., Any], cls: type[DistributedTest]) -> Callable[..., Any]:
    """Return a copy of the test with a ``ranks`` mark. Another class may inherit the test with another world size."""

    @functools.wraps(test)
    def on_ranks(*args: object, **kwargs: object) -> object:
        __tracebackhide__ = True
        return test(*args, **kwargs)

    marks = {mark.name: mark for mark in reversed(getattr(test, "pytestmark", []))}
    if "ranks" in marks:
        return test
    sizes = marks["world_size"].args[0] if "world_size" in marks else cls.world_size
    backend = cls.backend or ("nccl" if _cuda() else "gloo")
    options = {"backend": backend, "timeout": cls.exec_timeout, "init": cls.init_distributed}
    on_ranks._unmarked = test  # type: ignore[attr-defined]  # on a function
    pytest.mark.ranks(*([sizes] if isinstance(sizes, int) else sizes), **options)(on_ranks)
    return on_ranks


def _copied(module: ModuleType) -> dict[str, object]:
    values = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    return {name: copy.copy(value) if isinstance(value, (dict, list)) else value for name, value in values.items()}


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()
