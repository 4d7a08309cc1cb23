"""Draw two iterations of DDP training with sharded state, as torch's profiler sees what the threads of rank 0 do.

The model is the training benchmark's. Shown are DDP's forward, autograd's functions together as backward, and what the
packages mark with ``record_function``: ranges whose names begin with ``zeroshard::``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from contenders import CONTENDERS, OURS
from drawing import TEXT, picture
from spawned import on_ranks
from torch.profiler import ProfilerActivity, profile
from workloads import mlp

PICTURE = Path(__file__).parents[2] / "docs" / "profile.svg"
FORWARD, BACKWARD = "forward", "backward"
OURS_BEGIN = "zeroshard::"
_FORWARD_BEGINS, _BACKWARD_BEGINS = "DistributedDataParallel.forward", "autograd::engine::evaluate_function"
_ITERATIONS_BEFORE, _ITERATIONS = 3, 2
_JOINED_WITHIN = 0.005
"""Functions of autograd are one bar if what lies between is less than this part of the picture."""
_LETTER = 0.01
"""Width of a letter, as a part of the picture's."""
_MODEL_COLORS = {FORWARD: "#c9ced6", BACKWARD: "#9aa0a6"}


@dataclass(frozen=True)
class Bar:
    """A range of time.

    Attributes:
        name: ``forward``, ``backward``, or the range's without its first word.
        thread: number of the thread that was in it.
        start: in milliseconds, from the first one.
        end: in milliseconds.
    """

    name: str
    thread: int
    start: float
    end: float

    @property
    def phase(self) -> str:
        """First word of the name, which its colour is for."""
        return self.name.split()[0]


def main(
    file: Annotated[Path, typer.Option("--file", help="picture to write; its suffix decides how")] = PICTURE,
    contender: Annotated[str, typer.Option(help=f"one of {', '.join(OURS)}")] = "owner-whole",
    layers: Annotated[int, typer.Option(min=1, help="of the model")] = 6,
    ranks: Annotated[int, typer.Option(min=1, help="number of ranks")] = 2,
) -> None:
    """Profile and draw."""
    if contender not in OURS:
        raise typer.BadParameter(f"no contender {contender}; there are: {', '.join(OURS)}", param_hint="--contender")
    ranges = bars(on_ranks(_profiled, ranks, contender, layers))
    draw(ranges, f"{mlp(layers).name}, rank 0 of {ranks}: {CONTENDERS[contender].what}", file)
    found = sorted({bar.phase for bar in ranges} - {FORWARD, BACKWARD})
    typer.echo(f"{file}: {', '.join(found) or f'no range that begins with {OURS_BEGIN}'}")


def bars(events: Sequence[tuple[str, int, float, float]]) -> list[Bar]:
    """Return what is drawn of a profile, in the order of their starts.

    >>> bars([("zeroshard::broadcast bucket 1", 2, 1000.0, 3000.0), ("aten::mm", 1, 2000.0, 3000.0)])
    [Bar(name='broadcast bucket 1', thread=2, start=0.0, end=2.0)]

    Args:
        events: name, thread, start and end in microseconds of each event.
    """
    named = [(_name(name), thread, start, end) for name, thread, start, end in events]
    shown = sorted((event for event in named if event[0] is not None), key=lambda event: (event[2], -event[3]))
    if not shown:
        return []
    first, last = shown[0][2], max(event[3] for event in shown)
    found: list[Bar] = []
    backward: dict[int, Bar] = {}
    for name, thread, start, end in shown:
        bar = Bar(str(name), thread, (start - first) / 1e3, (end - first) / 1e3)
        before = backward.get(thread)
        if bar.name == BACKWARD:
            if before is not None and bar.start - before.end < _JOINED_WITHIN * (last - first) / 1e3:
                found.remove(before)
                bar = Bar(BACKWARD, thread, before.start, max(before.end, bar.end))
            backward[thread] = bar
        found.append(bar)
    return sorted(found, key=lambda bar: (bar.start, -bar.end))


