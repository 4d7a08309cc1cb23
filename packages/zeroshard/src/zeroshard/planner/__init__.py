"""The command ``zeroshard plan``: bytes, work and traffic of each rank, from shapes alone."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command ``zeroshard``; what it needs is in the extra ``zeroshard[cli]``."""
    try:
        from zeroshard.planner.cli import run
    except ModuleNotFoundError as missing:
        sys.exit(f"zeroshard: {missing.name} is not installed, which the command needs: pip install 'zeroshard[cli]'")
    run()
