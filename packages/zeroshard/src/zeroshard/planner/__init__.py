"""Implements the command ``zeroshard plan``: it predicts bytes, work and traffic of each rank, from shapes alone."""

from __future__ import annotations

import sys

from zeroshard.planner.models import InputError


def main() -> None:
    """Run the command ``zeroshard``. It needs the extra ``zeroshard[cli]``, and transformers to read configs."""
    try:
        from zeroshard.planner.cli import app

        app()
    except (InputError, ImportError) as error:
        cure = ""
        if isinstance(error, ModuleNotFoundError):
            package = "'zeroshard[cli]'" if error.name in ("typer", "matplotlib") else error.name
            cure = f": pip install {package}"
        sys.stderr.write(f"zeroshard: {error}{cure}\n")
        sys.exit(2)
