"""Starts the comparison of harnesses: ``python tools/harness_table --help``."""

from __future__ import annotations

import sys
from pathlib import Path

# The trials import this folder by its name too, in processes of their own.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness_table.cli import app

if __name__ == "__main__":
    app(prog_name="harness_table")
