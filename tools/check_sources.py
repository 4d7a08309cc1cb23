"""Checks the number of lines of Python in the packages and the tools: ``python tools/check_sources.py``."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
CEILINGS = {
    "packages/zeroshard-core/src": 1835,
    "packages/zeroshard-comm/src": 3235,
    "packages/zeroshard/src": 11203,
    "packages/zeroshard-integrations/src": 1543,
    "packages/zeroshard-testing/src": 7180,
    "tools": 6200,
}
"""The maximum number of lines by folder, including blank lines and comments. If you delete lines, lower the ceiling."""


def count(folder: Path) -> int:
    """Return the number of lines of all sources in a folder."""
    return sum(file.read_bytes().count(b"\n") for file in folder.rglob("*.py"))


def main(root: Path = ROOT) -> int:
    """Print a line for each folder; the exit status is 1 if one has no sources, or too many lines."""
    lines = {name: count(root / name) for name in CEILINGS}
    wrong = [name for name, ceiling in CEILINGS.items() if not 0 < lines[name] <= ceiling]
    for name, ceiling in CEILINGS.items():
        print(f"{name:36}{lines[name]:6} of {ceiling:5}{'  remove lines from it' if name in wrong else ''}")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
