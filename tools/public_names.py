"""The public names of the packages and their signatures, compared with the committed list ``public_names.txt``.

Run as ``python tools/public_names.py``; ``--write`` writes the list. Public is what a module without an underscore has
in its ``__all__``, and of a class the attributes that it defines itself. A change of the list is a change for users: it
belongs into the same commit, with its reason.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from module_imports import read_packages

PACKAGES = ("zeroshard_core", "zeroshard_comm", "zeroshard", "zeroshard_integrations")
ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("public_names.txt")
_OPTIONAL = frozenset({"accelerate", "lightning", "transformers"})
"""Modules of the integrations that need another framework: their names are listed from the sources alone."""


def public_names(root: Path = ROOT) -> list[str]:
    """Return a line for each public name, sorted, such as ``zeroshard_core.flat: storage_view(tensor)``."""
    found: list[str] = []
    for name, module in sorted(read_packages(root, PACKAGES).items()):
        parts = name.split(".")
        if any(part.startswith("_") for part in parts):
            continue
        source = module.path.read_text(encoding="utf-8")
        if parts[-1] in _OPTIONAL:
            found += [f"{name}: {each}" for each in re.findall(r"^(?:class|def) ([A-Za-z]\w*)", source, re.MULTILINE)]
        if parts[-1] in _OPTIONAL or "__all__ = " not in source:
            continue
        loaded = importlib.import_module(name)
        for each in loaded.__all__:
            found += [f"{name}: {line}" for line in _described(each, getattr(loaded, each))]
    return sorted(found)


def _described(name: str, value: object) -> Iterator[str]:
    if inspect.isclass(value):
        is_plain = issubclass(value, (enum.Enum, BaseException))
        yield name if is_plain else f"{name}{_signature(value)}"
        # Of torch's classes, only that they are here.
        is_own = value.__module__.startswith(PACKAGES)
        for attribute, held in vars(value).items():
            if is_own and not attribute.startswith("_"):
                call = getattr(held, "__func__", held)
                yield f"{name}.{attribute}{_signature(call) if inspect.isfunction(call) else ''}"
    else:
        yield f"{name}{_signature(value) if inspect.isfunction(value) else ''}"


def _signature(value: object) -> str:
    """The parameters with their defaults, without types."""
    assert callable(value)
    try:
        found = inspect.signature(value)
    except ValueError:
        return ""
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values()]
    # Addresses of objects differ.
    return re.sub(r" at 0x\w+", "", str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the public names with the committed list, or write it; the exit status is 1 if they differ.

    Args:
        arguments: the command line, without the program's name; that of the process if None.
    """
    parser = argparse.ArgumentParser(description="Compare the public names with the committed list.")
    parser.add_argument("--write", action="store_true", help="write the list")
    now = public_names()
    if parser.parse_args(arguments).write:
        LIST.write_text("\n".join(now) + "\n", encoding="utf-8")
        return 0
    before = LIST.read_text(encoding="utf-8").splitlines() if LIST.exists() else []
    for line in sorted({*now} ^ {*before}):
        print(f"{'+' if line in now else '-'} {line}")
    return int(now != before)


if __name__ == "__main__":
    raise SystemExit(main())
