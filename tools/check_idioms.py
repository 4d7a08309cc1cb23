"""Checks that documentation and messages are free of the phrases in ``idioms.txt``, which readers stumbled over.

Run as ``python tools/check_idioms.py``: it looks at the README, at the pages and at the files for contributors, outside
of code blocks. With ``--sources`` it looks at the packages too: at each string that is shown to a person, messages and
docstrings.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("idioms.txt")
PAGES = ("*.md", "docs/**/*.md", "packages/*/README.md")
SOURCES = ("packages/*/src/**/*.py",)
WORDS = 3
"""A string of fewer words is a name or a format, and no message."""


@dataclass(frozen=True)
class Exempt:
    """Where a phrase may stand.

    Attributes:
        file: relative to the root.
        part: of the line.
        reason: why.
    """

    file: str
    part: str
    reason: str


@dataclass(frozen=True)
class Idioms:
    """What ``idioms.txt`` holds: patterns, and where they may stand."""

    patterns: tuple[re.Pattern[str], ...]
    exempt: tuple[Exempt, ...]

    @classmethod
    def read(cls, text: str) -> Idioms:
        """Read the list.

        Raises:
            ValueError: if an exception has no reason, or a pattern no comment above it.
        """
        patterns, exempt, comment = [], [], ""
        for line in text.splitlines():
            if line.startswith("@"):
                parts = [part.strip() for part in line[1:].split("|")]
                if len(parts) != 3 or not all(parts):
                    raise ValueError(f"an exception is '@ file | part of the line | reason', and not {line!r}")
                exempt.append(Exempt(*parts))
            elif line.startswith("#"):
                comment = line
            elif line.strip():
                if not comment:
                    raise ValueError(f"the pattern {line!r} has no comment above it that says what to write instead")
                patterns.append(re.compile(line.replace(" ", r"\s+"), re.IGNORECASE))
            else:
                comment = ""
        return cls(tuple(patterns), tuple(exempt))

    def found_in(self, file: str, text: str, first_line: int = 1) -> Iterator[tuple[int, str]]:
        """Yield the line number and the phrase of each that is not exempt."""
        lines = text.splitlines()
        for pattern in self.patterns:
            for match in pattern.finditer(text):
                number = text.count("\n", 0, match.start())
                line = lines[number]
                if not any(each.file == file and each.part in line for each in self.exempt):
                    yield first_line + number, " ".join(match[0].split())


def prose(page: str) -> str:
    """Return a page with its code blocks and inline code blank, line by line."""
    kept, fence = [], ""
    for line in page.splitlines():
        mark = re.match(r"\s*(```+|~~~+)", line)
        if mark and not fence:
            fence = mark[1]
            kept.append("")
        elif fence:
            if mark and mark[1].startswith(fence):
                fence = ""
            kept.append("")
        else:
            kept.append(re.sub(r"`[^`]*`", "``", line))
    return "\n".join(kept)


def strings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each string of a module that has words; values in it are left out."""
    tree = ast.parse(source)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            text = node.value
        else:
            continue
        if len(text.split()) >= WORDS:
            yield node.lineno, text


def check(root: Path, idioms: Idioms, *, sources: bool) -> list[str]:
    """Return a line for each phrase found, sorted by file and line."""
    found = []
    for file in sorted({file for pattern in PAGES for file in root.glob(pattern)}):
        name = file.relative_to(root).as_posix()
        if "_build" not in file.parts:
            found += [(name, *each) for each in idioms.found_in(name, prose(file.read_text(encoding="utf-8")))]
    for file in sorted(file for pattern in SOURCES for file in root.glob(pattern)) if sources else []:
        name = file.relative_to(root).as_posix()
        for line, text in strings(file.read_text(encoding="utf-8")):
            found += [(name, *each) for each in idioms.found_in(name, text, line)]
    return [f"{name}:{line}: {phrase!r}" for name, line, phrase in sorted(set(found))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was found; the exit status is 1 if there is anything.

    Args:
        arguments: the command line, without the program's name; that of the process if None.
    """
    parser = argparse.ArgumentParser(description="Look for the phrases of tools/idioms.txt.")
    parser.add_argument("--sources", action="store_true", help="look at messages and docstrings of the packages too")
    found = check(ROOT, Idioms.read(LIST.read_text(encoding="utf-8")), sources=parser.parse_args(arguments).sources)
    print(*found, sep="\n", end="\n" if found else "")
    print(f"idioms: {f'{len(found)} found; tools/idioms.txt says what to write instead' if found else 'none'}")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
