"""Traces one of DDP's buckets from its communication hook to the updated parameters: which modules does it pass?

Run as ``python tools/bucket_trace.py``, with ``--most 10`` for an exit status of 1 if there are more. Two processes
train a small model over gloo. What is traced is an iteration after some others, on rank 0, in all threads, from the
call of the hook with that bucket until ``step()`` has returned.

A module of this project's packages is on the bucket's way if one of its functions is entered that holds the bucket. It
does if, by what it is called with (arguments, ``self`` and the variables that it closes over) and not more than two
attributes away from that, there is

- the bucket itself,
- a tensor in whose memory a byte of the bucket's buffer or of one of its parameters lies, such as a view or a shard, or
- an address of such a byte.

What a list, a dictionary or another builtin collection contains counts as the collection does; what a function closes
over, what a ``partial`` binds and the object of a bound method count as its attributes. So modules that are given
numbers, specifications or process groups alone, to count, compare or send them, do not hold it.

Functions that make or read a value do not count: constructors, what ``dataclass`` generates, and properties. Modules
named ``_torch_private`` count as torch, whose attributes they name. Comprehensions belong to the function around them,
and a generator is entered each time it goes on.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_core import STRATEGIES
from zeroshard_integrations.ddp import hook_with_zero_step, register_reduce_to_owner

# At the end, for modules beside the benchmarks are named as they please.
sys.path.append(str(Path(__file__).parent / "bench"))
from spawned import on_ranks

ROOT = Path(__file__).parents[1]
PACKAGES = frozenset(path.name for path in ROOT.glob("packages/*/src/*") if path.is_dir())
HOOKS = ("reduce_to_owner_hook", "hook_with_zero_step")
TRANSPORTS = {"messages": "0", "memory": "1"}
"""Values of the environment variable for each; where memory cannot be read, the second is by messages too."""
ATTRIBUTES = 2
_SWITCH = "ZEROSHARD_CROSS_MEMORY"
_ADAPTER = "_torch_private"
_MAKES_VALUES = frozenset({"__new__", "__init__", "__post_init__"})
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
_LAYERS, _WIDTH, _BUCKET_MEBIBYTES = 12, 256, 1
_TRACED_BUCKET = 1
_ITERATIONS_BEFORE = 4

Span = tuple[int, int]
"""First address, and the one after the last."""


@dataclass(frozen=True)
class Passed:
    """A module that the bucket passes.

    Attributes:
        module: its name.
        functions: that are entered with the bucket, in order of first entry, and how often.
    """

    module: str
    functions: dict[str, int]


def main(
    most: Annotated[int | None, typer.Option(min=1, help="modules that the bucket may pass")] = None,
    hook: Annotated[list[str] | None, typer.Option(help=f"one or more of {', '.join(HOOKS)}")] = None,
    transport: Annotated[list[str] | None, typer.Option(help=f"one or more of {', '.join(TRANSPORTS)}")] = None,
    partition: Annotated[str, typer.Option(help="of the optimizer: whole, split")] = "whole",
    json_file: Annotated[Path | None, typer.Option("--json", help="write what was found to this file")] = None,
) -> None:
    """Trace one bucket, by default of the first hook by both transports; the exit status is 1 if it passes too many."""
    hooks, transports = hook or [HOOKS[0]], transport or list(TRANSPORTS)
    for name, chosen, known in (("--hook", hooks, HOOKS), ("--transport", transports, tuple(TRANSPORTS))):
        if unknown := sorted(set(chosen) - set(known)):
            raise typer.BadParameter(f"no {', '.join(unknown)}; there are: {', '.join(known)}", param_hint=name)
    console = Console()
    found = []
    for one_hook in hooks:
        for one_transport in transports:
            passed = traced(one_hook, one_transport, partition)
            title = f"{one_hook}, by {one_transport}, partition {partition!r}"
            console.print(_table(title, passed))
            console.print(f"{len(passed)} modules" + ("" if most is None else f", at most {most}"), highlight=False)
            found.append(
                {
                    "hook": one_hook,
                    "transport": one_transport,
                    "partition": partition,
                    "modules": {one.module: one.functions for one in passed},
                }
            )
    if json_file is not None:
        json_file.write_text(json.dumps({"most": most, "traces": found}, indent=1), encoding="utf-8")
    raise typer.Exit(1 if most is not None and any(len(one["modules"]) > most for one in found) else 0)


def traced(hook: str, transport: str, partition: str = "whole") -> list[Passed]:
    """Train on two ranks, and return the modules that the bucket passes on rank 0, in order of first entry.

    Args:
        hook: one of :data:`HOOKS`.
        transport: one of :data:`TRANSPORTS`.
        partition: of the optimizer.
    """
    before = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = TRANSPORTS[transport]
    try:
        entered = on_ranks(_train, 2, hook, partition)
    finally:
        del os.environ[_SWITCH]
        if before is not None:
            os.environ[_SWITCH] = before
    functions: dict[str, Counter[str]] = {}
    for module, function in entered:
        functions.setdefault(module, Counter())[function] += 1
    return [Passed(module, dict(counts)) for module, counts in functions.items()]


@dataclass
class Trace:
    """What a profile function has seen of a bucket. Any thread may call it.

    Attributes:
        bucket: index of the bucket.
        on: whether calls are looked at.
        spans: memory of the bucket and of its parameters, once it has come.
        entered: module and function of each call that holds the bucket.
    """

    bucket: int
    on: bool = False
    spans: list[Span] = field(default_factory=list)
    entered: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Be told of an event, as a function handed to ``sys.setprofile`` is."""
        if not self.on or event != "call":
            return
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in PACKAGES or module.endswith(_ADAPTER) or not _counts(frame):
            return
        held = list(frame.f_locals.values())
        if not self.spans:
            self.spans = [
                span
                for value in held
                if isinstance(value, GradBucket) and value.index() == self.bucket
                for span in map(_span, (value.buffer(), *value.parameters()))
            ]
        if self.spans and holds(held, self.spans):
            code = frame.f_code
            self.entered.append((module, getattr(code, "co_qualname", code.co_name)))


