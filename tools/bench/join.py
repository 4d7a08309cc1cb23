"""Time what a Join block costs while all ranks have data: none, ours and torch's around one training loop.

Every contender trains the quickstart's GPT with a sharded optimizer of its own, stays in its block for the whole run,
and takes turns with the others in every round. The difference of whole iterations drowns in their noise, so what the
training thread spends inside each Join's own calls is measured as well: telling the others, waiting for the answer, and
for torch's also DDP's message about synchronization, which ours includes.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from contest import Times, compared, take_turns
from pairs import PairedTiming, median_interval
from progress_bar import calls
from rich.console import Console
from rich.table import Table
from spawned import machine, on_ranks
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel
from workloads import workload
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_integrations.join import Join
from zeroshard_integrations.join.backward_watch import BackwardWatch
from zeroshard_integrations.join.block import JoinBlock
from zeroshard_integrations.join.model import ModelInJoin

AT_MOST = 1.03
WARM_UP = 3
CONTENDERS: dict[str, Callable[[list[Any]], AbstractContextManager[Any]]] = {
    "no Join": lambda _: nullcontext(),
    "ours": Join,
    "torch's": TorchJoin,
}
BASE = "no Join"
CALLS: dict[str, list[tuple[type, str]]] = {
    "ours": [
        (JoinBlock, "_notified"),
        (ModelInJoin, "_after_forward"),
        (BackwardWatch, "_reached"),
        (BackwardWatch, "_gradient_of"),
        (BackwardWatch, "_task_ends"),
        (ModelInJoin, "_settled"),
    ],
    "torch's": [
        (TorchJoin, "notify_join_context"),
        (DistributedDataParallel, "_check_global_requires_backward_grad_sync"),
    ],
}
"""Per contender, the functions in which its training thread does what a Join block asks for."""


def main(
    pairs: Annotated[int, typer.Option(min=6, help="rounds; fewer than 6 have no interval")] = 21,
    ranks: Annotated[int, typer.Option(min=2, help="number of ranks")] = 2,
    in_a_row: Annotated[int, typer.Option(min=1, help="iterations of the GPT in each turn")] = 2,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures to this file")] = None,
) -> None:
    """Time iterations inside Join; the exit status is 1 if ours costs too much, or more than torch's."""
    console = Console()
    report = on_ranks(_contest, ranks, pairs, in_a_row)
    times: Times = report["seconds"]
    inside: dict[str, list[float]] = report["inside"]
    timings = {contender: compared(times, contender, BASE) for contender in times}
    console.print(_table(f"an iteration of the GPT, {ranks} ranks, {pairs} rounds", timings, inside))
    console.print(machine())
    share = statistics.median(inside["ours"]) / timings[BASE].median_a
    console.print(f"inside calls of ours: {share:.3%} of an iteration")
    met = 1 + share <= AT_MOST and statistics.median(inside["ours"]) < statistics.median(inside["torch's"])
    if json_file is not None:
        ratios = {key: asdict(timing) for key, timing in timings.items()}
        result = {"machine": machine(), "ranks": ranks, "pairs": pairs, "met": met, "ratios": ratios, **report}
        json_file.write_text(json.dumps(result), encoding="utf-8")
    raise typer.Exit(0 if met else 1)


def _table(title: str, timings: dict[str, PairedTiming], inside: dict[str, list[float]]) -> Table:
    table = Table(title=title)
    table.add_column("contender")
    for heading in ("ms", "ratio", "95 %", "us inside", "95 %"):
        table.add_column(heading, justify="right")
    for name, timing in timings.items():
        spent = [1e6 * seconds for seconds in inside.get(name, [])]
        table.add_row(
            name,
            f"{timing.median_a * 1e3:.2f}",
            f"{timing.ratio:.4f}",
            f"{timing.low:.4f} - {timing.high:.4f}",
            f"{statistics.median(spent):.0f}" if spent else "",
            "{:.0f} - {:.0f}".format(*median_interval(spent)) if spent else "",
        )
    return table


def _contest(rounds: int, iterations: int) -> dict[str, Times]:
    turns: dict[str, Callable[[], object]] = {}
    clocks = {contender: _Clock(functions) for contender, functions in CALLS.items()}
    with ExitStack() as blocks, calls("gpt", len(CONTENDERS) * (rounds + WARM_UP)) as advance:
        for contender, block in CONTENDERS.items():
            turns[contender] = _turn(block, blocks, iterations, clocks.get(contender))
        times = take_turns(turns, rounds, warm_up=WARM_UP, advance=advance)
    seconds = {contender: [each / iterations for each in of_turns] for contender, of_turns in times.items()}
    inside = {contender: [each / iterations for each in clock.turns[WARM_UP:]] for contender, clock in clocks.items()}
    return {"seconds": seconds, "inside": inside}


class _Clock:
    """Adds up the time that is spent in some functions.

    Args:
        functions: classes and the names of their functions; they are wrapped for good.
    """

    def __init__(self, functions: list[tuple[type, str]]) -> None:
        self.turns: list[float] = []
        self._depth = 0
        for owner, name in functions:
            found = owner.__dict__[name]
            is_static = isinstance(found, staticmethod)
            wrapped = self._wrapped(found.__func__ if is_static else found)
            setattr(owner, name, staticmethod(wrapped) if is_static else wrapped)

    def begin(self) -> None:
        """Begin another turn."""
        self.turns.append(0.0)

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the wrapped function
            started = perf_counter()
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0 and self.turns:
                    self.turns[-1] += perf_counter() - started

        return timed


def _turn(
    block: Callable[[list[Any]], AbstractContextManager[Any]],
    blocks: ExitStack,
    iterations: int,
    clock: _Clock | None,
) -> Callable[[], object]:
    """Build a model in a block that is left when the run is over; the function trains it for some iterations."""
    work = workload("gpt", 0)
    model = work.build()
    data = cycle(work.batches(8, dist.get_rank(), dist.get_world_size()))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-4)
    blocks.enter_context(block([ddp, optimizer]))

    def train() -> None:
        if clock is not None:
            clock.begin()
        for _ in range(iterations):
            optimizer.zero_grad()
            ddp(*next(data)).backward()
            optimizer.step()

    return train


if __name__ == "__main__":
    typer.run(main)
