"""The two sources of gradients know nothing of each other, and nobody asks which of them it has."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import zeroshard

ROOT = Path(zeroshard.__file__).parent
SOURCES = {
    "hooks of DistributedDataParallel": {"grads/exchange.py", "grads/buckets.py", "grads/ddp_checks.py"},
    "shard_gradients()": {
        "sharding.py", "sharding_join.py", "grads/sharded.py", "grads/held.py", "grads/transient.py",
        "grads/model_hooks.py",
    },
}  # fmt: skip
BUILDERS = {
    "engine.py": "makes the one that the user has called for",
    "optimizer.py": "returns what hooks of DistributedDataParallel call",
    "plan/predict.py": "computes the size of buckets before an optimizer is built",
    "__init__.py": "is what users import",
}
"""The other modules that mention names of a source, and why."""

QUESTIONS = {"isinstance", "issubclass", "type", "hasattr"}
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")}


def module_of(name: str) -> str:
    """Return the file of a module of this package by its dotted name."""
    return name.removeprefix("zeroshard.").replace(".", "/") + ".py"


def imported(tree: ast.AST) -> set[str]:
    return {module_of(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}


def defined(source: str) -> set[str]:
    """Return the names of the classes that the modules of a source define."""
    nodes = [node for path in SOURCES[source] for node in TREES[path].body if isinstance(node, ast.ClassDef)]
    return {node.name for node in nodes}


def names_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize(("source", "other"), [tuple(SOURCES), tuple(reversed(SOURCES))])
def test_a_source_imports_and_mentions_nothing_of_the_other(source: str, other: str) -> None:
    for path in SOURCES[source]:
        assert imported(TREES[path]).isdisjoint(SOURCES[other]), path
        assert defined(other).isdisjoint(names_in(TREES[path])), path


def test_other_modules_import_no_source_but_to_build_it() -> None:
    of_sources = set[str]().union(*SOURCES.values())
    found = {path for path, tree in TREES.items() if path not in of_sources and imported(tree) & of_sources}
    assert found == {*BUILDERS}


def test_no_function_asks_which_source_it_has() -> None:
    of_sources = set[str]().union(*SOURCES.values())
    names = set[str]().union(*map(defined, SOURCES))
    for path, tree in TREES.items():
        if path in of_sources:
            continue
        if path not in BUILDERS:
            assert names.isdisjoint(names_in(tree)), f"{path} mentions {names & set(names_in(tree))}"
        for node in ast.walk(tree):
            is_question = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in QUESTIONS
            if is_question or isinstance(node, (ast.Compare, ast.MatchClass)):
                assert names.isdisjoint(names_in(node)), f"{path}:{node.lineno} asks which source of gradients it has"
