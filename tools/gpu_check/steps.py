"""Lists the steps in order of value, and the substitute for each on a machine without a GPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpu_check.sharing import ALSO_ON, ENVIRONMENT

ROOT = Path(__file__).parents[2]
"""The root of the checkout."""
Command = tuple[str, ...]


@dataclass(frozen=True)
class Substitute:
    """What runs instead of a step without a GPU, with the step's limit if it has none of its own."""

    name: str
    command: Command
    limit: float | None = None


@dataclass(frozen=True)
class Step:
    """One row of the table.

    Attributes:
        title: what the step shows.
        limit: seconds after which the step is ended.
        without_gpu: what runs without a GPU, or why nothing runs; None if the same command runs.
        environment: variables in addition to the driver's.
        after: names of steps that show whether this one can work. If one of them timed out, or nothing in it worked,
            this step is skipped.
    """

    name: str
    title: str
    limit: float
    command: Command
    without_gpu: Substitute | str | None
    environment: Mapping[str, str] = field(default_factory=dict)
    after: tuple[str, ...] = ()

    def on_cpu(self) -> Step | str:
        """Return the step that runs without a GPU, with a title that names the substitute, or why none runs."""
        if not isinstance(self.without_gpu, Substitute):
            return self.without_gpu or self
        title, limit = f"{self.title} ({self.without_gpu.name})", self.without_gpu.limit or self.limit
        return replace(self, title=title, command=self.without_gpu.command, limit=limit, without_gpu=None)


VERSIONS = Step("1", "versions", 80, (sys.executable, "-m", "gpu_check.machine"), None)
"""The first step. It tells whether there is a GPU."""
FULL = 480.0
"""Seconds in which 7c begins, if 2b and 3c take all of their limits below and the others half of theirs."""
NO_GPU = "none"
"""The value of `GPU` if there is none."""


def table(workers: int) -> list[Step]:
    """Return the steps after `VERSIONS`; so many tests run at a time, if pytest-xdist is installed."""
    gloo, nccl = ("--ranks-backend=gloo-cuda",), ("--ranks-backend=nccl",)
    emulated = _tests(workers, "--ranks-backend=emulated", "--ranks-timeout=60", "-m", _ALL, "-k", _PARITY, _HOOKS)
    title = "torch's sanitizer of streams, one of 2 ranks"
    streams = _measure("8a", title, 40, "iterations", 2, "fake", without_gpu="no GPU, and sanitizers look at CUDA")
    hooks = _tests(workers, *gloo, _HOOKS, "tests/step/test_master_weights.py")
    # Its extension may have to be compiled.
    on_emulated = Substitute("substitute: the emulated device", emulated, 180)
    all_tests, no_gpu = _tests(workers, *gloo, "tests"), "no GPU; `nox -s tests` runs these tests on the CPU"
    shared = _tests(1, *nccl, "-k", "2-nccl", _HOOKS, *_TRANSFERS)
    delayed, over_gloo = ("parity,waits", 2, "nccl"), "two ranks on one GPU over gloo"
    sanitized = ("compute-sanitizer", "--error-exitcode=9", *streams.command)
    return [
        Step("2a", f"{over_gloo}: hooks", 60, hooks, on_emulated),
        Step("3a", "NCCL at one rank: tests", 60, _tests(workers, *nccl, "-k", "1-nccl", "tests"), _NO_NCCL),
        _measure("3b", "two NCCL ranks share the GPU: delayed streams, host waits", 60, *delayed),
        _measure("4", "host waits at one rank: every hook, clipping, unscaling", 40, "waits", 1, "nccl"),
        _measure("2c", f"{over_gloo}: sharded gradients, memory and time", 40, "sharded", 2, "gloo", *_ONCE),
        # The two after these quick ones may take all of their time.
        Step("2b", f"{over_gloo}: tests of the CPU", 60, all_tests, no_gpu, {ALSO_ON: "gloo-cuda"}),
        Step("3c", "two NCCL ranks share the GPU: tests", 60, shared, _NO_NCCL, ENVIRONMENT, after=("3b",)),
        _measure("5a", "memory of a 1.3B model, one of 8 ranks", 40, "memory", 8, "fake", "--model=1.3B"),
        _measure("5b", "memory of a 1.3B model, one rank", 40, "memory", 1, "nccl", "--model=1.3B"),
        _measure("5c", "memory of GPT-2 124M, two ranks over gloo", 40, "memory", 2, "gloo"),
        _measure("6a", "time of GPT-2 124M, one rank", 40, "times", 1, "nccl"),
        _measure("6b", "time of GPT-2 124M, one of 8 ranks, without the exchange", 40, "times", 8, "fake"),
        _measure("6c", "time of GPT-2 124M, two ranks over gloo", 40, "times", 2, "gloo", *_ONCE),
        _measure("7a", "CUDA graph of step() at one rank", 30, "graph", 1, "nccl", **_GRAPH),
        _measure("7b", "CUDA graph of step(), two NCCL ranks", 40, "graph", 2, "nccl", after=("3b", "3c"), **_GRAPH),
        _measure("7c", "CUDA graph of step() over gloo: refused", 30, "graph", 2, "gloo", **_GRAPH),
        replace(streams, environment={"TORCH_CUDA_SANITIZER": "1"}),
        replace(streams, name="8b", title="compute-sanitizer, one of 2 ranks", limit=90, command=sanitized),
    ]


