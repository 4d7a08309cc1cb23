"""The version of the five packages: prints it, or sets it in every place that names it.

Run as ``python tools/version.py`` or ``python tools/version.py 0.2.0``. Each package has its version in its sources,
where its build reads it, and in the requirements of its siblings, because each is built from its own folder only.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = (
    ("packages/*/src/*/__init__.py", re.compile(r'(?<=^__version__ = ")[^"]+(?="$)', re.MULTILINE)),
    (
        "packages/*/pyproject.toml",
        re.compile(r'(?<="zeroshard-comm==)[^"]+|(?<="zeroshard-core==)[^"]+|(?<="zeroshard==)[^"]+'),
    ),
)
"""Patterns of files, each with the regular expression of the versions in them."""
_FORM = re.compile(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?")


def versions(root: Path = ROOT) -> set[str]:
    """Return every version that is named anywhere: one if all places agree."""
    return {
        found
        for pattern, version in PLACES
        for file in root.glob(pattern)
        for found in version.findall(file.read_text("utf-8"))
    }


def set_version(version: str, root: Path = ROOT) -> None:
    """Write a version to every place; exit if its form is not ``0.2.0``, ``0.2.0rc1`` or ``0.2.0.dev1``."""
    if not _FORM.fullmatch(version):
        raise SystemExit(f"a version looks like 0.2.0, 0.2.0rc1 or 0.2.0.dev1, not like {version!r}")
    for pattern, place in PLACES:
        for file in root.glob(pattern):
            file.write_text(place.sub(version, file.read_text("utf-8")), encoding="utf-8")


if __name__ == "__main__":
    for given in sys.argv[1:]:
        set_version(given)
    print(*sorted(versions()))
