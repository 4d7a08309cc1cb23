"""Counts what the collective path issues for real shapes at any number of ranks, and the memory that it stages.

No data: tensors are on the meta device, and the collectives of our own code are counted where they are issued, on
torch's fake backend. One iteration of ``reduce_to_owner_hook``: the reductions of all buckets, laid out as
DistributedDataParallel lays them out (1 MiB for the first, 25 MiB for others), and the broadcast of all parameters.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch.testing._internal.distributed.fake_pg import FakeStore
from zeroshard_comm import (
    Coordinator,
    RankGroup,
    Segment,
    choose_broadcaster,
    choose_transport,
    collectives,
)
from zeroshard_core import SMALLEST_PART, Plan, Run, TensorSpec, partition

RANKS = (8, 64, 512, 1024)
META = torch.device("meta")
_FIRST_BUCKET, _BUCKET = 1024 * 1024, 25 * 1024 * 1024
_SMALLEST_PART_OF_MANY = 1024


def gpt2() -> list[tuple[int, ...]]:
    """Return the shapes of the parameters of GPT-2 with 124M, in the order of the model."""
    width, block = 768, [(768,), (768,), (768, 2304), (2304,), (768, 768), (768,)]
    block += [(768,), (768,), (768, 3072), (3072,), (3072, 768), (768,)]
    return [(50257, width), (1024, width), *block * 12, (width,), (width,)]


def llama() -> list[tuple[int, ...]]:
    """Return the shapes of a Llama with 1.2 billion parameters, whose embedding is the output head too."""
    width, inner, keys = 2048, 8192, 512
    attention = [(width, width), (keys, width), (keys, width), (width, width)]
    layer = [*attention, (inner, width), (inner, width), (width, inner), (width,), (width,)]
    return [(128256, width), *layer * 16, (width,)]


MODELS: Mapping[str, Callable[[], list[tuple[int, ...]]]] = {"GPT-2 124M": gpt2, "Llama 1B": llama}


@dataclass(frozen=True)
class Counts:
    """What one iteration issues.

    Attributes:
        buckets: of gradients.
        reduce_scatters, all_gathers: calls.
        reduce_groups, broadcast_groups: groups of reduces, and of broadcasts.
        members: reduces and broadcasts in these groups.
        staging: bytes of the buffers that matrices lie in.
        padding: elements of all matrices of gradients, relative to what they hold; 1 if there are none.
        worst_padding: of the bucket that is padded most.
    """

    buckets: int
    reduce_scatters: int
    all_gathers: int
    reduce_groups: int
    broadcast_groups: int
    members: int
    staging: int
    padding: float
    worst_padding: float

    @property
    def calls(self) -> int:
        """Collectives in all, a group counted as one."""
        return self.reduce_scatters + self.all_gathers + self.reduce_groups + self.broadcast_groups


@contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """Make torch's fake process group the default one: this process is rank 0 of so many, which do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def count(shapes: Sequence[tuple[int, ...]], strategy: str, *, is_first: bool = False) -> Counts:
    """Count one iteration on the default process group, which :func:`fake_group` makes.

    Args:
        shapes: of the parameters, in float32.
        strategy: of the partition.
        is_first: whether it is the first iteration, in which DDP has one bucket of all parameters.
    """
    coordinator = Coordinator(RankGroup.of())
    ranks = coordinator.ranks
    params = [torch.empty(shape, device=META) for shape in shapes]
    specs = [TensorSpec(str(index), shape, torch.float32, "meta") for index, shape in enumerate(shapes)]
    smallest = _SMALLEST_PART_OF_MANY if ranks.world_size >= 64 else SMALLEST_PART
    plan = partition(specs, ranks.world_size, strategy=strategy, smallest_part=smallest)
    order = [*range(len(params))][::-1]
    caps = [sum(param.nbytes for param in params)] if is_first else [_FIRST_BUCKET, _BUCKET]
    assigned, _ = dist._compute_bucket_assignment_by_size([params[index] for index in order], caps)  # type: ignore[attr-defined]  # torch exports it unseen
    issued: Counter[str] = Counter()
    paddings: list[tuple[int, int]] = []
    with _counting(issued):
        transport = choose_transport(coordinator, META, 0)
        for places in assigned:
            tensors = [order[place] for place in places]
            buffer = torch.empty(sum(specs[tensor].numel for tensor in tensors), device=META)
            reducer = transport.reducer(_runs(plan, tensors), buffer)
            reducer.begin(buffer).finish()
            assert isinstance(reducer, collectives.CollectiveReducer)
            matrix = reducer.matrix
            held = sum(
                run.stop - run.start
                for run, column in zip(matrix.runs, matrix.columns, strict=True)
                if column is not None
            )
            paddings.append((matrix.width * ranks.world_size, held))
        segments = [
            Segment(shard.rank, flat, plan.is_cut(index), shard.flat)
            for index, flat in enumerate([param.view(-1) for param in params])
            for shard in plan.of_tensor(index)
        ]
        choose_broadcaster(coordinator, segments, META).broadcast()
    held = sum(numel for _, numel in paddings)
    slots = ranks.context.shared(collectives.Staging)._slots.values()
    return Counts(
        len(assigned),
        issued["reduce_scatter"],
        issued["all_gather"],
        issued["groups of reduce"],
        issued["groups of broadcast"],
        issued["reduce"] + issued["broadcast"],
        sum(slot._memory.nbytes for slot in slots if slot._memory is not None),
        sum(numel for numel, _ in paddings) / held if held else 1.0,
        max([numel / of for numel, of in paddings if of], default=1.0),
    )


