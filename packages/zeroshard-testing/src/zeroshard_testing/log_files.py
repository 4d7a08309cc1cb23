"""A log file for each rank of a test that has failed: how it ended there, and all that it wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from zeroshard_testing.outcome import Outcome


def write_log_files(
    folder: Path, test: str, outcomes: Mapping[int, Outcome], stdout: Mapping[int, str], stderr: Mapping[int, str]
) -> Path:
    """Write ``rank0.log`` and so on into a folder of the test's own, over those of an earlier run.

    Args:
        folder: Where the tests' folders are; made if it does not exist.
        test: The test's id.
        outcomes: How it ended on each rank.
        stdout: What ranks wrote to standard output.
        stderr: Likewise for standard error.

    Returns:
        The test's folder.

    Raises:
        OSError: If a file cannot be written.
    """
    own = folder / (re.sub(r"[^\w.\[\]-]+", "_", test)[-150:] or "test")
    own.mkdir(parents=True, exist_ok=True)
    for old in own.glob("rank*.log"):
        old.unlink()
    for rank, outcome in outcomes.items():
        parts = [
            f"{test}, rank {rank}: {outcome.predicate or outcome.kind}",
            outcome.detail,
            *(f"{name}:\n{texts[rank]}" for name, texts in (("stdout", stdout), ("stderr", stderr)) if rank in texts),
        ]
        (own / f"rank{rank}.log").write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
    return own
