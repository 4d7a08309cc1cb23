"""A log file for each rank of a test that has failed: how it ended there, and all that it wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from zeroshard_testing.outcome import Outcome


def write_log_files(folder: Path, test: str, outcomes: Mapping[int, Outcome]) -> Path:
    """Write ``rank0.log`` and so on into the test's own folder, over the files of an earlier run, and return it."""
    own = folder / (re.sub(r"[^\w.\[\]-]+", "_", test)[-150:] or "test")
    own.mkdir(parents=True, exist_ok=True)
    for old in own.glob("rank*.log"):
        old.unlink()
    for rank, outcome in outcomes.items():
        parts = [
            f"{test}, rank {rank}: {outcome.predicate or outcome.kind}",
            outcome.detail,
            *(f"{title}:\n{text}" for title, text in outcome.sections),
        ]
        (own / f"rank{rank}.log").write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
    return own