def _runs(plan: Plan, tensors: Sequence[int]) -> list[Run]:
    runs, offset = [], 0
    for tensor in tensors:
        for shard in plan.of_tensor(tensor):
            start, stop = offset + shard.flat.start, offset + shard.flat.stop
            runs.append(Run(shard.rank, start, stop, plan.is_cut(tensor)))
        offset += plan.tensors[tensor].numel
    return runs


@contextmanager
def _counting(issued: Counter[str]) -> Iterator[None]:
    """Count collectives in place of issuing them, as if the backend issued several as one."""
    in_group: list[str] = []

    def counting(name: str) -> Callable[..., None]:
        def call(*_: object, **__: object) -> None:
            issued[name] += 1
            in_group.append(name)

        return call

    @contextmanager
    def group(*_: object, **__: object) -> Iterator[None]:
        in_group.clear()
        yield
        issued[f"groups of {in_group[0]}"] += 1

    patches: list[AbstractContextManager[Any]] = [
        mock.patch.object(dist, name, counting(name)) for name in ("reduce", "broadcast")
    ]
    patches += [mock.patch.object(collectives, name, counting(name)) for name in ("reduce_scatter", "all_gather")]
    patches += [
        mock.patch.object(collectives, "coalescing_manager", group),
        mock.patch.object(RankGroup, "coalesces", return_value=True),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def table(found: Mapping[str, Any]) -> str:
    """Return the figures as a table in Markdown."""
    columns = ["model", "partition", "ranks", "buckets", "reduce-scatters", "all-gathers", "groups", "members"]
    lines = [f"| {' | '.join([*columns, 'staging', 'padding'])} |", "| --- | --- |" + " ---: |" * 8]
    for row in found["rows"]:
        counts = Counts(**row["counts"])
        groups = counts.reduce_groups + counts.broadcast_groups
        calls = [counts.buckets, counts.reduce_scatters, counts.all_gathers, groups, counts.members]
        cells = [row["model"], row["partition"], row["ranks"], *calls, f"{counts.staging / 1e6:.0f} MB"]
        lines.append(f"| {' | '.join(map(str, cells))} | {counts.padding:.2f} |")
    return "\n".join(lines)


def main(
    ranks: Annotated[list[int] | None, typer.Option(min=2, help="numbers of ranks that are made believe")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures to this file")] = None,
) -> None:
    """Count for all models and partitions, and print a table."""
    rows = []
    for model, shapes in MODELS.items():
        for strategy in ("whole", "split"):
            for number in ranks or RANKS:
                with fake_group(number):
                    counts = asdict(count(shapes(), strategy))
                rows.append({"model": model, "partition": strategy, "ranks": number, "counts": counts})
    command = shlex.join(["python", "tools/bench/collective_counts.py", *sys.argv[1:]])
    found = {"program": "collective_counts", "command": command, "rows": rows}
    Console().print(table(found), markup=False, highlight=False, soft_wrap=True)
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
