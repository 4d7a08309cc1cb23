"""The page of benchmarks: its text is written by hand, its tables and pictures are made from docs/measured."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

from bench.drawing import OTHERS, OURS, PLAIN, TEXT, picture
from bench.results import Result

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
_BLOCK = re.compile(r"(<!-- (measured/\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_DRAWN = {
    "ddp": ("DDP, not sharded", PLAIN),
    "torch-zero-views": ("torch's ZeRO", OTHERS),
    "fsdp2": ("FSDP2", OTHERS),
    "hook-split": ("zeroshard in DDP", OURS),
    "sharded-split": ("zeroshard, sharded gradients", OURS),
}
"""Contenders in pictures, by name, with what they are called there and their color."""


def write(page: Path = PAGE) -> None:
    """Write each table of a page from the file that the comment above it names, and draw the pictures that it shows."""
    text = _BLOCK.sub(lambda match: f"{match[1]}\n{_block(page.parent, match[2])}\n{match[3]}", page.read_text("utf-8"))
    page.write_text(text, encoding="utf-8")
    for name in re.findall(r"\(pictures/(\S+)\.svg\)", text):
        draw(Result.read(page.parent / "measured" / f"{name}.json"), page.parent / "pictures" / f"{name}.svg")


def _block(folder: Path, name: str) -> str:
    if name.endswith(".md"):
        return gpus_of(sorted(folder.glob(name)))
    result = Result.read(folder / name)
    described = ", ".join(f"{key}: {value}" for key, value in result.machine.items())
    return f"{result.title}\n\n{result.table()}\n\nCommand: `{result.command}`\n\nMachine: {described}\n"


def gpus_of(reports: Sequence[Path]) -> str:
    """Return the list of the reports that tools/gpu_check has written."""
    if not reports:
        return "There is no report of a GPU yet.\n"
    lines = ["| GPU | torch | CUDA | NCCL | commit | steps |", "| --- | --- | --- | --- | --- | --- |"]
    for report in reports:
        text = report.read_text(encoding="utf-8")
        facts = dict(re.findall(r"^\| ([\w ]+) \| (.*) \|$", text, re.MULTILINE))
        [(device, verdicts)] = re.findall(r"^# gpu-check: (.*)\n\n\d+ steps: (.*?)\.", text)
        cells = [f"[{device}](measured/{report.name})", *(facts[name] for name in ("torch", "CUDA", "NCCL", "commit"))]
        lines.append(f"| {' | '.join(cells)} | {verdicts} |")
    tree = "".join(f"measured/{report.stem}\n" for report in reports)
    return "\n".join([*lines, f"\n```{{toctree}}\n:hidden:\n\n{tree}```\n"])


def draw(result: Result, file: Path) -> None:
    """Draw bars of some contenders: ratios with their intervals, or figures by the number of ranks."""
    bars: list[tuple[str, str, list[float]]] = []
    for row in result.rows:
        name, color = _DRAWN.get(row["contender"], ("", ""))
        for column, value in row.items() if name else ():
            if isinstance(value, list):
                bars.append((name, color, value))
            elif column.endswith(" ranks"):
                bars.append((f"{name}, {column}", color, [value] * 3))
    with picture(file, 4.6, 1.8 + (0.2 if len(bars) > 8 else 0.3) * len(bars)) as (_, panel):
        panel.barh([name for name, *_ in bars], [value[0] for *_, value in bars], color=[bar[1] for bar in bars])
        for place, (*_, (middle, low, high)) in enumerate(bars):
            panel.plot([low, high], [place, place], color=TEXT, linewidth=1.5)
            panel.annotate(f"{middle:.2f}", (high, place), xytext=(4, 0), textcoords="offset points", va="center")
        panel.invert_yaxis()
        panel.margins(x=0.12)
        panel.tick_params(axis="y", length=0)
        panel.set_xlabel("times DDP's" if "/ ddp" in result.rows[0] else "times the parameters")
        panel.figure.suptitle(finding(result), x=0.01, ha="left", fontweight="bold", fontsize=10)
        panel.figure.supxlabel("\n".join(wrap(result.title, 60)), x=0.01, ha="left", fontsize=9)


def finding(result: Result) -> str:
    """Return two lines that say what a picture shows: sharded gradients beside DDP."""
    rows = {row["contender"]: row for row in result.rows}
    ours, plain = rows["sharded-split"], rows["ddp"]
    if counts := [name for name in ours if name.endswith(" ranks")]:
        less = 1 - ours[counts[-1]] / plain[counts[-1]]
        return f"{less:.0%} less memory than DDP\nwith sharded gradients on {counts[-1]}"
    return f"{ours['/ ddp'][0]:.2f} x DDP's time\nwith sharded gradients"
