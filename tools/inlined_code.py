"""Copies code from docs/examples into pages, so that they read as plain Markdown.

A comment above a fence names what it shows: ``<!-- examples/gan.py -->`` a file, ``<!-- examples/gan.py: train -->`` a
function or class of it, ``<!-- examples/gan.py from "import sys" until "def main" -->`` the lines from the first with
the one text until the first with the other, ``<!-- examples/plain.py to examples/sharded.py -->`` a difference.
Run as ``python tools/inlined_code.py``; with ``--check`` it writes nothing, and the exit status is 1 if a page differs.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import textwrap
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
_LINES = re.compile(r'(?P<file>\S+) from "(?P<first>[^"]+)"(?: until "(?P<last>[^"]+)")?')
_BLOCK = re.compile(r"^<!-- (?P<what>examples/[^>]+) -->\n+```\w+\n.*?^```$", re.MULTILINE | re.DOTALL)


def shown(what: str) -> str:
    """Return the fenced code that a comment names. Raises KeyError with the name if the file lacks the function."""
    old, _, new = what.partition(" to ")
    if new:
        before, after = ((DOCS / file).read_text(encoding="utf-8").splitlines() for file in (old, new))
        lines = [*difflib.unified_diff(before, after, n=2, lineterm="")][2:]
        return "```diff\n" + "\n".join(lines) + "\n```"
    if part := _LINES.fullmatch(what):
        lines = (DOCS / part["file"]).read_text(encoding="utf-8").splitlines()
        first = next(number for number, line in enumerate(lines) if part["first"] in line)
        ends = [number for number in range(first + 1, len(lines)) if part["last"] and part["last"] in lines[number]]
        code = textwrap.dedent("\n".join(lines[first : ends[0] if ends else None]))
        return f"```python\n{code.strip()}\n```"
    file, _, name = what.partition(": ")
    code = (DOCS / file).read_text(encoding="utf-8")
    if name:
        named = {getattr(node, "name", ""): node for node in ast.parse(code).body}
        code = ast.get_source_segment(code, named[name]) or ""
    return f"```python\n{code.strip()}\n```"


def with_code(page: str) -> str:
    """Return a page with its code as it is in docs/examples now."""
    return _BLOCK.sub(lambda block: f"<!-- {block['what']} -->\n\n{shown(block['what'])}", page)


def main(arguments: list[str] | None = None) -> int:
    """Write or check all pages; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page differs")
    check = parser.parse_args(arguments).check
    differing = [
        (file, text) for file in sorted(DOCS.rglob("*.md")) if (text := file.read_text("utf-8")) != with_code(text)
    ]
    for file, text in differing:
        print(file.relative_to(DOCS))
        if not check:
            file.write_text(with_code(text), encoding="utf-8")
    return int(check and bool(differing))


if __name__ == "__main__":
    raise SystemExit(main())
