"""Writes the report in Markdown: versions, a row for each step with its verdict, then what each step printed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone

from gpu_check.running import Outcome
from gpu_check.steps import NO_GPU


def report_of(machine: Mapping[str, str], commit: str, notes: Sequence[str], outcomes: Sequence[Outcome]) -> str:
    """Return the report of the steps so far on what `gpu_check.machine.describe` found; notes apply to all of it."""
    device = machine.get("GPU", NO_GPU)
    facts = {**machine, "commit": commit, "date": f"{datetime.now(timezone.utc):%Y-%m-%d}"}
    counts = Counter(outcome.verdict for outcome in outcomes)
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    parts = [
        f"# gpu-check: {'no GPU' if device == NO_GPU else device}",
        f"{len(outcomes)} steps: {told}. Command: `bash tools/gpu_check/gpu_check.sh`",
        _table(("", ""), facts.items()),
        "## Steps",
        _table(("step", "shows", "verdict", "s"), map(_row, outcomes)),
        *notes,
    ]
    for outcome in outcomes:
        if outcome.body:
            parts += [f"## {outcome.name} {outcome.title}", outcome.body]
    return "\n\n".join(parts) + "\n"


def _row(outcome: Outcome) -> tuple[str, ...]:
    # A reason may be the output of a program.
    detail = outcome.detail[:300].replace("|", "/")
    verdict = f"{outcome.verdict}: {detail}" if detail else outcome.verdict
    return outcome.name, outcome.title, verdict, f"{outcome.seconds:.0f}"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def slug(device: str) -> str:
    """Return a device's name as a file name: ``NVIDIA H100 PCIe`` is ``nvidia-h100-pcie``."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
