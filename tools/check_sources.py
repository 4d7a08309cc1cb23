"""Checks how large modules and classes are, and where they name what is private in torch; counts lines by package.

Run as ``python tools/check_sources.py``. It reads the sources and imports nothing. The rules:

- No package has more lines than its ceiling. A change that raises one says why, beside it; one that deletes lowers it.
- Private names of torch are in modules named ``_torch_private`` alone.

Modules of more than 500 lines and classes of more than 400 are reported, and no violation: cut where the data has a
boundary, not where the counter says so.

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
class Ceiling:
    """How many lines a package may have, and why it was last raised, if it was."""

    lines: int
    reason: str = ""


CEILINGS: Mapping[str, Ceiling] = {
    "zeroshard_core": Ceiling(2130, "what a rank holds and sends is predicted, and what updates allocate is counted"),
    "zeroshard_comm": Ceiling(3418, "how long the rows of a matrix are is told without one"),
    "zeroshard": Ceiling(8614, "predictions, optimizers as text; Join refuses what ranks without data cannot repeat"),
    "zeroshard_integrations": Ceiling(1860, "the Trainer and Accelerate take a function to param groups"),
    "zeroshard_testing": Ceiling(5723, "frames of threads are read only while the process is known to wait"),
}
APART: Mapping[str, Ceiling] = {
    "zeroshard.planner": Ceiling(582, "the command zeroshard plan"),
    "zeroshard_testing.emulated": Ceiling(1459, "its build asks for itself, and says what it has found and made"),
    "zeroshard_testing.emulated (C++)": Ceiling(1789),
}
"""Folders that are counted by themselves, and not with their package."""
LONGEST_MODULE = 500
LONGEST_CLASS = 400


@dataclass(frozen=True)
class Size:
    """How long a module or class is: its full name, where it lies, its lines, and how many it may have."""

    name: str
    path: Path
    line: int
    lines: int
    limit: int


def check(modules: Collection[Module], lines: Mapping[str, int]) -> list[Violation]:
    """Check the modules of all packages, and return the violations, sorted by file and line.

    Args:
        modules: all of them.
        lines: of each package and folder that has a ceiling, as :func:`count` returns them.
    """
    return sorted({*_private_names(modules), *_too_many(lines)})


def too_long(modules: Iterable[Module]) -> Iterator[str]:
    """Name the modules and classes that are longer than a reader likes, with what they have and may have."""
    for size in _sizes(modules):
        if size.lines > size.limit:
            yield f"{size.path}:{size.line}: {size.name} has {size.lines} lines, more than {size.limit}"


def count(root: Path, modules: Iterable[Module]) -> Mapping[str, int]:
    """Count the lines of each package and of each folder that is counted apart.

    Args:
        root: the repository.
        modules: all of its modules.
    """
    lines = Counter[str]()
    for module in modules:
        folder = module.name.rpartition(".")[0]
        lines[folder if folder in APART else module.package] += lines_of(module)
    for source in root.glob("packages/zeroshard-testing/src/zeroshard_testing/emulated/csrc/*"):
        lines["zeroshard_testing.emulated (C++)"] += source.read_bytes().count(b"\n")
    return lines


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


def _too_many(lines: Mapping[str, int]) -> Iterator[Violation]:
    for name, ceiling in {**CEILINGS, **APART}.items():
        if lines[name] > ceiling.lines:
            text = f"{name} has {lines[name]} lines, and its ceiling is {ceiling.lines}: take something out of it, or "
            yield Violation(Path(__file__), 1, text + "raise the ceiling and say why")


def _private_names(modules: Iterable[Module]) -> Iterator[Violation]:
    names = private_names(modules)
    for module in modules:
        if not is_home(module):
            for line, use in private_uses(module, names):
                text = f"{use} is private in torch: reach it in {HOME}.py of {module.package}, with the reason"
                yield Violation(module.path, line, text)


def _table(lines: Mapping[str, int]) -> Iterator[str]:
    yield f"{'package':34}{'lines':>6}{'ceiling':>9}"
    for name, ceiling in {**CEILINGS, **APART}.items():
        yield f"{name:34}{lines[name]:6}{ceiling.lines:9}  {ceiling.reason}".rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a repository, print what is wrong, and the lines of each package.

    Args:
        arguments: The command line, without the program's name; that of the process if None.

    Returns:
        The exit status: 1 if a rule is broken.
    """
    parser = argparse.ArgumentParser(description="Check how large sources are, and private names of torch in them.")
    parser.add_argument("root", type=Path, nargs="?", default=Path(__file__).parents[1], help="the repository")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    options = parser.parse_args(arguments)
    try:
        modules = read_packages(options.root, CEILINGS).values()
    except (FileNotFoundError, SyntaxError) as error:
        print(f"check_sources: {error}", file=sys.stderr)
        return 1
    lines = count(options.root, modules)
    violations = check(modules, lines)
    if options.json:
        packages = {
            name: {"lines": lines[name], "ceiling": ceiling.lines, "reason": ceiling.reason}
            for name, ceiling in {**CEILINGS, **APART}.items()
        }
        told = {"packages": packages, "violations": [*map(str, violations)], "long": [*too_long(modules)]}
        print(json.dumps(told, indent=2))
        return 1 if violations else 0
    for violation in violations:
        print(violation)
    print(*too_long(modules), *_table(lines), sep="\n")
    print(f"sources: {len(violations)} violations" if violations else "sources: every rule is kept")
    return 1 if violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
