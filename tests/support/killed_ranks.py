"""A program of its own: ranks that train without end are forked, one of them is killed, and the others are watched.

It reads moments, one JSON object a line, and answers each with what the other ranks have raised, or where they hang.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch

# Once, before the ranks are forked: it takes seconds.
import torch._dynamo.compiled_autograd
import torch.distributed as dist
from support.ddp_training import register, steps_in_backward
from support.training import set_gradients
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer, shard_gradients
from zeroshard_comm import transport

_ENDING = 60.0
"""Seconds after which a process that has raised should have ended."""

_WARM = 3
"""Iterations after which DDP has rebuilt its buckets, and issues nothing for itself any more."""


@dataclass(frozen=True)
class Moment:
    """When one of some ranks is killed, and what they are doing.

    Attributes:
        loop: ``"steps"`` alone with local gradients, ``"ddp"`` without a hook, the name of a hook, or ``"sharded"``
            gradients of a model that is not in DDP, ``"sharded with buffers"`` if it has some.
        ranks: how many.
        reads: whether they may read each other's memory.
        lives_on: whether a rank that raises lives on; else its process ends, as a script's does.
        seed: of the rank that is killed, and of the seconds until then.
        timeout: of the process group, in seconds.
        folder: for files.
        within: seconds after which a rank that has not ended, or not raised, is taken to hang.
        overlaps: whether a thread finishes messages.
    """

    loop: str
    ranks: int
    reads: bool
    lives_on: bool
    seed: int
    timeout: float
    folder: str
    within: float = 10.0
    overlaps: bool = False


def iteration(loop: str) -> Callable[[], None]:
    """Build a model of 1 MiB in four tensors of weights, and return what trains it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    if loop == "sharded with buffers":
        model.append(nn.BatchNorm1d(256))
    is_in_ddp = loop != "steps" and not loop.startswith("sharded")
    called = DistributedDataParallel(model, bucket_cap_mb=0.2) if is_in_ddp else model
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, overlap_with_ddp=steps_in_backward(loop))
    if loop.startswith("sharded"):
        shard_gradients(model, sharded, bucket_mb=0.2)
    elif isinstance(called, DistributedDataParallel) and loop != "ddp":
        register(loop, called, sharded)

    def iterate() -> None:
        if loop == "steps":
            set_gradients(model.parameters(), 0)
        else:
            sharded.zero_grad()
            called(torch.ones(8, 256)).square().mean().backward()
        sharded.step()

    return iterate


def train(moment: Moment, rank: int, tell: Callable[..., None]) -> None:
    parent = os.getppid()
    os.environ["ZEROSHARD_CROSS_MEMORY"] = str(int(moment.reads))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{moment.folder}/store",
        rank=rank,
        world_size=moment.ranks,
        timeout=timedelta(seconds=moment.timeout),
    )
    dist.barrier()
    begun, seconds = 0, 0.1
    try:
        if moment.overlaps:
            transport.WORTH_OVERLAPPING = 0
        iterate = iteration(moment.loop)
        while os.getppid() == parent:
            tell(begun=begun, seconds=seconds)
            started = time.monotonic()
            iterate()
            begun, seconds = begun + 1, time.monotonic() - started
    except BaseException as error:
        ours = [frame.f_code.co_name for frame in _frames(error) if _module(frame).startswith("zeroshard")]
        raised = type(error).__name__
        tell(raised=raised, message=str(error), in_ours=bool(ours), ours=ours, at=time.monotonic())
        if not moment.lives_on:
            raise
        while os.getppid() == parent:
            time.sleep(0.05)


def _frames(error: BaseException) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _module(frame: FrameType) -> str:
    return str(frame.f_globals["__name__"])


def be_rank(moment: Moment, rank: int, told: int) -> None:
    output = Path(moment.folder, f"rank{rank}.txt").open("w")  # noqa: SIM115 - as long as the process
    os.dup2(output.fileno(), sys.stderr.fileno())
    faulthandler.register(signal.SIGUSR1, output, all_threads=True)

    def tell(**what: object) -> None:
        os.write(told, (json.dumps({"rank": rank, **what}) + "\n").encode())

    train(moment, rank, tell)


def outcome(moment: Moment) -> dict[str, object]:
    """Kill a rank, and return which and when, and what each other one has done within the time, by rank."""
    drawn = random.Random(moment.seed)
    victim, part = drawn.randrange(moment.ranks), drawn.random()
    # Who lives on waits for DDP's own collectives, in its constructor and first iterations, until the timeout.
    iteration = drawn.randrange(4) + (_WARM if moment.lives_on else 0)
    reading, writing = os.pipe()
    processes: dict[int, int] = {}
    for rank in range(moment.ranks):
        processes[rank] = os.fork()
        if processes[rank] == 0:
            be_rank(moment, rank, writing)
            sys.exit()
    os.close(writing)
    done: dict[int, dict[str, Any]] = {rank: {} for rank in processes}
    others = [rank for rank in processes if rank != victim]
    watch = Watch(reading, processes, done)
    watch.until(lambda: done[victim].get("begun", -1) >= iteration, _ENDING)
    time.sleep(part * done[victim]["seconds"])
    os.kill(processes[victim], signal.SIGKILL)
    killed = time.monotonic()
    hanging = watch.until(lambda: all("raised" in done[rank] for rank in others), moment.within)
    if not hanging and not moment.lives_on:
        hanging = watch.until(lambda: all("status" in done[rank] for rank in others), _ENDING)
    for rank in others if hanging else []:
        if "status" not in done[rank]:
            os.kill(processes[rank], signal.SIGUSR1)
            time.sleep(0.5)
            done[rank]["hangs"] = Path(moment.folder, f"rank{rank}.txt").read_text()
    for rank, process in processes.items():
        if "status" not in done[rank]:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    os.close(reading)
    for rank in others:
        done[rank]["after"] = done[rank].pop("at", float("inf")) - killed
    return {"victim": victim, "iteration": iteration + part, "others": {rank: done[rank] for rank in others}}


class Watch:
    """Hears what ranks tell, and when their processes end."""

    def __init__(self, reading: int, processes: dict[int, int], done: dict[int, dict[str, Any]]) -> None:
        self._reading, self._processes, self._done = reading, processes, done
        self._rest = b""

    def until(self, enough: Callable[[], bool], seconds: float) -> bool:
        """Wait until it is enough; return whether it is not, after so many seconds."""
        ends = time.monotonic() + seconds
        while not enough() and time.monotonic() < ends:
            if select.select([self._reading], [], [], 0.01)[0]:
                self._rest += os.read(self._reading, 1 << 16)
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                told = json.loads(line)
                self._done[told.pop("rank")].update(told)
            for rank, process in self._processes.items():
                if "status" not in self._done[rank] and (ended := os.waitpid(process, os.WNOHANG))[0]:
                    self._done[rank]["status"] = os.waitstatus_to_exitcode(ended[1])
        return not enough()


if __name__ == "__main__":
    # Else a rank looks through all that was imported when it ends.
    gc.freeze()
    for asked in sys.stdin:
        print(json.dumps(outcome(Moment(**json.loads(asked)))), flush=True)
