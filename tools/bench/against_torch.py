"""What training with sharded state may take in comparison with torch's ZeroRedundancyOptimizer with bucket views.

``iteration`` is the processor time of a rank for an iteration over 200 tensors of 10,000 elements, in which computing
takes little. ``start`` is that of construction and the first two iterations, without imports and DDP's construction.
``memory`` is the peak of resident memory over what was resident before the model was built, 8 x Linear(2000, 2000), in
fresh processes. Each is measured in several launches: times are medians of the launches' ratios, memory is the least of
ours to the least of torch's.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from race import memory, race, start
from resident import return_freed_memory
from rich.console import Console
from rich.table import Table
from spawned import machine, on_ranks

TORCH = "torch-zero-views"
TRANSPORTS = {"memory": "1", "messages": "0"}
"""Values of ZEROSHARD_CROSS_MEMORY: whether ranks of one host read each other's memory, where the kernel lets them."""
_IN_A_ROW, _LAYERS = 5, 8
_WIDTH = 120


@dataclass(frozen=True)
class Case:
    """What is measured, in one setting.

    Attributes:
        measure: iteration, start or memory.
        model: of the workload.
        ranks: number of ranks.
        transport: one of :data:`TRANSPORTS`.
        most: per contender that is compared with torch's, what the ratio may be, or None.
    """

    measure: str
    model: str
    ranks: int
    transport: str
    most: dict[str, float | None]


@dataclass(frozen=True)
class Figure:
    """A ratio.

    Attributes:
        case: what was measured.
        contender: compared with torch's.
        ours: seconds or bytes, one for each launch.
        torchs: the same of torch's.
    """

    case: Case
    contender: str
    ours: list[float]
    torchs: list[float]

    @property
    def ratio(self) -> float:
        """Of ours to torch's; see the module."""
        if self.case.measure == "memory":
            return min(self.ours) / min(self.torchs)
        return statistics.median(ours / torchs for ours, torchs in zip(self.ours, self.torchs, strict=True))

    @property
    def most(self) -> float | None:
        """What it may be."""
        return self.case.most[self.contender]

    @property
    def met(self) -> bool:
        """Whether it is no more than that."""
        return self.most is None or self.ratio <= self.most


def _cases() -> Iterator[Case]:
    for ranks, most in ((2, 1.00), (4, 0.90), (8, 0.90), (16, 0.90)):
        for transport, bound in (("memory", most), ("messages", 1.10)):
            yield Case("iteration", "tensors", ranks, transport, {"owner-whole": bound})
            yield Case("iteration", "rows", ranks, transport, {"owner-whole": None, "owner-split": None})
    yield Case("start", "tensors", 16, "memory", {"owner-whole": 2.0})
    yield Case("start", "rows", 16, "memory", {"owner-whole": None, "owner-split": None})
    for ranks in (2, 4):
        every = ("step-whole", "step-split", "owner-whole", "owner-split")
        yield Case("memory", "mlp", ranks, "memory", dict.fromkeys(every, 1.03))


CASES = tuple(_cases())
MEASURES = tuple(dict.fromkeys(case.measure for case in CASES))
MODELS = tuple(dict.fromkeys(case.model for case in CASES))


def main(
    measure: Annotated[list[str] | None, typer.Argument(help=f"of {', '.join(MEASURES)}; all by default")] = None,
    ranks: Annotated[list[int] | None, typer.Option(help="only these numbers of ranks")] = None,
    transport: Annotated[list[str] | None, typer.Option(help=f"only these of {', '.join(TRANSPORTS)}")] = None,
    model: Annotated[list[str] | None, typer.Option(help=f"only these of {', '.join(MODELS)}")] = None,
    launches: Annotated[int, typer.Option(min=1, help="of each case")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help=f"turns of {_IN_A_ROW} iterations in a launch")] = 4,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures to this file")] = None,
) -> None:
    """Measure and compare; the exit status is 1 if a bound is missed, 2 if there is nothing to be measured."""
    cases = [
        case
        for case in CASES
        if case.measure in (measure or MEASURES)
        and case.ranks in (ranks or [case.ranks])
        and case.transport in (transport or TRANSPORTS)
        and case.model in (model or MODELS)
    ]
    if not cases:
        raise typer.BadParameter(f"no case is so; there are {', '.join(MEASURES)} with {', '.join(MODELS)}")
    figures = []
    for number, case in enumerate(cases, 1):
        typer.echo(f"{number} of {len(cases)}: {case.measure}, {case.model}, {case.ranks} ranks", err=True)
        values = [_measured(case, rounds) for _ in range(launches)]
        torchs = [found[TORCH] for found in values]
        figures += [Figure(case, name, [found[name] for found in values], torchs) for name in case.most]
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(_table(figures))
    console.print(machine())
    met = all(figure.met for figure in figures)
    if json_file is not None:
        found = [{**asdict(figure), "ratio": figure.ratio, "met": figure.met} for figure in figures]
        json_file.write_text(json.dumps({"machine": machine(), "met": met, "figures": found}), encoding="utf-8")
    raise typer.Exit(0 if met else 1)


def _measured(case: Case, rounds: int) -> dict[str, float]:
    """Return the seconds or bytes of one launch of each contender, or of one of all where they take turns."""
    os.environ["ZEROSHARD_CROSS_MEMORY"] = TRANSPORTS[case.transport]
    names = [TORCH, *case.most]
    if case.measure == "start":
        return {name: on_ranks(start, case.ranks, name, case.model, _LAYERS) for name in names}
    if case.measure == "memory":
        # Cases of memory are the last ones: with this, processor time would be another.
        return_freed_memory()
        every = {name: on_ranks(memory, case.ranks, name, case.model, _LAYERS) for name in names}
        return {name: max(peak["overall"] for peak in _of(name, found)["peaks"]) for name, found in every.items()}
    raced = on_ranks(race, case.ranks, names, case.model, _LAYERS, rounds, _IN_A_ROW, False, True)
    return {name: statistics.median(_of(name, found)["seconds"]) for name, found in raced.items()}


def _of(name: str, found: dict[str, Any]) -> dict[str, Any]:
    if "error" in found:
        typer.echo(f"{name} does not run: {found['error']}", err=True)
        raise typer.Exit(2)
    return found


def _table(figures: list[Figure]) -> Table:
    table = Table(title=f"To {TORCH}")
    for heading in ("measure", "model", "ranks", "by", "contender", "ours", "torch's", "ratio", "at most", "met"):
        table.add_column(heading, justify="left" if heading in ("measure", "model", "by", "contender") else "right")
    for figure in figures:
        case = figure.case
        unit, middle = (1e6, min) if case.measure == "memory" else (1e-3, statistics.median)
        sizes = [f"{middle(values) / unit:.1f} {'MB' if unit > 1 else 'ms'}" for values in (figure.ours, figure.torchs)]
        bound = ["", ""] if figure.most is None else [f"{figure.most:.2f}", "yes" if figure.met else "no"]
        names = (case.measure, case.model, str(case.ranks), case.transport, figure.contender)
        table.add_row(*names, *sizes, f"{figure.ratio:.2f}", *bound)
    return table


if __name__ == "__main__":
    typer.run(main)
