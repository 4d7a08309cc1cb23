"""Checks that pages, messages and docstrings are free of the phrases in ``idioms.txt``, which readers stumbled over.

Run as ``python tools/check_idioms.py``. It searches the prose of the pages, outside of code, and each string of
several words in the packages.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("idioms.txt")
PAGES = ("*.md", "docs/**/*.md", "packages/*/README.md")
SOURCES = "packages/*/src/**/*.py"
WORDS = 3
"""A string of fewer words is a name or a format, not a message."""


def read(text: str) -> list[re.Pattern[str]]:
    """Return the patterns of the list."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [re.compile(line.replace(" ", r"\s+"), re.IGNORECASE) for line in lines]


def prose(page: str) -> str:
    """Return a page with its code blocks and inline code blank, line by line."""
    fenced = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1", re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "``", fenced.sub(lambda block: "\n" * block[0].count("\n"), page))


def strings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each string of a module that has words; values in it are left out."""
    nodes = list(ast.walk(ast.parse(source)))
    parts = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            text = node.value
        else:
            continue
        if len(text.split()) >= WORDS:
            yield node.lineno, text


def check(root: Path, patterns: Sequence[re.Pattern[str]]) -> list[str]:
    """Return a line for each phrase found, sorted by file and line."""
    pages = {file for pattern in PAGES for file in root.glob(pattern) if "_build" not in file.parts}
    texts = [(file, 1, prose(file.read_text(encoding="utf-8"))) for file in pages]
    for file in root.glob(SOURCES):
        texts += [(file, line, text) for line, text in strings(file.read_text(encoding="utf-8"))]
    found = {
        (file.relative_to(root).as_posix(), line + text.count("\n", 0, match.start()), " ".join(match[0].split()))
        for file, line, text in texts
        for pattern in patterns
        for match in pattern.finditer(text)
    }
    return [f"{name}:{line}: {phrase!r}" for name, line, phrase in sorted(found)]


def main() -> int:
    """Print what was found; the exit status is 1 if there is anything."""
    found = check(ROOT, read(LIST.read_text(encoding="utf-8")))
    print(*found, f"idioms: {len(found)} found; tools/idioms.txt says what to write instead", sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
