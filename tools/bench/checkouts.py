"""Processor time of ``step()``, and of an iteration with a hook, beside another checkout.

The ranks of both checkouts live on this machine all the time, and take turns: while the ranks of one checkout work, the
others wait for a line on standard input. So turns may be as short as a few steps, and drift of the machine cancels out.
The time of a turn is the processor time of all threads of a rank, on the mean over the ranks.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from bench.results import Row
from bench.turns import Times, ratio
from bench.workloads import MODELS
from rich.console import Console
from rich.progress import track

NAMES = ("torch-zero-views", "step-whole", "step-split", "hook-whole", "hook-split")
"""Contenders: those with a hook make whole iterations, the others only a step."""
_TOOLS, _WARM_UP, _STEPS = Path(__file__).resolve().parents[1], 5, 10


def measure(before: Path, ranks: int, rounds: int) -> list[Row]:
    """Return a row for each of :data:`NAMES`, with the ratio of its times to the same in another checkout."""
    folders = {"now": _TOOLS.parent, "before": before.resolve()}
    found: dict[str, Times] = {name: {checkout: [] for checkout in folders} for name in NAMES}
    # Ranks that are started first take longer, by up to 5 %: each checkout is the first in half of the turns.
    for half, order in enumerate((["now", "before"], ["before", "now"])):
        with ExitStack() as stack:
            checkouts = {name: stack.enter_context(_ranks(folders[name], ranks)) for name in order}
            count = (rounds + half) // 2
            for turn in track(range(count), f"{order[0]} first", console=Console(stderr=True)):
                for name in NAMES:
                    for checkout in order[:: 1 if turn % 2 == 0 else -1]:
                        found[name][checkout].append(checkouts[checkout](name))
    torchs = found[NAMES[0]]["now"]
    return [
        {"contender": name, "ms": 1e3 * median(times["now"]), "now / before": ratio(times["now"], times["before"])}
        | ({f"{which} / torch": ratio(times[which], torchs) for which in folders} if name.startswith("step") else {})
        for name, times in found.items()
    ]


@contextmanager
def _ranks(folder: Path, ranks: int) -> Iterator[Callable[[str], float]]:
    """Start the ranks of a checkout; yields what lets them work, and returns the processor time of one for a step."""
    path = os.pathsep.join(map(str, [*sorted(folder.glob("packages/*/src")), _TOOLS]))
    main = "import sys; from bench.checkouts import be_rank; be_rank(*sys.argv[1:])"
    with tempfile.TemporaryDirectory() as meeting, ExitStack() as stack:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        settings = {"env": {**os.environ, "PYTHONPATH": path}, **pipes}
        commands = [[sys.executable, "-c", main, str(rank), str(ranks), meeting] for rank in range(ranks)]
        # In the end the standard input of each is closed, and its end awaited.
        processes = [stack.enter_context(subprocess.Popen(command, **settings)) for command in commands]

        def answers() -> list[str]:
            lines = [process.stdout.readline().strip() for process in processes if process.stdout is not None]
            if not all(lines):
                raise SystemExit("a rank has ended; its traceback is above")
            return lines

        def seconds(name: str) -> float:
            for process in processes:
                print(name, file=process.stdin, flush=True)
            return mean(map(float, answers())) / _STEPS

        for line in answers():
            if folder not in Path(line).parents:
                raise SystemExit(f"zeroshard was imported from {line}, and not from {folder}")
        yield seconds


def be_rank(rank: str, ranks: str, meeting: str) -> None:
    """Be one rank: work as often as a line on standard input names a contender, and print what that took."""
    # Of the checkout that the environment names.
    import zeroshard
    from bench.contenders import CONTENDERS

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=int(rank), world_size=int(ranks))
    work = MODELS["tensors"](0)
    [batch] = work.batches(1, int(rank))
    turns: dict[str, Callable[[], object]] = {}
    for name in NAMES:
        trainer = CONTENDERS[name](work)
        for _ in range(_WARM_UP):
            trainer.iterate(batch)
        turns[name] = partial(trainer.iterate, batch) if name.startswith("hook") else trainer.step
    gc.collect()
    gc.freeze()
    print(zeroshard.__file__, flush=True)
    for line in sys.stdin:
        dist.barrier()
        started = time.process_time()
        for _ in range(_STEPS):
            turns[line.strip()]()
        # Ranks that are still receiving take this rank's time too.
        dist.barrier()
        print(time.process_time() - started, flush=True)
