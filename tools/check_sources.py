"""Checks how many lines packages have, and where they name what is private in torch.

Run as ``python tools/check_sources.py``. It reads the sources and imports nothing. The rules:

- No package has more lines than its ceiling. A change that raises one says why, beside it; one that deletes lowers it.
- Private names of torch are in modules named ``_torch_private`` alone.

Who imports whom, and that nothing imports in a circle, is checked by ``check_imports.py``.
"""

from __future__ import annotations

import argparse
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
    "zeroshard_core": Ceiling(1835, "predictions count the buckets in flight of sharded gradients"),
    "zeroshard_comm": Ceiling(3235, "reducers free the memory of what a rank owns"),
    "zeroshard": Ceiling(11085, "gradients are sharded; the command zeroshard plan is counted with it"),
    "zeroshard_integrations": Ceiling(1543, "plugins shard gradients"),
    "zeroshard_testing": Ceiling(7180, "the emulated device is counted with it"),
}


def check(modules: Collection[Module], lines: Mapping[str, int]) -> list[Violation]:
    """Check the modules of all packages, and return the violations, sorted by file and line.

    Args:
        modules: all of them.
        lines: of each package and folder that has a ceiling, as :func:`count` returns them.
    """
    return sorted({*_private_names(modules), *_too_many(lines)})


def count(modules: Iterable[Module]) -> Mapping[str, int]:
    """Count the lines of each package."""
    lines = Counter[str]()
    for module in modules:
        lines[module.package] += lines_of(module)
    return lines


def lines_of(module: Module) -> int:
    """Count the lines of a source file, blank ones and comments included."""
    return module.path.read_bytes().count(b"\n")


def _too_many(lines: Mapping[str, int]) -> Iterator[Violation]:
    for name, ceiling in CEILINGS.items():
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
    for name, ceiling in CEILINGS.items():
        yield f"{name:34}{lines[name]:6}{ceiling.lines:9}  {ceiling.reason}".rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a repository, print what is wrong, and the lines of each package.

    Args:
        arguments: The command line, without the program's name; that of the process if None.

    Returns:
        The exit status: 1 if a rule is broken.
    """
    parser = argparse.ArgumentParser(
        description="Check how many lines packages have, and private names of torch in them."
    )
    parser.add_argument("root", type=Path, nargs="?", default=Path(__file__).parents[1], help="the repository")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    options = parser.parse_args(arguments)
    try:
        modules = read_packages(options.root, CEILINGS).values()
    except (FileNotFoundError, SyntaxError) as error:
        print(f"check_sources: {error}", file=sys.stderr)
        return 1
    lines = count(modules)
    violations = check(modules, lines)
    if options.json:
        packages = {
            name: {"lines": lines[name], "ceiling": ceiling.lines, "reason": ceiling.reason}
            for name, ceiling in CEILINGS.items()
        }
        told = {"packages": packages, "violations": [*map(str, violations)]}
        print(json.dumps(told, indent=2))
        return 1 if violations else 0
    for violation in violations:
        print(violation)
    print(*_table(lines), sep="\n")
    print(f"sources: {len(violations)} violations" if violations else "sources: every rule is kept")
    return 1 if violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
