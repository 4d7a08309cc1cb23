"""Starts the trial of all optimizers: ``python tools/optimizer_page --help``."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

# The trials also import this folder by its name, in their own processes.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from optimizer_page.cli import main

if __name__ == "__main__":
    typer.run(main)
