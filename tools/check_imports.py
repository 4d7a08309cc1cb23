"""Checks who may import whom: between the packages, within each of them, and what must never be imported.

Run as ``python tools/check_imports.py``. It reads the sources with `ast` and imports nothing. The rules:

- A package imports the siblings and the third-party packages that `RULES` names, and no other.
- Of a sibling a package imports public names alone: those in the `__all__` of a module without an underscore.
- `zeroshard_core` never reaches `torch.distributed`, by whatever spelling.
- The modules of a package import each other without cycles; what is imported for type checkers alone never runs.
- No circle has more than two modules if imports for type checkers count too, in the packages that people import.
- What `zeroshard_testing.plugin` imports when it is imported does not contain torch: pytest loads it for everyone.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from module_imports import Import, Module, distributed_uses, read_packages


@dataclass(frozen=True)
class Rule:
    """What one package may import, beside itself and the standard library."""

    siblings: frozenset[str]
    third_party: frozenset[str]
    optional: frozenset[str] = frozenset()
    """Third parties that it works without, and uses where they are installed."""


RULES: Mapping[str, Rule] = {
    "zeroshard_core": Rule(frozenset(), frozenset({"torch"})),
    "zeroshard_comm": Rule(frozenset({"zeroshard_core"}), frozenset({"torch"})),
    # The command `zeroshard plan` alone uses the optional ones.
    "zeroshard": Rule(
        frozenset({"zeroshard_core", "zeroshard_comm"}),
        frozenset({"torch"}),
        frozenset({"rich", "typer", "matplotlib", "safetensors", "transformers"}),
    ),
    "zeroshard_integrations": Rule(
        frozenset({"zeroshard_core", "zeroshard_comm", "zeroshard"}),
        frozenset({"torch"}),
        frozenset({"accelerate", "lightning", "transformers"}),
    ),
    # _pytest: how a test is run, its failure shown and its assertion explained on ranks has no public way in.
    "zeroshard_testing": Rule(
        frozenset(), frozenset({"torch", "pytest", "_pytest"}), frozenset({"cloudpickle", "coverage", "numpy"})
    ),
}
WITHOUT_DISTRIBUTED = "zeroshard_core"
WITHOUT_TORCH = "zeroshard_testing.plugin"
WITH_CIRCLES = frozenset({"zeroshard_testing"})
"""Packages in which more than two modules may name each other for type checkers."""
CHECK_NAMES = "zeroshard_comm._torch_private.check_names"
"""The one private name of a sibling that may be imported: it checks the private names of torch that a package uses."""


@dataclass(frozen=True, order=True)
class Violation:
    """One broken rule, at a line of a file."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def check(root: Path, rules: Mapping[str, Rule] = RULES) -> list[Violation]:
    """Check all packages of a repository.

    Args:
        root: The repository; packages lie at ``packages/<folder>/src/<import name>``.
        rules: What each package may import, by import name.

    Returns:
        The violations, sorted by file and line.

    Raises:
        FileNotFoundError: If a package of the rules has no source, so that nothing would be checked.
        SyntaxError: If a source cannot be parsed.
    """
    modules = read_packages(root, rules)
    return sorted(
        {
            *_forbidden_packages(modules, rules),
            *_private_names_of_siblings(modules, rules),
            *_uses_of_distributed(modules),
            *_cycles(modules),
            *_circles(modules),
            *_torch_in_plugin(modules),
        }
    )


def _forbidden_packages(modules: Mapping[str, Module], rules: Mapping[str, Rule]) -> Iterator[Violation]:
    for module in modules.values():
        rule = rules[module.package]
        for imported in module.imports:
            top = imported.name.partition(".")[0]
            if top == module.package or top in sys.stdlib_module_names:
                continue
            if top in rules and top not in rule.siblings:
                allowed = ", ".join(sorted(rule.siblings)) or "none of its siblings"
                text = f"{module.package} must not import {top}; it may import {allowed}"
            elif top not in rules and top not in rule.third_party | rule.optional:
                text = (
                    f"{module.package} must not import {top}; of third parties it may import {_list(rule.third_party)}"
                )
            else:
                continue
            yield Violation(module.path, imported.line, text)


def _private_names_of_siblings(modules: Mapping[str, Module], rules: Mapping[str, Rule]) -> Iterator[Violation]:
    for module in modules.values():
        for imported in module.imports:
            top = imported.name.partition(".")[0]
            if top not in rules[module.package].siblings or imported.full_name == CHECK_NAMES:
                continue
            target, parts = modules.get(imported.name), imported.full_name.split(".")
            is_listed = imported.full_name in modules or (
                target is not None and imported.attribute in _exported(target)
            )
            if not is_listed or any(part.startswith("_") for part in parts):
                text = f"{imported.full_name} is no public name of {top}: name it in the __all__ of a public module"
                yield Violation(module.path, imported.line, text)


