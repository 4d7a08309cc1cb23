"""Ranks of a benchmark: processes of this machine in one gloo group, of which the first one reports."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

Rank = Callable[..., Any]


def on_ranks(function: Rank, ranks: int, *arguments: object) -> Any:  # noqa: ANN401 - whatever the function reports
    """Run a module-level function on fresh ranks, each with one intra-op thread, and return what rank 0 reports.

    Args:
        function: called with ``arguments`` on every rank; what it returns on rank 0 must fit into JSON.
        ranks: number of processes.
        *arguments: passed to the function.

    Raises:
        torch.multiprocessing.ProcessRaisedException: what a rank raised, with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(as_rank, (ranks, folder, function, arguments), nprocs=ranks)
        return json.loads((Path(folder) / "report.json").read_text(encoding="utf-8"))


def machine() -> dict[str, object]:
    """Return what a reader of the figures must know of the machine."""
    return {
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "backend": "gloo",
        "threads_per_rank": 1,
    }


def as_rank(rank: int, ranks: int, folder: str, function: Rank, arguments: tuple[object, ...]) -> None:
    """Be one rank: join the others in a group of gloo, call the function, and on rank 0 write down what it returns.

    Args:
        rank: of this process.
        ranks: number of processes.
        folder: that all of them see, for their meeting and the report.
        function: called with ``arguments``.
        arguments: passed to the function.
    """
    torch.set_num_threads(1)
    meeting = (Path(folder) / "store").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    report = function(*arguments)
    if rank == 0:
        (Path(folder) / "report.json").write_text(json.dumps(report), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _processor() -> str:
    """Its name, where Linux tells it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
