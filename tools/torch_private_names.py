"""Where modules name what is private in torch, read from their sources with `ast`.

A name is private if it begins with one underscore. It is torch's if it is reached from what was imported from torch, or
if a module named ``_torch_private`` reaches it, on whatever object: what type an object has cannot be seen in a source.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator

from module_imports import Module, docstrings

HOME = "_torch_private"
"""The name of the modules that may."""


def is_home(module: Module) -> bool:
    """Tell whether this is a module that may name what is private in torch."""
    return module.name.rpartition(".")[2] == HOME


def private_names(modules: Iterable[Module]) -> frozenset[str]:
    """Return the private names that the modules named ``_torch_private`` reach: as attributes, and as strings."""
    found: set[str] = set()
    for module in modules:
        if is_home(module):
            found.update(node.attr for node in ast.walk(module.tree) if isinstance(node, ast.Attribute))
            found.update(text.rpartition(".")[2] for _, text in _strings(module.tree))
    return frozenset(filter(_is_private, found))


def private_uses(module: Module, names: Collection[str]) -> Iterator[tuple[int, str]]:
    """Find where a module names what is private in torch.

    What it reaches of itself, such as ``self._version``, is its own.

    Args:
        module: The module.
        names: Private names of torch, on whatever object.

    Yields:
        Line number, and the use in words.
    """
    for imported in module.imports:
        if _is_torch(imported.name) and any(map(_is_private, imported.full_name.split("."))):
            yield imported.line, f"import of {imported.full_name}"
    roots = _names_from_torch(module.tree)
    told: set[int] = set()
    for node in ast.walk(module.tree):
        # What is inside comes later in a walk: of ``torch._C._name`` the whole is told.
        if not isinstance(node, ast.Attribute) or not _is_private(node.attr) or id(node) in told:
            continue
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if _root(node) in roots or (node.attr in names and not own):
            told.update(map(id, ast.walk(node)))
            yield node.lineno, ast.unparse(node)
    for line, text in _strings(module.tree):
        if text in names or (_is_torch(text) and _is_private(text.rpartition(".")[2])):
            yield line, f"the name {text!r} as a string"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.isidentifier()


def _is_torch(dotted: str) -> bool:
    return dotted.partition(".")[0] == "torch"


def _names_from_torch(tree: ast.Module) -> set[str]:
    """Return what a module calls torch, what it imports from there, and what it sets to an attribute of these."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.asname or "torch" for alias in node.names if _is_torch(alias.name))
        elif isinstance(node, ast.ImportFrom) and not node.level and _is_torch(node.module or ""):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and _root(node.value) in names:
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


def _root(node: ast.expr) -> str:
    """Return the name from which an expression reaches what it means: ``a`` of ``a.b(c).d``; empty if there is none."""
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    left_out = docstrings(tree) | parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
            yield node.lineno, node.value
