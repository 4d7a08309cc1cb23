"""Draws the modules of the packages and their imports: docs/pictures/modules-*.svg, one picture for each package.

Run as ``python tools/module_map.py``. It reads the sources and imports nothing of them. A module stands above all that
it imports, as low as what imports it allows. A line is an import; one that follows from others is left out, as is what
only type checkers import, and what every module may import: ``_torch_private``, and the modules of the packages below.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer
from bench.drawing import TEXT, picture
from module_imports import Module, read_packages

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
PACKAGES = ("zeroshard_core", "zeroshard_comm", "zeroshard", "zeroshard_integrations")
_LEFT_OUT = frozenset({"_torch_private"})
_SWEEPS = 24
_WIDEST = 7.6
"""Inches, of a column of text."""
_COLORS = ("#3a7cbc", "#b06f1f", "#3b8a5f")
"""Of the modules of each folder."""

Imports = Mapping[str, Collection[str]]
"""By module, the modules that it imports."""


def main(folder: Annotated[Path, typer.Option(help="where pictures are written")] = PICTURES) -> None:
    """Draw a picture for each package."""
    modules = read_packages(ROOT, PACKAGES)
    for package in PACKAGES:
        imports = imports_within(modules, package)
        file = folder / f"modules-{package}.svg"
        draw(imports, file)
        typer.echo(f"{file}: {len(imports)} modules")


def imports_within(modules: Mapping[str, Module], package: str) -> dict[str, set[str]]:
    """Return what the modules of a package import of each other, named without the package.

    Args:
        modules: by their full names.
        package: import name.
    """
    names = {
        full: full.removeprefix(f"{package}.")
        for full, module in modules.items()
        # What a package exports is no module of its own, unless something stands in it.
        if module.package == package and full != package and not _only_exports(full, modules)
    }
    names = {full: name for full, name in names.items() if name not in _LEFT_OUT}
    return {
        name: {
            names[found]
            for imported in modules[full].imports
            if not imported.is_for_types
            for found in (imported.full_name, imported.name)
            if found in names and found != full
        }
        for full, name in names.items()
    }


def without_implied(imports: Imports) -> dict[str, set[str]]:
    """Leave out each import that others imply: of a by c, if a imports b, and b imports c.

    >>> without_implied({"a": {"b", "c"}, "b": {"c"}, "c": set()})
    {'a': {'b'}, 'b': {'c'}, 'c': set()}
    """
    below: dict[str, set[str]] = {}

    def reach(name: str) -> set[str]:
        if name not in below:
            below[name] = set().union(*({found} | reach(found) for found in imports[name]))
        return below[name]

    return {
        name: {found for found in direct if not any(found in reach(other) for other in direct)}
        for name, direct in imports.items()
    }


def rows(imports: Imports) -> list[list[str]]:
    """Put each module one row below the lowest that imports it; order rows so that lines cross little.

    >>> rows({"a": {"b", "c"}, "b": {"c"}, "c": set()})
    [['a'], ['b'], ['c']]
    """
    users = {name: [user for user, direct in imports.items() if name in direct] for name in imports}
    level: dict[str, int] = {}

    def place(name: str) -> int:
        if name not in level:
            level[name] = 1 + max(map(place, users[name]), default=-1)
        return level[name]

    found: list[list[str]] = [[] for _ in range(1 + max(map(place, imports)))]
    for name in sorted(imports):
        found[level[name]].append(name)
    neighbours = {name: [*imports[name], *users[name]] for name in imports}
    for _ in range(_SWEEPS):
        spots = {name: spot for row in found for name, spot in zip(row, _spots(len(row)), strict=True)}
        for row in found:
            row.sort(key=lambda name: mean([spots[other] for other in neighbours[name]] or [0.0]))
    return found


def draw(imports: Imports, file: Path) -> None:
    """Draw a box for each module and a line for each import.

    Args:
        imports: of a package.
        file: to write.
    """
    shown = without_implied(imports)
    ordered = rows(shown)
    widest = max(map(len, ordered))
    folders = sorted({name.rpartition(".")[0] for name in imports})
    with picture(file, min(1.35 * widest, _WIDEST), 0.5 * len(ordered)) as (_, panel):
        spots = {
            name: (widest * spot, -float(number))
            for number, row in enumerate(ordered)
            for name, spot in zip(row, _spots(len(row)), strict=True)
        }
        for name, (x, y) in spots.items():
            for found in sorted(shown[name]):
                panel.plot([x, spots[found][0]], [y, spots[found][1]], color=TEXT, linewidth=0.8, alpha=0.6, zorder=1)
            color = _COLORS[folders.index(name.rpartition(".")[0]) % len(_COLORS)]
            panel.text(
                x, y, name, ha="center", va="center", color="white", fontsize=8, zorder=2,
                bbox={"boxstyle": "round,pad=0.3", "facecolor": color, "edgecolor": "none"},
            )  # fmt: skip
        panel.set_xlim(-widest / 2, widest / 2)
        panel.set_ylim(-len(ordered) + 0.5, 0.5)
        panel.set_axis_off()


def _spots(count: int) -> Sequence[float]:
    """Return evenly spaced places from -1/2 to 1/2."""
    return [(number + 0.5) / count - 0.5 for number in range(count)]


def _only_exports(full: str, modules: Mapping[str, Module]) -> bool:
    """Whether a package's ``__init__`` has no code of its own."""
    return modules[full].path.name == "__init__.py" and not any(
        type(node).__name__ in ("FunctionDef", "ClassDef") for node in modules[full].tree.body
    )


if __name__ == "__main__":
    typer.run(main)
