"""The peak of resident memory of a rank over the parameters: each contender alone, on fresh ranks."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch.distributed as dist
from bench.contenders import CONTENDERS
from bench.iteration import first_iteration
from bench.results import Row
from bench.spawned import on_ranks
from bench.workloads import MODELS
from rich.console import Console
from rich.progress import track

_ITERATIONS = 5


def measure(names: list[str], model: str, layers: int, ranks: list[int]) -> list[Row]:
    """Return a row for each contender, with the highest peak of all ranks over P for each number of ranks."""
    # Processes that are started from now on give back what they free, so that what is resident is in use.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1048576")
    cases = [(name, count) for name in names for count in ranks]
    made: dict[str, Row] = {name: {"contender": name} for name in names}
    for name, count in track(cases, "memory", console=Console(stderr=True)):
        found = on_ranks(peak, count, name, model, layers)
        if isinstance(found, str):
            made[name]["error"] = found
        else:
            made[name][f"{count} ranks"] = found / MODELS[model](layers).parameter_bytes()
    return list(made.values())


def peak(name: str, model: str, layers: int) -> int | str:
    """Return how many bytes more are resident at the highest than before the model was built, or why it does not run.

    Collective; the highest of all ranks counts.
    """
    work = MODELS[model](layers)
    batches = work.batches(_ITERATIONS, dist.get_rank())
    # What the first iteration of a process imports and sets up does not count.
    tiny = MODELS["tiny"](layers)
    trainer, error = first_iteration(name, tiny, tiny.batches(1, dist.get_rank())[0])
    if trainer is None:
        return str(error)
    del trainer
    gc.collect()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    trainer = CONTENDERS[name](work)
    for batch in batches:
        trainer.iterate(batch)
    peaks = [0] * dist.get_world_size()
    dist.all_gather_object(peaks, _resident("VmHWM") - before)
    return max(peaks)


def _resident(field: str) -> int:
    """Return what is resident now (``VmRSS``) or was at the highest since the last reset (``VmHWM``), in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