def pythonpath() -> str:
    """Return ``PYTHONPATH`` with the sources of the checkout in front, so that they need not be installed."""
    folders = [*sorted(ROOT.glob("packages/*/src")), ROOT / "tests", ROOT / "tools"]
    return ":".join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH", "")]))


def select(steps: Sequence[Step], names: Sequence[str]) -> list[Step]:
    """Return the steps with these names, or numbers such as ``"5"`` for 5a to 5c; all if there is no name."""
    known = {VERSIONS.name, *(step.name for step in steps)}
    chosen = {each for each in known if not names or each in names or each.rstrip("abc") in names}
    unknown = [name for name in names if name not in {*known, *(each.rstrip("abc") for each in known)}]
    if unknown:
        raise ValueError(f"no step {', '.join(unknown)}; there are: {', '.join(sorted(known))}")
    return [step for step in steps if step.name in chosen]


_HOOKS = "tests/emulated/test_ddp_on_accelerators.py"
_PARITY, _ALL = "test_parity and views", "exhaustive or not exhaustive"
_TRANSFERS = ("tests/comm/test_state_transfer.py", "tests/step/test_implementations.py")
_ONCE = ("--iterations=1", "--rounds=1")
_NO_NCCL = "no GPU, and NCCL needs one"
_GRAPH: Any = {"without_gpu": "no GPU, and the CPU has no CUDA graphs"}


def _measure(
    name: str, title: str, limit: float, what: str, ranks: int, backend: str, *options: str,
    without_gpu: str = "", after: tuple[str, ...] = (),
) -> Step:  # fmt: skip
    """Return a step of ``gpu_check.measure``; without a GPU it runs on the CPU, or not if `without_gpu` says why."""

    def on(chosen: str) -> Command:
        return (sys.executable, "-m", "gpu_check.measure", what, f"--ranks={ranks}", f"--backend={chosen}", *options)

    on_cpu = "gloo" if backend == "nccl" else backend
    substitute = without_gpu or Substitute(f"substitute: {on_cpu}, CPU, a tiny model", on(on_cpu))
    shared = ENVIRONMENT if backend == "nccl" and ranks > 1 else {}
    return Step(name, title, limit, on(backend), substitute, shared, after)


# Loaded once by the process that ranks are forked from.
_LOADED = ("torch._dynamo.compiled_autograd", "torch.distributed.optim", "zeroshard_integrations.ddp")


def _tests(workers: int, *arguments: str) -> Command:
    """Return a command that runs rank tests, and prints a line with the verdict of each."""
    plugins: list[str] = ["gpu_check.pytest_plugin", *_LOADED]
    try:
        # pytest finds the plugin of a package that is installed.
        importlib.metadata.version("zeroshard-testing")
    except importlib.metadata.PackageNotFoundError:
        plugins.append("zeroshard_testing.plugin")
    has_xdist = workers > 1 and importlib.util.find_spec("xdist") is not None
    at_a_time = [f"-n{workers}", "--dist=load"] if has_xdist else []
    loaded = [argument for plugin in ("no:cacheprovider", *plugins) for argument in ("-p", plugin)]
    start: Sequence[str] = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-rfEs", "--disable-warnings", *loaded]
    # A missing module must not keep the other files from running.
    # A test that hangs must leave time for the other tests of its step.
    return (*start, "--continue-on-collection-errors", *at_a_time, "--ranks-timeout=20", *arguments)