def _exported(module: Module) -> Sequence[str]:
    """The names in a module's ``__all__``."""
    for statement in module.tree.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            names: Sequence[str] = ast.literal_eval(statement.value)
            return names
    return ()


def _uses_of_distributed(modules: Mapping[str, Module]) -> Iterator[Violation]:
    for module in modules.values():
        if module.package == WITHOUT_DISTRIBUTED:
            for line, spelling in distributed_uses(module):
                text = f"{WITHOUT_DISTRIBUTED} must not reach torch.distributed: {spelling}"
                yield Violation(module.path, line, text)


def _cycles(modules: Mapping[str, Module]) -> Iterator[Violation]:
    """Find one cycle for each module that starts one, with a depth-first walk over the imports within the package."""
    finished: set[str] = set()

    def walk(name: str, trail: list[str]) -> Iterator[Violation]:
        trail.append(name)
        running = [imported for imported in modules[name].imports if not imported.is_for_types]
        for imported, target in _within(modules, running, modules[name].package):
            if target == name:
                yield Violation(modules[name].path, imported.line, f"{name} imports itself")
            elif target in trail:
                cycle = " -> ".join([*trail[trail.index(target) :], target])
                yield Violation(modules[name].path, imported.line, f"import cycle: {cycle}")
            elif target not in finished:
                yield from walk(target, trail)
        trail.pop()
        finished.add(name)

    for name in sorted(modules):
        if name not in finished:
            yield from walk(name, [])


def _circles(modules: Mapping[str, Module]) -> Iterator[Violation]:
    """Find modules of which each imports the next by some way, for type checkers or in functions too."""
    within = {
        name: {target for _, target in _within(modules, module.imports, module.package)} - {name}
        for name, module in modules.items()
        if module.package not in WITH_CIRCLES
    }
    reached: dict[str, set[str]] = {}
    for name in within:
        reached[name], waiting = set(), [name]
        while waiting:
            new = within[waiting.pop()] - reached[name]
            reached[name] |= new
            waiting += new
    circles = {frozenset({name} | {other for other in reached[name] if name in reached[other]}) for name in within}
    for circle in circles:
        first, *others = sorted(circle)
        if len(others) > 1:
            text = f"{len(circle)} modules import each other in a circle: {', '.join([first, *others])}"
            yield Violation(modules[first].path, 1, text)


def _torch_in_plugin(modules: Mapping[str, Module]) -> Iterator[Violation]:
    """Follow what is imported on import, the parents' ``__init__`` included, and find torch."""
    if WITHOUT_TORCH not in modules:
        return
    package = modules[WITHOUT_TORCH].package
    waiting = [package, WITHOUT_TORCH]
    reached = set(waiting)
    while waiting:
        module = modules[waiting.pop()]
        on_import = [imported for imported in module.imports if imported.runs_on_import]
        for imported in on_import:
            if imported.name.partition(".")[0] == "torch":
                text = f"{WITHOUT_TORCH} must not import torch, and this line is reached when it is imported"
                yield Violation(module.path, imported.line, text)
        for _, target in _within(modules, on_import, package):
            parents = [target.rsplit(".", depth)[0] for depth in range(target.count("."))]
            fresh = ({*parents, target} - reached) & modules.keys()
            reached |= fresh
            waiting += sorted(fresh)


def _within(modules: Mapping[str, Module], imports: Iterable[Import], package: str) -> Iterator[tuple[Import, str]]:
    """Yield the imports of modules of the same package, each with the module that it means."""
    for imported in imports:
        if imported.name.partition(".")[0] != package:
            continue
        # `from package import name` means a module if there is one of that name, else what is in the package.
        for candidate in (imported.full_name, imported.name):
            if candidate in modules:
                yield imported, candidate
                break


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a repository and print what is wrong.

    Args:
        arguments: The command line, without the program's name; that of the process if None.

    Returns:
        The exit status: 1 if a rule is broken.
    """
    parser = argparse.ArgumentParser(description="Check which package imports which.")
    parser.add_argument("root", type=Path, nargs="?", default=Path(__file__).parents[1], help="the repository")
    root: Path = parser.parse_args(arguments).root
    try:
        violations = check(root)
    except (FileNotFoundError, SyntaxError) as error:
        print(f"check_imports: {error}", file=sys.stderr)
        return 1
    for violation in violations:
        print(violation)
    print(f"imports: {len(violations)} violations" if violations else "imports: every rule is kept")
    return 1 if violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
