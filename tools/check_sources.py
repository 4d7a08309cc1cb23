"""Checks how large modules and classes are, and where they name what is private in torch; counts lines by package.

Run as ``python tools/check_sources.py``. It reads the sources and imports nothing. The rules:

- No module has more than 400 lines, and no class more than 250.
- Private names of torch are in modules named ``_torch_private`` alone.

Who imports whom, and that nothing imports in a circle, is checked by ``check_imports.py``.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from check_imports import Violation
from module_imports import Module, read_packages
from torch_private_names import HOME, is_home, private_names, private_uses


@dataclass(frozen=True)
class Aim:
    """How many lines a package is to have at most, and why it has more if it has."""

    lines: int
    reason: str = ""


AIMS: Mapping[str, Aim] = {
    "zeroshard_core": Aim(1500),
    "zeroshard_comm": Aim(2000),
    "zeroshard": Aim(4300),
    "zeroshard_integrations": Aim(1200),
    "zeroshard_testing": Aim(5200, "what is proven stuck takes knowing which groups each rank has begun to make"),
}
APART: Mapping[str, Aim] = {
    "zeroshard_testing.emulated": Aim(500, "an error names what each rank issued, who is missing, and why"),
    "zeroshard_testing.emulated (C++)": Aim(800, "half of it implements torch's interfaces, a line for each method"),
}
"""Folders that are counted by themselves, and not with their package."""
LONGEST_MODULE = 400
LONGEST_CLASS = 250


@dataclass(frozen=True)
class Size:
    """How long a module or class is: its full name, where it lies, its lines, and how many it may have."""

    name: str
    path: Path
    line: int
    lines: int
    limit: int


def check(modules: Collection[Module]) -> list[Violation]:
    """Check the modules of all packages, and return the violations, sorted by file and line."""
    return sorted({*_too_long(_sizes(modules)), *_private_names(modules)})


def lines_of(module: Module) -> int:
    """Count the lines of a source file, blank ones and comments included."""
    return module.path.read_bytes().count(b"\n")


def _sizes(modules: Iterable[Module]) -> Iterator[Size]:
    for module in modules:
        yield Size(module.name, module.path, 1, lines_of(module), LONGEST_MODULE)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                yield Size(f"{module.name}.{node.name}", module.path, node.lineno, lines, LONGEST_CLASS)


def _too_long(sizes: Iterable[Size]) -> Iterator[Violation]:
    for size in sizes:
        if size.lines > size.limit:
            text = f"{size.name} has {size.lines} lines, and may have {size.limit}: take something out of it"
            yield Violation(size.path, size.line, text)


def _private_names(modules: Iterable[Module]) -> Iterator[Violation]:
    names = private_names(modules)
    for module in modules:
        if not is_home(module):
            for line, use in private_uses(module, names):
                text = f"{use} is private in torch: reach it in {HOME}.py of {module.package}, with the reason"
                yield Violation(module.path, line, text)


def _table(lines: Mapping[str, int]) -> Iterator[str]:
    yield f"{'package':34}{'lines':>6}{'aim':>6}{'over by':>9}"
    for name, aim in {**AIMS, **APART}.items():
        missing = max(0, lines[name] - aim.lines)
        yield f"{name:34}{lines[name]:6}{aim.lines:6}{missing or '-':>9}  {aim.reason if missing else ''}".rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a repository, print what is wrong, and the lines of each package.

    Args:
        arguments: The command line, without the program's name; that of the process if None.

    Returns:
        The exit status: 1 if a rule is broken. An aim that is missed breaks none.
    """
    parser = argparse.ArgumentParser(description="Check how large sources are, and private names of torch in them.")
    parser.add_argument("root", type=Path, nargs="?", default=Path(__file__).parents[1], help="the repository")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    options = parser.parse_args(arguments)
    try:
        modules = read_packages(options.root, AIMS).values()
    except (FileNotFoundError, SyntaxError) as error:
        print(f"check_sources: {error}", file=sys.stderr)
        return 1
    violations = check(modules)
    lines = Counter[str]()
    for module in modules:
        folder = module.name.rpartition(".")[0]
        lines[folder if folder in APART else module.package] += lines_of(module)
    for source in options.root.glob("packages/zeroshard-testing/src/zeroshard_testing/emulated/csrc/*"):
        lines["zeroshard_testing.emulated (C++)"] += source.read_bytes().count(b"\n")
    if options.json:
        packages = {
            name: {"lines": lines[name], "aim": aim.lines, "reason": aim.reason}
            for name, aim in {**AIMS, **APART}.items()
        }
        print(json.dumps({"packages": packages, "violations": [*map(str, violations)]}, indent=2))
        return 1 if violations else 0
    for violation in violations:
        print(violation)
    print(*_table(lines), sep="\n")
    print(f"sources: {len(violations)} violations" if violations else "sources: every rule is kept")
    return 1 if violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
