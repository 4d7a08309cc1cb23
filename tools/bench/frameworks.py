"""Time what frameworks add to an iteration, sharded and not: the scripts of their pages beside a plain loop.

The quotient of a framework is an iteration under it over one of a plain loop, sharded, over the same unsharded: 1 if
the framework takes as long for a sharded optimizer as for a plain one. Each round trains all of them, in alternating
order, in the same two processes. It needs the frameworks: pip install "zeroshard-integrations[accelerate,lightning,
transformers]".
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import json
import logging
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any
from unittest import mock

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from spawned import machine
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_integrations.ddp import register_reduce_to_owner
from zeroshard_testing import run_on_ranks

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
AT_MOST = 1.02
WIDTH = 256
FRAMEWORKS = ("lightning", "fabric", "accelerate", "trainer")
Moments = list[float]


def main(
    rounds: Annotated[int, typer.Option(min=1, help="rounds of all frameworks")] = 5,
    steps: Annotated[int, typer.Option(min=12, help="iterations of each training; the first 10 are not timed")] = 50,
    framework: Annotated[list[str] | None, typer.Option(help="one of them, or several")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures to this file")] = None,
) -> None:
    """Time iterations; the exit status is 1 if a framework's quotient is above 1.02."""
    console = Console()
    names = framework or list(FRAMEWORKS)
    table = Table(title=f"iterations on 2 ranks, {rounds} rounds, medians")
    for heading in ("framework", "plain ms", "sharded ms", "loop ms", "sharded loop ms", "quotient", "all rounds"):
        table.add_column(heading, justify="left" if heading == "framework" else "right")
    quotients: dict[str, list[float]] = {}
    for name in names:
        seconds = run_on_ranks(_rounds, 2, name, rounds, steps, init=False, timeout=600.0)[0]
        quotients[name] = [(b / d) / (a / c) for a, b, c, d in seconds]
        medians = [f"{1e3 * statistics.median(column):.2f}" for column in zip(*seconds, strict=True)]
        each = " ".join(f"{quotient:.3f}" for quotient in sorted(quotients[name]))
        table.add_row(name, *medians, f"{statistics.median(quotients[name]):.3f}", each)
    console.print(table)
    console.print(machine())
    met = all(statistics.median(found) <= AT_MOST for found in quotients.values())
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": machine(), "met": met, "quotients": quotients}), encoding="utf-8")
    raise typer.Exit(0 if met else 1)


def _rounds(framework: str, rounds: int, steps: int) -> list[list[float]]:
    """Return the median iteration per round: of the framework plain and sharded, and of the loop plain and sharded."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    contenders: list[Callable[[], Moments]] = [
        lambda: _of_script(framework, "plain", steps),
        lambda: _of_script(framework, "sharded", steps),
        lambda: _of_loop(steps, is_sharded=False, as_trainer=framework == "trainer"),
        lambda: _of_loop(steps, is_sharded=True, as_trainer=framework == "trainer"),
    ]
    found = []
    # The first round warms up.
    for number in range(rounds + 1):
        order = range(len(contenders))[:: 1 if number % 2 == 0 else -1]
        times = {place: _iteration(contenders[place]()) for place in order}
        found.append([times[place] for place in range(len(contenders))])
    return found[1:]


def _iteration(moments: Moments) -> float:
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(moments[10:]))


@contextlib.contextmanager
def _watched() -> Iterator[tuple[Any, Moments]]:
    """Give the module of the model, whose forwards note when they begin."""
    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        module = importlib.import_module("small_gpt")
    moments: Moments = []
    forward = module.SmallGPT.forward

    def noting(*arguments: Any, **options: Any) -> torch.Tensor:  # noqa: ANN401 - as the model's
        moments.append(perf_counter())
        result: torch.Tensor = forward(*arguments, **options)
        return result

    with mock.patch.object(module, "WIDTH", WIDTH), mock.patch.object(module.SmallGPT, "forward", noting):
        yield module, moments


def _of_script(framework: str, kind: str, steps: int) -> Moments:
    """Train by a script, with clipping, and return when its iterations began."""
    if framework in ("lightning", "fabric"):
        # It registers the strategy.
        importlib.import_module("zeroshard_integrations.lightning")
    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        script = importlib.import_module(f"{framework}_{kind}")
    arguments: dict[str, dict[str, Any]] = {
        "lightning": {"max_steps": steps, "enable_model_summary": False, "gradient_clip_val": 1.0},
        "fabric": {"steps": steps, "max_norm": 1.0},
        "accelerate": {"first": 0, "last": steps},
        "trainer": {"last": steps, "save_strategy": "no", "logging_strategy": "no"},
    }
    options = arguments[framework]
    if framework == "trainer":
        options["disable_tqdm"] = True
    with tempfile.TemporaryDirectory() as folder, _watched() as (_, moments):
        # Lightning removes WORLD_SIZE at the end of a training that torchrun has not started.
        with mock.patch.dict(os.environ), contextlib.redirect_stdout(io.StringIO()):
            script.train(Path(folder) / "checkpoint", **options)
        return moments


def _of_loop(steps: int, *, is_sharded: bool, as_trainer: bool) -> Moments:
    """Train by a plain loop over the same model and data, with DDP and AdamW as the framework sets them up.

    The Trainer looks for unused parameters, has a group of parameters without decay, and takes the fused AdamW.
    """
    with _watched() as (module, moments):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        model = module.SmallGPT()
        ddp = DistributedDataParallel(model, find_unused_parameters=as_trainer)
        groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
        if as_trainer:
            groups = [
                {"params": [param for param in model.parameters() if param.dim() > 1], "weight_decay": 0.01},
                {"params": [param for param in model.parameters() if param.dim() == 1], "weight_decay": 0.0},
            ]
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=as_trainer)
        if is_sharded:
            optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=1e-3, fused=as_trainer)
            register_reduce_to_owner(ddp, optimizer)
        rows = torch.utils.data.Subset(module.Windows(4 * steps * ranks), range(rank, 4 * steps * ranks, ranks))
        for batch in DataLoader(rows, batch_size=4):
            loss = ddp(**batch)
            loss.item()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return moments


if __name__ == "__main__":
    typer.run(main)
