"""Imports in a rank what pytest has imported in the controller: the same file, under the same name, rewritten."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

_imported: dict[tuple[str, str], ModuleType] = {}


def is_imported(name: str, path: str) -> bool:
    """Whether `import_test_module` has this module already and will not execute anything."""
    return (name, path) in _imported


def import_test_module(name: str, path: str) -> ModuleType:
    """Import a test module or conftest as the controller knows it, with its assertions rewritten.

    The caller has set `sys.path` to the controller's, which holds what pytest's import mode, ``pythonpath`` and
    conftest files have put there.

    Args:
        name: The module's name in the controller.
        path: Its file.

    Returns:
        The module, executed once per process.

    Raises:
        ImportError: If there is no such file, or whatever the module itself raises.
    """
    if (name, path) not in _imported:
        _imported[name, path] = _import(name, path)
    # A namesake (every folder may have a conftest.py) may have taken the place since.
    module = sys.modules[name] = _imported[name, path]
    return module


def _import(name: str, path: str) -> ModuleType:
    loaded = sys.modules.get(name)
    if loaded is not None and _same_file(loaded.__file__, path):
        return loaded
    # pytest rewrites files by the pattern of their names; a file named on the command line may match none.
    pytest.register_assert_rewrite(name)
    found = _find(name)
    if found is not None and _same_file(found.origin, path):
        sys.modules.pop(name, None)
        return importlib.import_module(name)
    # Two conftest.py outside packages share a name, and import mode "importlib" uses names that nothing can import.
    return _import_file(name, path)


def _find(name: str) -> ModuleSpec | None:
    # find_spec answers for a loaded module from its own record, which may be that of a namesake.
    namesake = sys.modules.pop(name, None)
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    finally:
        if namesake is not None:
            sys.modules[name] = namesake


def _import_file(name: str, path: str) -> ModuleType:
    folder = [str(Path(path).parent)]
    for finder in sys.meta_path:
        spec = finder.find_spec(name, folder)
        if spec is not None and _same_file(spec.origin, path):
            break
    else:
        spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path}", name=name, path=path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _same_file(one: str | None, other: str) -> bool:
    return one is not None and Path(one).resolve() == Path(other).resolve()
