"""Time what a Join block costs while all ranks have data: one training loop without and with it.

Every contender trains the quickstart's GPT with a sharded optimizer of its own, stays in its block for the whole run,
and takes turns with the other in every round. The difference of whole iterations drowns in their noise, so what the
training thread spends inside Join's own calls is measured as well, on the clock and in processor time: telling the
others, and waiting for the answer. On the clock, what a rank waits for a slower one counts, which without Join it waits
in the reduction of gradients.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from time import perf_counter, thread_time
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
from torch.nn.parallel import DistributedDataParallel
from workloads import workload
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_integrations.join import Join
from zeroshard_integrations.join.context import JoinContext
from zeroshard_integrations.join.ddp_model import DDPModel

AT_MOST_US = 1500
WARM_UP = 3
CONTENDERS: dict[str, Callable[[list[Any]], AbstractContextManager[Any]]] = {
    "no Join": lambda _: nullcontext(),
    "ours": Join,
}
BASE = "no Join"
CALLS: dict[str, list[tuple[type, str]]] = {
    "ours": [
        (JoinContext, "_begin_forward"),
        (JoinContext, "_announce"),
        (DDPModel, "_first_gradient"),
        (DDPModel, "_end_backward"),
    ],
}
"""Per contender, the functions in which its training thread does what a Join block asks for."""


def main(
    pairs: Annotated[int, typer.Option(min=6, help="rounds; fewer than 6 have no interval")] = 21,
    ranks: Annotated[int, typer.Option(min=2, help="number of ranks")] = 2,
    in_a_row: Annotated[int, typer.Option(min=1, help="iterations of the GPT in each turn")] = 2,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures to this file")] = None,
) -> None:
    """Time iterations inside Join; the exit status is 1 if the calls of ours take too much processor time."""
    console = Console()
    report = on_ranks(_contest, ranks, pairs, in_a_row)
    times: Times = report["seconds"]
    inside: dict[str, list[float]] = report["inside"]
    processor: dict[str, list[float]] = report["processor"]
    timings = {contender: compared(times, contender, BASE) for contender in times}
    console.print(_table(f"an iteration of the GPT, {ranks} ranks, {pairs} rounds", timings, inside, processor))
    console.print(machine())
    met = 1e6 * statistics.median(processor["ours"]) <= AT_MOST_US
    if json_file is not None:
        ratios = {key: asdict(timing) for key, timing in timings.items()}
        result = {"machine": machine(), "ranks": ranks, "pairs": pairs, "met": met, "ratios": ratios, **report}
        json_file.write_text(json.dumps(result), encoding="utf-8")
    raise typer.Exit(0 if met else 1)


def _table(title: str, timings: dict[str, PairedTiming], *spent: dict[str, list[float]]) -> Table:
    table = Table(title=title)
    table.add_column("contender")
    for heading in ("ms", "ratio", "95 %", "us inside", "95 %", "us of processor", "95 %"):
        table.add_column(heading, justify="right")
    for name, timing in timings.items():
        cells = []
        for found in spent:
            microseconds = [1e6 * seconds for seconds in found.get(name, [])]
            cells.append(f"{statistics.median(microseconds):.0f}" if microseconds else "")
            cells.append("{:.0f} - {:.0f}".format(*median_interval(microseconds)) if microseconds else "")
        table.add_row(
            name,
            f"{timing.median_a * 1e3:.2f}",
            f"{timing.ratio:.4f}",
            f"{timing.low:.4f} - {timing.high:.4f}",
            *cells,
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
    spent = [
        {contender: [each[kind] / iterations for each in clock.turns[WARM_UP:]] for contender, clock in clocks.items()}
        for kind in (0, 1)
    ]
    return {"seconds": seconds, "inside": spent[0], "processor": spent[1]}


class _Clock:
    """Adds up the time that is spent in some functions.

    Args:
        functions: classes and the names of their functions; they are wrapped for good.
    """

    def __init__(self, functions: list[tuple[type, str]]) -> None:
        self.turns: list[list[float]] = []
        self._depth = 0
        for owner, name in functions:
            setattr(owner, name, self._wrapped(owner.__dict__[name]))

    def begin(self) -> None:
        """Begin another turn."""
        self.turns.append([0.0, 0.0])

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the wrapped function
            started = perf_counter(), thread_time()
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0 and self.turns:
                    self.turns[-1][0] += perf_counter() - started[0]
                    self.turns[-1][1] += thread_time() - started[1]

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
