"""What the modules of a package import, read from their sources with `ast`: nothing is imported to find out."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_DISTRIBUTED = re.compile(r"torch\.distributed(\.\w+)*")


@dataclass(frozen=True)
class Import:
    """One import.

    Attributes:
        name: The module that is named, absolute: ``a.b`` in ``from a.b import c`` and in ``import a.b``.
        attribute: What is taken from it: ``c`` in ``from a.b import c``; empty for ``import a.b``.
        line: Line number, from 1.
        runs_on_import: Whether importing the module at hand runs it: false in functions and for type checkers alone.
        is_for_types: Whether it is for type checkers alone, and never runs.
    """

    name: str
    attribute: str
    line: int
    runs_on_import: bool
    is_for_types: bool = False

    @property
    def full_name(self) -> str:
        """The module and what is taken from it, joined by a dot."""
        return f"{self.name}.{self.attribute}" if self.attribute else self.name


@dataclass(frozen=True)
class Module:
    """One source file.

    Attributes:
        name: Its fully qualified name; that of the package for an ``__init__``.
        path: Where it lies.
        tree: Its syntax tree.
        imports: Every import in it, dynamic ones by a constant name included, in order of appearance.
    """

    name: str
    path: Path
    tree: ast.Module
    imports: tuple[Import, ...]

    @property
    def package(self) -> str:
        """The top-level package that it belongs to."""
        return self.name.partition(".")[0]


def read_modules(folder: Path) -> dict[str, Module]:
    """Read all modules of a package.

    Args:
        folder: The package's folder; its name is the import name.

    Returns:
        Modules by fully qualified name.

    Raises:
        SyntaxError: If a source cannot be parsed; the text names the file.
    """
    modules = {}
    for path in sorted(folder.rglob("*.py")):
        parts = [folder.name, *path.relative_to(folder).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        within = name if is_package else name.rpartition(".")[0]
        modules[name] = Module(name, path, tree, tuple(_imports(tree, within, runs=True)))
    return modules


def read_packages(root: Path, packages: Iterable[str]) -> dict[str, Module]:
    """Read all modules of some packages of a repository.

    Args:
        root: The repository; packages lie at ``packages/<folder>/src/<import name>``.
        packages: Import names.

    Returns:
        Modules by fully qualified name.

    Raises:
        FileNotFoundError: If a package has no source, so that nothing would be checked.
        SyntaxError: If a source cannot be parsed.
    """
    modules: dict[str, Module] = {}
    for package in packages:
        found = [path for path in root.glob(f"packages/*/src/{package}") if path.is_dir()]
        if not found:
            raise FileNotFoundError(f"no source of {package} under {root / 'packages'}")
        for folder in found:
            modules.update(read_modules(folder))
    return modules


def distributed_uses(module: Module) -> Iterator[tuple[int, str]]:
    """Find every way in which a module reaches `torch.distributed`.

    Imports under any name, attributes of whatever ``torch`` was imported as, ``getattr``, and the dotted name as a
    string, which is what dynamic imports and `sys.modules` take. A dynamic import whose name is computed counts as
    well, for it cannot be told what it reaches.

    Args:
        module: The module.

    Yields:
        Line number, and the use in words.
    """
    for imported in module.imports:
        if _DISTRIBUTED.fullmatch(imported.full_name) or _DISTRIBUTED.fullmatch(imported.name):
            yield imported.line, f"import of {imported.full_name}"
    aliases = _names_of_torch(module.tree)
    prose = docstrings(module.tree)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr == "distributed" and _is_name(node.value, aliases):
            yield node.lineno, "attribute of torch"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            if _DISTRIBUTED.fullmatch(node.value):
                yield node.lineno, f"the name {node.value!r} as a string"
        elif isinstance(node, ast.Call):
            if _called(node) == "getattr" and len(node.args) > 1 and _is_name(node.args[0], aliases):
                if _text(node.args[1]) == "distributed":
                    yield node.lineno, "getattr of torch"
            elif _is_dynamic_import(node) and _dynamic_name(node, module.package) is None:
                yield node.lineno, "a dynamic import of a computed name"


def _imports(node: ast.AST, within: str, *, runs: bool, for_types: bool = False) -> Iterator[Import]:
    """Yield the imports under a node; ``within`` is the package that relative ones start from."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, "", node.lineno, runs, for_types)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            base = importlib.util.resolve_name("." * node.level + base, within)
        for alias in node.names:
            yield Import(base, alias.name, node.lineno, runs, for_types)
    elif isinstance(node, ast.Call) and _is_dynamic_import(node):
        name = _dynamic_name(node, within)
        if name is not None:
            yield Import(name, "", node.lineno, runs, for_types)
    if isinstance(node, ast.If) and _mentions_type_checking(node.test):
        for guarded in node.body:
            yield from _imports(guarded, within, runs=False, for_types=True)
        for otherwise in node.orelse:
            yield from _imports(otherwise, within, runs=runs, for_types=for_types)
        return
    deferred = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, within, runs=runs and not deferred, for_types=for_types)


def _mentions_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else test.id if isinstance(test, ast.Name) else ""
    return name == "TYPE_CHECKING"


def _called(call: ast.Call) -> str:
    """Return the last part of the name of what is called."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _is_dynamic_import(call: ast.Call) -> bool:
    return _called(call) in {"import_module", "__import__"}


def _dynamic_name(call: ast.Call, within: str) -> str | None:
    """Return the absolute name that a dynamic import gives as a constant; None if it is computed."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    name = _text(call.args[0] if call.args else given.get("name"))
    if name is None or not name.startswith("."):
        return name
    anchor = call.args[1] if len(call.args) > 1 else given.get("package")
    package = within if isinstance(anchor, ast.Name) and anchor.id == "__package__" else _text(anchor)
    return importlib.util.resolve_name(name, package) if package else None


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _names_of_torch(tree: ast.Module) -> set[str]:
    """Return the names under which a module has torch."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "torch":
                    names.add(alias.asname or "torch")
                elif alias.name.startswith("torch.") and alias.asname is None:
                    names.add("torch")
    return names


def _is_name(node: ast.expr, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def docstrings(tree: ast.Module) -> set[int]:
    """Return the identities of the nodes that are docstrings or other strings standing alone."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