def draw(ranges: Sequence[Bar], title: str, file: Path) -> None:
    """Draw a lane for each thread.

    Args:
        ranges: in the order of their starts.
        title: above the picture.
        file: to write.
    """
    width = max((bar.end for bar in ranges), default=1.0)
    lanes = _lanes(ranges)
    rows = [(title, row) for title, lane in lanes for row in lane]
    phases = [phase for phase in dict.fromkeys(bar.phase for bar in ranges) if phase not in _MODEL_COLORS]
    colors = _MODEL_COLORS | {phase: f"C{number}" for number, phase in enumerate(phases)}
    with picture(file, 7.6, 1.4 + 0.42 * len(rows)) as (figure, panel):
        for number, (_, row) in enumerate(rows):
            for bar in row:
                length = bar.end - bar.start
                panel.barh(number, length, left=bar.start, color=colors[bar.phase], height=0.8)
                fitting = [text for text in (bar.name, bar.name.split()[-1]) if len(text) * _LETTER * width < length]
                if fitting:
                    middle = bar.start + length / 2
                    panel.text(middle, number, fitting[0], ha="center", va="center", fontsize=8, color="black")
        place = 0
        for name, lane in lanes:
            panel.text(-0.01 * width, place + (len(lane) - 1) / 2, name, ha="right", va="center")
            place += len(lane)
            panel.axhline(place - 0.5, color=TEXT, linewidth=0.5)
        handles = [panel.barh(0, 0, color=color) for color in colors.values()]
        figure.legend(handles, list(colors), loc="outside lower center", ncols=4)
        panel.invert_yaxis()
        panel.set_yticks([])
        panel.set_xlim(0, width)
        panel.set_xlabel("ms")
        panel.set_title(title)
        panel.spines["left"].set_visible(False)


def _name(event: str) -> str | None:
    if event.startswith(OURS_BEGIN):
        return event.removeprefix(OURS_BEGIN)
    return FORWARD if event.startswith(_FORWARD_BEGINS) else BACKWARD if event.startswith(_BACKWARD_BEGINS) else None


def _lanes(ranges: Sequence[Bar]) -> list[tuple[str, list[list[Bar]]]]:
    """Return per lane a title and its rows; threads that live one after another share a lane."""
    threads: dict[int, list[Bar]] = {}
    for bar in ranges:
        threads.setdefault(bar.thread, []).append(bar)
    # The thread that calls forward comes first.
    order = sorted(threads.values(), key=lambda bars: (all(bar.name != FORWARD for bar in bars), bars[0].start))
    lanes: list[list[Bar]] = []
    for thread in order:
        free = next((lane for lane in lanes[1:] if max(bar.end for bar in lane) <= thread[0].start), None)
        lanes.append(thread) if free is None else free.extend(thread)
    others = [f"worker thread {number}" if len(lanes) > 2 else "worker thread" for number in range(1, len(lanes))]
    return [(name, _rows(lane)) for name, lane in zip(["main thread", *others], lanes, strict=False)]


def _rows(lane: Iterable[Bar]) -> list[list[Bar]]:
    """Return the model's bars, if there are any, and below each of ours those that lie within it."""
    rows: list[list[Bar]] = [[]]
    open_: list[Bar] = []
    for bar in lane:
        if bar.name in _MODEL_COLORS:
            rows[0].append(bar)
            continue
        open_ = [outer for outer in open_ if outer.end > bar.start]
        open_.append(bar)
        rows += [[] for _ in range(len(open_) + 1 - len(rows))]
        rows[len(open_)].append(bar)
    return [row for row in rows if row]


def _profiled(contender: str, layers: int) -> list[tuple[str, int, float, float]]:
    work = mlp(layers)
    trainer = CONTENDERS[contender].build(work)
    batches = work.batches(_ITERATIONS_BEFORE + _ITERATIONS, dist.get_rank(), dist.get_world_size())
    for batch in batches[:_ITERATIONS_BEFORE]:
        trainer.iterate(batch)
    # Without this, only the thread that begins the profile and those of autograd are in it.
    everyone: Any = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everyone) as profiled:
        for batch in batches[_ITERATIONS_BEFORE:]:
            trainer.iterate(batch)
    events: Any = profiled.events()
    return [(event.name, event.thread, event.time_range.start, event.time_range.end) for event in events]


if __name__ == "__main__":
    typer.run(main)
