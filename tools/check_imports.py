"""Checks what the packages import, and where they reach private names of torch.

Run as ``python tools/check_imports.py``. It reads the sources with `ast` and imports nothing. The rules:

- A package imports what `MAY_IMPORT` names, and of its siblings the names in the `__all__` of their public modules.
- `zeroshard_core` does not reach `torch.distributed`.
- Only modules named ``_torch_private`` reach private names of torch. If such a module reaches a name on any object,
  such as ``tensor._version``, other modules reach that name only on ``self``.
- Modules do not import each other in a circle. Two modules may if one of the imports is only for type checkers.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOME = "_torch_private"
MAY_IMPORT = {
    "zeroshard_core": "torch",
    "zeroshard_comm": "zeroshard_core torch",
    # `zeroshard plan` uses the packages after torch, if they are installed.
    "zeroshard": "zeroshard_core zeroshard_comm torch rich typer matplotlib safetensors transformers",
    "zeroshard_integrations": "zeroshard_core zeroshard_comm zeroshard torch accelerate lightning transformers",
    # pytest has no public way to run a test, to show its failure and to explain its assertion on ranks.
    "zeroshard_testing": "torch pytest _pytest cloudpickle coverage numpy",
}
CHECK_NAMES = "zeroshard_comm._torch_private.check_names"
"""The private name of a sibling that packages import: it checks the private names of torch that they use."""


class Module:
    """One source file: what it imports, and the names that it reaches, such as ``torch.nn.Module._hooks``."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path, self.package = name, path, name.partition(".")[0]
        self.tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        nodes = list(ast.walk(self.tree))
        guards = [node for node in nodes if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
        for_types = {inner for guard in guards for node in guard.body for inner in ast.walk(node)}
        self.imports: list[tuple[int, str, bool]] = []
        self.meant: dict[str, str] = {}
        for node in nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                start = f"{'.' * node.level}{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
                self.imports += [(node.lineno, start + each.name, node in for_types) for each in node.names]
                self.meant |= {each.asname or each.name: start + each.name for each in node.names}
        prose = {node.value for node in nodes if isinstance(node, ast.Expr)}
        prose |= {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        self.names = [(line, name) for line, name, _ in self.imports]
        for node in nodes:
            if isinstance(node, ast.Attribute):
                self.names.append((node.lineno, self._reached(node)))
            elif isinstance(node, ast.Constant) and node not in prose and re.fullmatch(r"[\w.]+", str(node.value)):
                self.names.append((node.lineno, str(node.value)))

    def _reached(self, node: ast.expr) -> str:
        """Return the name that an expression reaches: ``torch.nn.Module._hooks`` for ``nn.Module(1)._hooks``."""
        if isinstance(node, ast.Attribute):
            return f"{self._reached(node.value)}.{node.attr}"
        if isinstance(node, (ast.Call, ast.Subscript)):
            return self._reached(node.func if isinstance(node, ast.Call) else node.value)
        return self.meant.get(node.id, node.id) if isinstance(node, ast.Name) else ""

    def exports(self, name: str) -> bool:
        """Whether ``__all__`` has the name."""
        lists = [node for node in self.tree.body if isinstance(node, ast.Assign) and ast.unparse(node)[:7] == "__all__"]
        return any(name in ast.literal_eval(found.value) for found in lists)


def check(root: Path) -> list[str]:
    """Return a line for each violation."""
    modules: dict[str, Module] = {}
    for package in MAY_IMPORT:
        for path in root.glob(f"packages/*/src/{package}/**/*.py"):
            _, _, within = path.with_suffix("").as_posix().rpartition("/src/")
            name = within.replace("/", ".").removesuffix(".__init__")
            modules[name] = Module(name, path)
        if package not in modules:
            return [f"no source of {package} under {root}"]
    homes = [module for module in modules.values() if module.name.endswith(HOME)]
    private = {last for home in homes for _, name in home.names if _is_private(last := name.rpartition(".")[2])}
    found = {
        f"{module.path.relative_to(root)}:{line}: {text}"
        for module in modules.values()
        for line, text in [*_imports(module, modules), *_names(module, private)]
    }
    return [*sorted(found), *_circle(modules)]


def _imports(module: Module, modules: Mapping[str, Module]) -> Iterator[tuple[int, str]]:
    for line, name, _ in module.imports:
        package, (origin, _, last) = name.partition(".")[0], name.rpartition(".")
        if package == module.package or package in sys.stdlib_module_names:
            continue
        if package not in MAY_IMPORT[module.package].split():
            yield line, f"{module.package} must not import {name}"
        elif package in MAY_IMPORT and name != CHECK_NAMES:
            is_public = name in modules or (origin in modules and modules[origin].exports(last))
            if not is_public or "._" in name:
                yield line, f"{name} is not a public name: list it in the __all__ of a public module"


def _names(module: Module, private: Set[str]) -> Iterator[tuple[int, str]]:
    for line, name in module.names:
        first, *others = name.split(".")
        if module.package == "zeroshard_core" and f"{name}.".startswith("torch.distributed."):
            yield line, "zeroshard_core must not reach torch.distributed"
        is_own = first in ("self", "cls") and len(others) == 1
        is_torchs = first == "torch" and any(map(_is_private, others))
        if (is_torchs or (name.rpartition(".")[2] in private and not is_own)) and not module.name.endswith(HOME):
            yield line, f"{name} is private in torch: reach it in {HOME}.py of {module.package}, and say why"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _circle(modules: Mapping[str, Module]) -> Iterator[str]:
    """Yield one circle, if there is any."""
    running, for_types = ({name: set[str]() for name in modules} for _ in range(2))
    for module in modules.values():
        for _, name, is_for_types in module.imports:
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules:
                (for_types if is_for_types else running)[module.name].add(target)
    graph = {
        name: running[name] | {each for each in for_types[name] if name not in running[each] | for_types[each]}
        for name in modules
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield f"modules import each other in a circle: {' -> '.join(reversed(error.args[1]))}"


def main() -> int:
    """Print what is wrong; the exit status is 1 if there is anything."""
    violations = check(ROOT)
    print(*violations, f"imports: {len(violations)} violations", sep="\n")
    return int(bool(violations))


if __name__ == "__main__":
    raise SystemExit(main())
