"""Host time of an iteration by collectives, against torch's ZeroRedundancyOptimizer, at any number of ranks.

On torch's fake backend, which moves nothing: what is left is what the host does. The tensors are those of GPT-2 with
124M parameters, with a twelfth of the columns, and cut into as many parts. An iteration is a backward with DDP's
buckets, and a step. Torch's class has its parameters in bucket views, and plain DDP reduces its gradients.

The fake all-gather copies this rank's row to all others, and the fake reduce-scatter makes a view for each rank. An
accelerator's host does neither, so both are replaced by calls that only issue something. Values of parameters mean
nothing here.
"""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
import gc
import json
import shlex
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import process_time
from typing import Annotated, Any
from unittest import mock

import torch
import torch.distributed as dist
import typer
from collective_counts import RANKS, fake_group, gpt2
from pairs import alternate
from rich.console import Console
from spawned import machine
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch exports it unseen
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import RankGroup, collectives
from zeroshard_core import SMALLEST_PART, split
from zeroshard_integrations.ddp import register_reduce_to_owner

NARROWER = 12
FEW, MOST_OF_FEW, MOST_OF_MANY = 64, 1.25, 1.6
_SETTINGS: dict[str, Any] = {"lr": 1e-3, "foreach": True}
_BEFORE = 4


class Chain(nn.Module):
    """All parameters one after another, each in a node of autograd of its own, without any arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(*shape[:-1], shape[-1] // NARROWER) for shape in gpt2()]
        self.params = nn.ParameterList([torch.zeros(shape) for shape in shapes])

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value."""
        for param in self.params:
            value = _Link.apply(value, param)  # type: ignore[no-untyped-call]  # torch has no types for it
        return value


class _Link(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - torch's
        ctx.shape = param.shape
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # noqa: ANN401 - torch's
        return grad, torch.zeros(ctx.shape)


def gather_nothing(_: torch.Tensor, row: torch.Tensor, **options: Any) -> Any:  # noqa: ANN401 - torch's
    """Issue a call as an all-gather does; copy nothing."""
    return dist.broadcast(row, group_src=0, **options)


def reduce_nothing(row: torch.Tensor, _: torch.Tensor, *, op: dist.ReduceOp, **options: Any) -> Any:  # noqa: ANN401, ARG001 - torch's
    """Issue a call as a reduce-scatter does; reduce nothing."""
    return dist.broadcast(row, group_src=0, **options)


def _all_reduce(ranks: int, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Do what DDP does without a hook, which the fake backend cannot serve: its works have no results."""
    buffer = bucket.buffer().div_(ranks)
    dist.all_reduce(buffer, async_op=True)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


def contender(strategy: str | None, ranks: int) -> Callable[[], None]:
    """Return a function that makes one iteration; of torch's class if there is no strategy."""
    model = DistributedDataParallel(Chain(), gradient_as_bucket_view=True, bucket_cap_mb=25 / NARROWER)
    if strategy is None:
        from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

        model.register_comm_hook(ranks, _all_reduce)
        optimizer: torch.optim.Optimizer = TorchZero(
            model.parameters(), AdamW, parameters_as_bucket_view=True, **_SETTINGS
        )
    else:
        smallest = 1024 if ranks >= FEW else SMALLEST_PART
        cutting = partial(split, smallest_part=smallest // NARROWER)
        partition: Any = cutting if strategy == "split" else strategy
        sharded = ZeroRedundancyOptimizer(model.parameters(), AdamW, partition=partition, elementwise=True, **_SETTINGS)
        register_reduce_to_owner(model, sharded)
        optimizer = sharded
    start = torch.ones(1, requires_grad=True)

    def iterate() -> None:
        model(start).sum().backward()
        # Else what would arrive is not unpacked.
        with mock.patch.object(RankGroup, "moves_data", return_value=True):
            optimizer.step()
        optimizer.zero_grad()

    return iterate


def main(
    ranks: Annotated[list[int] | None, typer.Option(min=2, help="numbers of ranks that are made believe")] = None,
    pairs: Annotated[int, typer.Option(min=6, help="alternating pairs of iterations")] = 7,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures to this file")] = None,
) -> None:
    """Measure both partitions; the exit status is 1 if a bound is missed."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    for number in ranks or RANKS:
        with (
            fake_group(number),
            mock.patch.multiple(collectives, all_gather=gather_nothing, reduce_scatter=reduce_nothing),
        ):
            theirs = contender(None, number)
            for strategy in ("whole", "split"):
                ours = contender(strategy, number)
                for _ in range(_BEFORE):
                    ours()
                    theirs()
                found = alternate(ours, theirs, pairs, process_time)
                rows.append(
                    {
                        "partition": strategy,
                        "ranks": number,
                        "ratio": found.ratio,
                        "low": found.low,
                        "high": found.high,
                        "seconds": found.median_a,
                        "torch_seconds": found.median_b,
                    }
                )
                del ours
                gc.collect()
            del theirs
    command = shlex.join(["python", "tools/bench/host_time.py", *sys.argv[1:]])
    result = {"program": "host_time", "command": command, "machine": machine(), "rows": rows}
    Console().print(table(result), markup=False, highlight=False, soft_wrap=True)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1), encoding="utf-8")
    met = [row["ratio"] <= (MOST_OF_FEW if row["ranks"] <= FEW else MOST_OF_MANY) for row in rows]
    raise typer.Exit(0 if all(met) else 1)


def table(found: Mapping[str, Any]) -> str:
    """Return the figures as a table in Markdown."""
    lines = ["| partition | ranks | ms | torch's, ms | / torch |", "| --- | ---: | ---: | ---: | ---: |"]
    lines += [
        f"| {row['partition']} | {row['ranks']} | {1e3 * row['seconds']:.0f} | {1e3 * row['torch_seconds']:.0f} | "
        f"{row['ratio']:.2f} ({row['low']:.2f}-{row['high']:.2f}) |"
        for row in found["rows"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
