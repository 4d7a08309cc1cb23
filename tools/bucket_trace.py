"""Counts the modules of this project that a training loop enters: in a plain step, and for a bucket with its step.

Run as ``python tools/bucket_trace.py``; ``--most 20`` gives an exit status of 1 if more modules are entered. Two
processes train a small model over gloo, and what rank 0 does in one iteration, after some others, is traced in all of
its threads:

- ``step``: ``optimizer.step()`` after a backward without a communication hook.
- ``bucket``: from the first call of ``reduce_to_owner_hook`` in a backward until ``step()`` has returned. DDP has one
  bucket, so every count is one of a bucket and its step.

A module is entered when one of its functions is called by code of another module; calls inside a module do not count. A
generator is entered each time it is resumed. Comprehensions belong to the function around them, and modules named
``_torch_private`` count as torch, whose attributes they name.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated

import torch
import typer
from bench.spawned import on_ranks
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_core import STRATEGIES
from zeroshard_integrations.ddp import register_reduce_to_owner

ROOT = Path(__file__).parents[1]
PACKAGES = frozenset(path.name for path in ROOT.glob("packages/*/src/*") if path.is_dir())
TRACED = ("step", "bucket")
TRANSPORTS = {"messages": "0", "memory": "1"}
"""Values of the environment variable for each; where memory cannot be read, the second is by messages too."""
_SWITCH = "ZEROSHARD_CROSS_MEMORY"
_ADAPTER = "_torch_private"
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
_LAYERS, _WIDTH, _ITERATIONS_BEFORE = 12, 64, 4


@dataclass(frozen=True)
class Entered:
    """A module, as one thread has entered it.

    Attributes:
        module: its name.
        thread: ``"main"``, ``"autograd"`` for threads that Python did not start, or ``"worker"`` for our own.
        functions: that were entered, in order of first entry, and how often.
    """

    module: str
    thread: str
    functions: dict[str, int]

    @property
    def times(self) -> int:
        """How often the thread has entered the module."""
        return sum(self.functions.values())


def main(
    most: Annotated[int | None, typer.Option(min=1, help="modules that may be entered")] = None,
    what: Annotated[list[str] | None, typer.Option(help=f"one or more of {', '.join(TRACED)}")] = None,
    transport: Annotated[list[str] | None, typer.Option(help=f"one or more of {', '.join(TRANSPORTS)}")] = None,
    partition: Annotated[str, typer.Option(help="of the optimizer: whole, split")] = "whole",
    json_file: Annotated[Path | None, typer.Option("--json", help="write what was found to this file")] = None,
) -> None:
    """Trace a step and a bucket, by both transports; the exit status is 1 if too many modules are entered."""
    wanted, transports = what or list(TRACED), transport or list(TRANSPORTS)
    for name, chosen, known in (("--what", wanted, TRACED), ("--transport", transports, tuple(TRANSPORTS))):
        if unknown := sorted(set(chosen) - set(known)):
            raise typer.BadParameter(f"no {', '.join(unknown)}; there are: {', '.join(known)}", param_hint=name)
    console = Console()
    found: list[dict[str, object]] = []
    counts: list[int] = []
    for one in wanted:
        for by in transports:
            entered = traced(one, by, partition)
            console.print(_table(f"{one}, by {by}, partition {partition!r}", entered))
            modules = len({each.module for each in entered})
            counts.append(modules)
            often = max(entered, key=lambda each: each.times)
            limit = "" if most is None else f", at most {most}"
            console.print(
                f"{modules} modules{limit}; most often entered: {often.module}, {often.times} times by {often.thread}",
                highlight=False,
            )
            listed = [{"module": each.module, "thread": each.thread, "functions": each.functions} for each in entered]
            found.append({"what": one, "transport": by, "partition": partition, "modules": modules, "entered": listed})
    if json_file is not None:
        json_file.write_text(json.dumps({"most": most, "traces": found}, indent=1), encoding="utf-8")
    raise typer.Exit(1 if most is not None and max(counts) > most else 0)


def traced(what: str, transport: str, partition: str = "whole") -> list[Entered]:
    """Train on two ranks, and return what rank 0 has entered, in order of first entry.

    Args:
        what: one of :data:`TRACED`.
        transport: one of :data:`TRANSPORTS`.
        partition: of the optimizer.
    """
    before = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = TRANSPORTS[transport]
    try:
        calls = on_ranks(_train, 2, what, partition)
    finally:
        del os.environ[_SWITCH]
        if before is not None:
            os.environ[_SWITCH] = before
    functions: dict[tuple[str, str], Counter[str]] = {}
    for module, thread, function in calls:
        functions.setdefault((module, thread), Counter())[function] += 1
    return [Entered(*key, dict(counts)) for key, counts in functions.items()]


@dataclass
class Trace:
    """A profile function, which any thread may call.

    Attributes:
        on: whether calls are counted.
        calls: module, thread and function of each call from another module.
    """

    on: bool = False
    calls: list[tuple[str, str, str]] = field(default_factory=list)

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Be told of an event, as a function handed to ``sys.setprofile`` is."""
        if not self.on or event != "call" or frame.f_code.co_name in _COMPREHENSIONS:
            return
        module = _module_of(frame)
        if module.partition(".")[0] not in PACKAGES or module.endswith(_ADAPTER):
            return
        if frame.f_back is None or _module_of(frame.f_back) != module:
            code = frame.f_code
            self.calls.append((module, _thread(), getattr(code, "co_qualname", code.co_name)))


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _thread() -> str:
    current = threading.current_thread()
    if current is threading.main_thread():
        return "main"
    # Not by name, which is ours to change.
    return "autograd" if isinstance(current, threading._DummyThread) else "worker"


def _train(what: str, partition: str) -> list[tuple[str, str, str]]:
    trace, has_hook = Trace(), what == "bucket"
    # Before anything is built, for it concerns only threads that are yet to start.
    threading.setprofile(trace)
    sys.setprofile(trace)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, partition=STRATEGIES[partition], lr=1e-3)
    if has_hook:
        register_reduce_to_owner(ddp, optimizer)
    for iteration in range(_ITERATIONS_BEFORE + 1):
        is_last = iteration == _ITERATIONS_BEFORE
        optimizer.zero_grad()
        loss = ddp(torch.ones(4, _WIDTH)).sum()
        trace.on = is_last and has_hook
        loss.backward()
        trace.on = is_last
        optimizer.step()
        trace.on = False
    sys.setprofile(None)
    threading.setprofile(None)
    return trace.calls


def _table(title: str, entered: list[Entered]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("module", no_wrap=True)
    table.add_column("thread")
    table.add_column("entered", justify="right")
    table.add_column("functions, and how often")
    for one in entered:
        functions = ", ".join(f"{name} {count}" for name, count in one.functions.items())
        table.add_row(one.module, one.thread, str(one.times), functions)
    return table


if __name__ == "__main__":
    typer.run(main)
