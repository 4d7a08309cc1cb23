"""Processor time of ``step()``, and of an iteration with a hook, beside another checkout.

The ranks of both checkouts live on this machine all the time, and take turns: while the ranks of one checkout work, the
others wait for a line on standard input. So turns may be as short as a few steps, and drift of the machine cancels out.
The time of a turn is the processor time of all threads of a rank, on the mean over the ranks.

A rank imports this module and the packages of its checkout, which may be older.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import mean, median

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
    """Return a row for each way to train, with the ratio of its times to those of another checkout.

    Args:
        before: the other checkout.
        ranks: number of ranks.
        rounds: turns of each.
    """
    folders = {"now": _TOOLS.parent, "before": before.resolve()}
    found: dict[str, Times] = {name: {checkout: [] for checkout in folders} for name in NAMES}
    # Ranks that are started first take longer, by up to 5 %: each checkout is the first in half of the turns.
    for half, order in enumerate((["now", "before"], ["before", "now"])):
        with ExitStack() as stack:
            checkouts = {name: stack.enter_context(_Ranks(folders[name], ranks)) for name in order}
            count = (rounds + half) // 2
            for turn in track(range(count), f"{order[0]} first", console=Console(stderr=True)):
                for name in NAMES:
                    for checkout in order[:: 1 if turn % 2 == 0 else -1]:
                        found[name][checkout].append(checkouts[checkout].seconds(name))
    torchs = found[NAMES[0]]["now"]
    return [
        {"contender": name, "ms": 1e3 * median(times["now"]), "now / before": ratio(times["now"], times["before"])}
        | ({f"{which} / torch": ratio(times[which], torchs) for which in folders} if name.startswith("step") else {})
        for name, times in found.items()
    ]


class _Ranks:
    """The ranks of one checkout, which work only while they are asked."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._meeting = tempfile.TemporaryDirectory()
        packages = [*sorted(folder.glob("packages/*/src")), _TOOLS]
        rank_main = "import sys; from bench.checkouts import be_rank; be_rank(*sys.argv[1:])"
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-c", rank_main, str(rank), str(ranks), self._meeting.name],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, packages))},
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
            process.communicate()
        self._meeting.cleanup()

    def seconds(self, name: str) -> float:
        """Let all ranks work, and return the processor time of one, on the mean, for a step."""
        for process in self._processes:
            assert process.stdin is not None
            print(name, file=process.stdin, flush=True)
        return mean(map(float, self._answers())) / _STEPS

    def _answers(self) -> list[str]:
        answers = [process.stdout.readline().strip() for process in self._processes if process.stdout is not None]
        if not all(answers):
            raise SystemExit("a rank has ended; its traceback is above")
        return answers


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
