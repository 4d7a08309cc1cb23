"""The command ``zeroshard plan``: bytes, work and traffic of each rank, from shapes alone."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command ``zeroshard``; what it needs is in the extra ``zeroshard[cli]``, and transformers for configs."""
    try:
        from zeroshard.planner.cli import run

        run()
    except ModuleNotFoundError as missing:
        source = missing.name if missing.name in ("transformers", "safetensors") else "'zeroshard[cli]'"
        sys.stderr.write(f"zeroshard: {missing.name} is not installed, which this needs: pip install {source}\n")
        sys.exit(2)
