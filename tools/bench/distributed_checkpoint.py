"""Time dcp.save of sharded AdamW state against DTensors of the same bytes, in alternating pairs, and count memory."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import torch
import torch.distributed as dist
import typer
from contest import Times, compared, take_turns
from progress_bar import calls
from resident import growth_of, return_freed_memory
from rich.console import Console
from rich.table import Table
from spawned import machine, on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from zeroshard import ZeroRedundancyOptimizer

TIMES_AS_LONG = 1.1
MEBIBYTES_BEYOND = 64
SIDE = 1024
"""Rows and columns of each parameter; in float32 AdamW keeps 8 MiB of state for it."""
OURS, THEIRS = "zeroshard", "DTensor"
TEMPORARY = Path(tempfile.gettempdir())


class Saves(TypedDict):
    """What was measured with one partition.

    Attributes:
        seconds: per contender.
        beyond: per contender, how far each rank's memory grew at the highest during a save, in bytes.
    """

    seconds: Times
    beyond: dict[str, list[int]]


def main(
    pairs: Annotated[int, typer.Option(min=6, help="alternating pairs; fewer than 6 have no interval")] = 15,
    ranks: Annotated[int, typer.Option(min=1, help="number of ranks")] = 2,
    megabytes: Annotated[int, typer.Option(min=8, help="AdamW state of the whole model, in MiB")] = 1024,
    folder: Annotated[
        Path, typer.Option(help="where checkpoints are written, and deleted after each save")
    ] = TEMPORARY,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures to this file")] = None,
) -> None:
    """Time dcp.save with each partition against DTensors; the exit status is 1 if a bound is missed."""
    if shutil.disk_usage(folder).free < 2 * megabytes * 2**20:
        raise typer.BadParameter(f"{folder} has less than {2 * megabytes} MiB left; name another --folder")
    return_freed_memory()
    table = Table(
        title=f"dcp.save of {megabytes} MiB of AdamW state to {folder}, {ranks} ranks, {pairs} pairs",
        caption=f"at most {TIMES_AS_LONG} times as long, with {MEBIBYTES_BEYOND} MiB of memory beyond the state",
    )
    for heading in (
        "partition",
        "DTensor, ms",
        "zeroshard, ms",
        "ratio",
        "95 %",
        "DTensor, MiB",
        "zeroshard, MiB",
        "met",
    ):
        table.add_column(heading, justify="right")
    results: dict[str, dict[str, Any]] = {}
    for partition in ("whole", "split"):
        with tempfile.TemporaryDirectory(dir=folder) as emptied:
            saves: Saves = on_ranks(_contest, ranks, partition, megabytes, pairs, emptied)
        timing = compared(saves["seconds"], OURS, THEIRS)
        beyond = {name: max(grown) / 2**20 for name, grown in saves["beyond"].items()}
        met = timing.high <= TIMES_AS_LONG and beyond[OURS] <= MEBIBYTES_BEYOND
        results[partition] = {"met": met, "zeroshard_to_dtensor": asdict(timing), **saves}
        table.add_row(
            partition,
            f"{timing.median_b * 1e3:.0f}",
            f"{timing.median_a * 1e3:.0f}",
            f"{timing.ratio:.3f}",
            f"{timing.low:.3f} - {timing.high:.3f}",
            f"{beyond[THEIRS]:.1f}",
            f"{beyond[OURS]:.1f}",
            "yes" if met else "no",
        )
    console = Console()
    console.print(table)
    console.print(machine())
    if json_file is not None:
        result = {"machine": machine(), "ranks": ranks, "pairs": pairs, "mebibytes": megabytes, "folder": str(folder)}
        json_file.write_text(json.dumps({**result, "partitions": results}), encoding="utf-8")
    raise typer.Exit(0 if all(result["met"] for result in results.values()) else 1)


def _contest(partition: Literal["whole", "split"], megabytes: int, pairs: int, folder: str) -> Saves:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(*[nn.Linear(SIDE, SIDE, bias=False) for _ in range(max(1, megabytes // 8))])
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, partition=partition)
    optimizer.init_state()
    for entries in optimizer.optim.state.values():
        for value in entries.values():
            # Zeros that were never written take no memory.
            value.normal_()

    def listed() -> dict[str, Any]:
        found: dict[str, Any] = get_optimizer_state_dict(
            model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
        )
        return found

    distributed = _as_dtensors(listed())
    contenders: dict[str, Callable[[], object]] = {
        THEIRS: lambda: save(distributed, checkpoint_id=Path(folder, THEIRS)),
        OURS: lambda: save(listed(), checkpoint_id=Path(folder, OURS)),
    }
    sizes: dict[str, int] = {}
    beyond: dict[str, list[int]] = {}
    with calls(f"saves, {partition}", 2 * (pairs + 2)) as advance:

        def delete() -> None:
            if dist.get_rank() == 0:
                for path in Path(folder).iterdir():
                    shutil.rmtree(path)
            advance()

        # The first save of a process imports and makes what stays.
        take_turns(contenders, 0, warm_up=1, advance=delete)
        for name, saves in contenders.items():
            beyond[name] = [0] * dist.get_world_size()
            dist.all_gather_object(beyond[name], growth_of(saves))
            sizes[name] = sum(file.stat().st_size for file in Path(folder, name).iterdir())
            dist.barrier()
            delete()
        if abs(sizes[OURS] - sizes[THEIRS]) > 0.01 * sizes[THEIRS]:
            raise AssertionError(f"checkpoints of different sizes, whose times cannot be compared: {sizes}")
        return {"seconds": take_turns(contenders, pairs, warm_up=0, advance=delete), "beyond": beyond}


def _as_dtensors(listed: dict[str, Any]) -> dict[str, Any]:
    """Return the same entries under the same keys, those with a value per element as DTensors with sharded rows."""
    world_size = dist.get_world_size()
    mesh = DeviceMesh("cpu", list(range(world_size)))
    made: dict[str, Any] = {}
    for key, value in listed.items():
        if not isinstance(value, torch.Tensor):
            made[key] = value
        elif value.dim() == 0:
            made[key] = torch.ones((), dtype=value.dtype)
        else:
            rows = torch.randn(SIDE, SIDE).chunk(world_size)[dist.get_rank()].clone()
            made[key] = DTensor.from_local(
                rows, mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride()
            )
    return made


if __name__ == "__main__":
    typer.run(main)