def holds(values: Iterable[object], spans: Iterable[Span]) -> bool:
    """Tell whether memory is reached from values, over not more than two attributes.

    >>> tensor = torch.ones(8)
    >>> spans = [(tensor.data_ptr(), tensor.data_ptr() + 32)]
    >>> holds([{"shard": tensor[4:]}], spans), holds([tensor.clone()], spans)
    (True, False)

    Args:
        values: to begin with.
        spans: the memory.
    """
    spans = list(spans)
    seen: dict[int, object] = {}
    layer = list(_with_contents(values, seen))
    for _ in range(ATTRIBUTES):
        if any(_touches(item, spans) for item in layer):
            return True
        layer = list(_with_contents((value for item in layer for value in _attributes(item)), seen))
    return any(_touches(item, spans) for item in layer)


def _counts(frame: FrameType) -> bool:
    code = frame.f_code
    if code.co_name in _MAKES_VALUES | _COMPREHENSIONS or code.co_filename.startswith("<"):
        return False
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    return not isinstance(getattr(type(first), code.co_name, None), property | cached_property)


def _with_contents(values: Iterable[object], seen: dict[int, object]) -> Iterator[object]:
    """Yield values and what is in collections among them, each object once."""
    waiting = deque(values)
    while waiting:
        value = waiting.popleft()
        if id(value) in seen:
            continue
        # Kept, so that no other object gets its number.
        seen[id(value)] = value
        yield value
        # Copied at once: other threads go on.
        if isinstance(value, dict):
            waiting.extend([*value.keys(), *value.values()])
        elif isinstance(value, list | tuple | set | frozenset | deque | ctypes.Array):
            waiting.extend(list(value))


def _attributes(item: object) -> list[object]:
    if isinstance(item, type | ModuleType):
        return []
    if isinstance(item, FunctionType):
        # Of a cell that is empty yet, nothing.
        return [value for cell in item.__closure__ or () for value in gc.get_referents(cell)]
    if isinstance(item, MethodType):
        return [item.__self__, item.__func__]
    if isinstance(item, partial):
        return [item.func, item.args, item.keywords]
    if isinstance(item, ctypes.Structure):
        return [getattr(item, entry[0]) for entry in item._fields_]
    found = list(getattr(item, "__dict__", {}).values())
    for kind in type(item).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        found += [getattr(item, name, None) for name in ([slots] if isinstance(slots, str) else slots)]
    return found


def _touches(item: object, spans: list[Span]) -> bool:
    if isinstance(item, torch.Tensor):
        begin, end = _span(item)
        return any(begin < last and first < end for first, last in spans)
    if isinstance(item, GradBucket):
        return _touches(item.buffer(), spans)
    return isinstance(item, int) and any(first <= item < last for first, last in spans)


def _span(tensor: torch.Tensor) -> Span:
    """Return the memory between a tensor's first element and its last one; of a tensor without memory, none."""
    # A tensor may be of a class that refuses to be looked at.
    with torch._C.DisableTorchFunctionSubclass():
        try:
            begin = tensor.data_ptr()
        except RuntimeError:
            return 0, 0
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return begin, begin + (reach + 1) * tensor.element_size() if begin and tensor.numel() else begin


def _train(hook: str, partition: str) -> list[tuple[str, str]]:
    trace = Trace(_TRACED_BUCKET)
    # Before anything is built, for it concerns only threads that are yet to start.
    threading.setprofile(trace)
    sys.setprofile(trace)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=_BUCKET_MEBIBYTES, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=hook != HOOKS[0], partition=STRATEGIES[partition], lr=1e-3
    )
    if hook == HOOKS[0]:
        register_reduce_to_owner(ddp, optimizer)
    else:
        ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, optimizer))
    for iteration in range(_ITERATIONS_BEFORE + 1):
        trace.on = iteration == _ITERATIONS_BEFORE
        optimizer.zero_grad()
        ddp(torch.ones(4, _WIDTH) * (1 + dist.get_rank())).sum().backward()
        optimizer.step()
    trace.on = False
    sys.setprofile(None)
    threading.setprofile(None)
    if not trace.spans:
        raise RuntimeError(f"DDP has no bucket {_TRACED_BUCKET}: nothing was traced")
    return trace.entered


def _table(title: str, passed: list[Passed]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("", justify="right")
    table.add_column("module", no_wrap=True)
    table.add_column("functions, and how often each is entered")
    for number, one in enumerate(passed, 1):
        table.add_row(str(number), one.module, ", ".join(f"{name} {count}" for name, count in one.functions.items()))
    return table


if __name__ == "__main__":
    typer.run(main)
