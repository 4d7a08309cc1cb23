"""Processor time of ``step()``, and of an iteration with a hook, beside another checkout: ``--before FOLDER``.

The ranks of both checkouts live on this machine all the time, and take turns: while those of one work, the others wait
for a line on standard input. So turns may be as short as a few steps, and drift of the machine cancels out. The time of
a turn is the processor time of all threads of a rank, on the mean over the ranks.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
import zeroshard
from contest import Times, compared
from rich.console import Console
from rich.progress import track
from rich.table import Table
from spawned import machine
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel
from zeroshard_integrations import ddp as hooks

ROOT = Path(__file__).resolve().parents[2]
TENSORS, LENGTH = 200, 10_000
WARM_UP = 5
NAMES = ("torch, views", "step, whole", "step, split", "hook, whole", "hook, split")


def main(
    before: Annotated[Path | None, typer.Option(help="another checkout of the repository")] = None,
    ranks: Annotated[int, typer.Option(min=2, help="number of ranks")] = 2,
    turns: Annotated[int, typer.Option(min=6, help="turns of each; fewer than 6 have no interval")] = 101,
    steps: Annotated[int, typer.Option(min=1, help="steps of a turn")] = 10,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures to this file")] = None,
    rank: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Time fused Adam over 200 tensors of 10,000 elements."""
    if rank:
        _be_rank(*json.loads(rank))
        return
    if before is None:
        raise typer.BadParameter("which checkout is it to be compared with?", param_hint="--before")
    folders = {"now": ROOT, "before": before.resolve()}
    found: dict[str, Times] = {name: {checkout: [] for checkout in folders} for name in NAMES}
    # Ranks that are started first take longer, by up to 5 %: each checkout is the first in half of the turns.
    for half, order in enumerate((["now", "before"], ["before", "now"])):
        with ExitStack() as stack:
            checkouts = {name: stack.enter_context(_Ranks(folders[name], ranks)) for name in order}
            count = (turns + half) // 2
            for turn in track(range(count), f"{ranks} ranks, {order[0]} first", console=Console(stderr=True)):
                for name in NAMES:
                    for checkout in order[:: 1 if turn % 2 == 0 else -1]:
                        found[name][checkout].append(checkouts[checkout].seconds(name, steps))
    Console().print(_table(found, ranks, turns))
    Console().print(machine())
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": machine(), "ranks": ranks, "seconds": found}), encoding="utf-8")


def _table(found: dict[str, Times], ranks: int, turns: int) -> Table:
    table = Table(title=f"processor time of a rank, {ranks} ranks, {turns} turns")
    for heading in ("", "ms", "now / before", "95 %", "now / torch", "before / torch"):
        table.add_column(heading, justify="right")
    torchs = found["torch, views"]["now"]
    for name, times in found.items():
        timing = compared(times, "now", "before")
        against = [compared({"a": seconds, "b": torchs}, "a", "b").ratio for seconds in times.values()]
        table.add_row(
            name,
            f"{1e3 * statistics.median(times['now']):.2f}",
            f"{timing.ratio:.3f}",
            f"{timing.low:.3f} - {timing.high:.3f}",
            *[f"{ratio:.3f}" if name.startswith("step") else "" for ratio in against],
        )
    return table


class _Ranks:
    """The ranks of one checkout, which work only while they are asked."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._meeting = tempfile.TemporaryDirectory()
        packages = os.pathsep.join(str(path) for path in sorted(folder.glob("packages/*/src")))
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", json.dumps([rank, ranks, self._meeting.name])],
                env={**os.environ, "PYTHONPATH": packages},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        for line in self._answers():
            if folder not in Path(line).parents:
                raise SystemExit(f"zeroshard was imported from {line}, and not from {folder}")

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait()
        self._meeting.cleanup()

    def seconds(self, name: str, steps: int) -> float:
        """Let all ranks work, and return the processor time of one, on the mean, for a step."""
        for process in self._processes:
            assert process.stdin is not None
            print(json.dumps([name, steps]), file=process.stdin, flush=True)
        return statistics.mean(map(float, self._answers())) / steps

    def _answers(self) -> list[str]:
        answers = [process.stdout.readline().strip() for process in self._processes if process.stdout is not None]
        if not all(answers):
            raise SystemExit("a rank has ended; its traceback is above")
        return answers


def _be_rank(rank: int, ranks: int, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=ranks)
    work = {name: _work(name) for name in NAMES}
    for call in work.values():
        for _ in range(WARM_UP):
            call()
    gc.collect()
    gc.freeze()
    print(zeroshard.__file__, flush=True)
    for line in sys.stdin:
        name, steps = json.loads(line)
        dist.barrier()
        started = time.process_time()
        for _ in range(steps):
            work[name]()
        # Ranks that are still receiving spend this rank's time too.
        dist.barrier()
        print(time.process_time() - started, flush=True)


def _work(name: str) -> Callable[[], object]:
    """Return what a turn repeats."""
    kind, _, partition = name.partition(", ")
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.ParameterList(torch.randn(LENGTH, generator=generator) for _ in range(TENSORS))
    settings: dict[str, Any] = {"lr": 1e-3, "fused": True}
    ours = {**settings, "partition": partition}
    if kind == "hook":
        # A model that computes next to nothing, in buckets as DDP makes them.
        ddp = DistributedDataParallel(_Sum(model))
        optimizer = zeroshard.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, **ours)
        if hasattr(hooks, "register_reduce_to_owner"):
            hooks.register_reduce_to_owner(ddp, optimizer)
        else:
            ddp.register_comm_hook(optimizer, hooks.reduce_to_owner_hook)

        def iterate() -> None:
            ddp().backward()
            optimizer.step()
            optimizer.zero_grad()

        return iterate
    for param in model:
        param.grad = torch.randn(LENGTH, generator=generator)
    if kind == "torch":
        return TorchZero(model.parameters(), torch.optim.Adam, parameters_as_bucket_view=True, **settings).step
    return zeroshard.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, **ours).step


class _Sum(torch.nn.Module):
    def __init__(self, values: torch.nn.ParameterList) -> None:
        super().__init__()
        self.values = values

    def forward(self) -> torch.Tensor:
        return torch.stack([value.sum() for value in self.values]).sum()


if __name__ == "__main__":
    typer.run(main)
