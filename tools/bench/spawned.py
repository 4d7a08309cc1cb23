"""Ranks of a benchmark: processes of this machine in one gloo group, of which the first one reports."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench.links import enter
from torch.multiprocessing.spawn import spawn

Rank = Callable[..., Any]


def on_ranks(function: Rank, ranks: int, *arguments: object, namespaces: Sequence[str] = ()) -> Any:  # noqa: ANN401 - whatever the function reports
    """Run a module-level function on fresh ranks, each with one intra-op thread, and return what rank 0 reports.

    What the function returns must fit into JSON. A rank enters its network namespace, if there are any. What a rank
    raises is raised here, with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(_as_rank, (ranks, folder, namespaces, function, arguments), nprocs=ranks)
        return json.loads((Path(folder) / "report.json").read_text(encoding="utf-8"))


def machine() -> dict[str, object]:
    """Return what a reader of the figures must know of the machine."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text(encoding="utf-8").splitlines() if cpus.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "threads per rank": 1,
    }


def _as_rank(
    rank: int, ranks: int, folder: str, namespaces: Sequence[str], function: Rank, arguments: Sequence[object]
) -> None:
    if namespaces:
        enter(namespaces[rank])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    report = function(*arguments)
    if rank == 0:
        (Path(folder) / "report.json").write_text(json.dumps(report), encoding="utf-8")
    dist.barrier()
    # FSDP2's processes sometimes abort when torch frees its threads.
    os._exit(0)
