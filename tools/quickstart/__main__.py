"""Starts the quickstart: ``python tools/quickstart --help``."""

from __future__ import annotations

from cli import app

if __name__ == "__main__":
    app(prog_name="quickstart")
