"""The pictures of docs/benchmarks.md: what runs of the benchmarks found, at a glance."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from drawing import OTHERS, OURS, PLAIN, TEXT, picture
from training_result import DDP, Result
from workloads import Layers
from zeroshard import predict

_WIDTH = 3.75
_NAMES = {
    DDP: "DDP, not sharded",
    "owner-whole": "zeroshard",
    "interleaved-split": "zeroshard, interleaved",
}
"""Of what is drawn beside torch's: the hook that leaves stepping to step(), and the one that steps each bucket."""


def draw_memory(results: Sequence[Result], file: Path) -> None:
    """Draw the peak memory of a rank, as a multiple of the parameters, by the number of ranks.

    Args:
        results: runs with memory, of one model on different numbers of ranks.
        file: to write.
    """
    bars: list[tuple[str, float, str]] = []
    by_ranks = {result.ranks: _peaks(result) for result in sorted(results, key=lambda result: result.ranks)}
    bars += [("DDP, not sharded", peaks[DDP], PLAIN) for peaks in list(by_ranks.values())[:1] if DDP in peaks]
    bars += [
        (f"{_NAMES['owner-whole']}, {ranks} ranks", peaks["owner-whole"], OURS)
        for ranks, peaks in by_ranks.items()
        if "owner-whole" in peaks
    ]
    with picture(file, _WIDTH, 1.05 + 0.3 * len(bars)) as (_, panel):
        names, sizes, colors = zip(*bars, strict=True)
        shown = panel.barh(names, sizes, color=colors, height=0.7)
        panel.bar_label(shown, fmt="%.2f", padding=3)
        marks = [_predicted(results[0], ranks) for ranks in (1, *by_ranks)][-len(bars) :]
        panel.plot(marks, names, "|", color=TEXT, markersize=14)
        panel.axvline(2, color=TEXT, linestyle=":", linewidth=1.2)
        panel.annotate(
            "parameters and gradients", (2, 1), xycoords=("data", "axes fraction"), xytext=(0, 2),
            textcoords="offset points", ha="center", va="bottom", fontsize=8,
        )  # fmt: skip
        panel.invert_yaxis()
        panel.margins(x=0.12)
        panel.tick_params(axis="y", length=0)
        panel.set_xlabel("peak memory of a rank / parameters\n| as predicted from shapes")


def draw_time(result: Result, file: Path) -> None:
    """Draw the time of an iteration relative to DDP's, with its 95 % interval.

    Args:
        result: of a run in which DDP took part.
        file: to write.
    """
    rows = _ratios(result)
    ddp = next(seconds for entry in result.entries if entry.name == DDP and (seconds := result.median(entry)))
    with picture(file, _WIDTH, 1.1 + 0.3 * len(rows)) as (_, panel):
        panel.barh([row[0] for row in rows], [row[1] for row in rows], color=[row[-1] for row in rows], height=0.7)
        for place, (_, ratio, low, high, _) in enumerate(rows):
            panel.plot([low, high], [place, place], color=TEXT, linewidth=1.5)
            panel.annotate(
                f"{ratio:.2f}", (max(high, ratio), place), xytext=(4, 0), textcoords="offset points", va="center"
            )
        panel.axvline(1, color=TEXT, linestyle=":", linewidth=1.2)
        panel.set_title(f"{place_of(result)}: DDP takes {1e3 * ddp:.0f} ms", loc="center")
        panel.invert_yaxis()
        panel.margins(x=0.12)
        panel.tick_params(axis="y", length=0)
        panel.set_xlabel("time of an iteration / DDP's")


def place_of(result: Result) -> str:
    """Return the model and the network of a run, in few words."""
    network = "one machine" if result.link is None else result.link.replace("gbit", " Gbit/s")
    return f"{result.model.partition(',')[0]}, {network}"


def draw_ranks(figures: Mapping[int, Mapping[str, Any]], file: Path) -> None:
    """Draw what a step costs a rank by the number of ranks: computing and issuing, without what the network takes.

    Args:
        figures: by the number of ranks, ``step_seconds`` and ``megabytes``.
        file: to write.
    """
    ranks = sorted(figures)
    with picture(file, _WIDTH, 2.9, 2, sharex=True) as (_, (time, memory)):
        for panel, label, values, unit in (
            (time, "time of step()", [1e3 * figures[count]["step_seconds"] for count in ranks], "ms"),
            (memory, "memory of the optimizer", [figures[count]["megabytes"] for count in ranks], "MB"),
        ):
            panel.plot(ranks, values, "o-", color=OURS, markersize=4)
            panel.set_xscale("log", base=2)
            panel.set_ylim(0, 1.35 * max(values))
            panel.set_title(f"{label} ({unit})")
            for count, value in zip(ranks, values, strict=True):
                panel.annotate(f"{value:.0f}", (count, value), xytext=(0, 5), textcoords="offset points", ha="center")
        memory.set_xticks(ranks, [f"{count:,}" for count in ranks])
        memory.minorticks_off()
        memory.set_xlabel("ranks")


def _predicted(result: Result, ranks: int) -> float:
    """What a rank holds of the benchmark's model, as a multiple of the parameters."""
    layers = re.search(r"(\d+) x Linear", result.model)
    with torch.device("meta"):
        model = Layers(int(layers[1]) if layers else 1)
    params = sum(param.nbytes for param in model.parameters())
    return predict(model, torch.optim.Adam, ranks=ranks, backend="gloo").largest.total / params


def _peaks(result: Result) -> dict[str, float]:
    return {
        entry.name: mean(peak["overall"] for peak in entry.peaks) / result.parameter_bytes
        for entry in result.entries
        if entry.peaks
    }


def _ratios(result: Result) -> list[tuple[str, float, float, float, str]]:
    """Name, ratio to DDP with both ends of its interval, and colour, of DDP, the better of torch's, and zeroshard's."""
    found = []
    for entry in result.entries:
        name, color = _NAMES.get(entry.name), OURS
        if entry.name == result.torch_zero:
            name, color = "torch's ZeRO", OTHERS
        timing = result.ratio(entry, DDP)
        if name is not None and timing is not None:
            color = PLAIN if entry.name == DDP else color
            found.append((name, timing.ratio, timing.low, timing.high, color))
    return found
