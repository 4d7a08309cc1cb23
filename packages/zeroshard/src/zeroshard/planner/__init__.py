"""Implements the command ``zeroshard plan``: it predicts bytes, work and traffic of each rank, from shapes alone."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command ``zeroshard``. It needs the extra ``zeroshard[cli]``, and transformers to read configs."""
    try:
        from zeroshard.planner.cli import run

        run()
    except ImportError as missing:
        package = "'zeroshard[cli]'" if missing.name in ("typer", "rich", "matplotlib") else missing.name
        cure = f": pip install {package}" if isinstance(missing, ModuleNotFoundError) else ""
        sys.stderr.write(f"zeroshard: {missing}{cure}\n")
        sys.exit(2)
