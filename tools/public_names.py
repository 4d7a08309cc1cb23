"""The public names of the packages and their signatures, compared with the committed list ``public_names.txt``.

Run as ``python tools/public_names.py``; ``--write`` writes the list. Public are the names in the ``__all__`` of
modules without an underscore, and the attributes that a class defines itself. A change of the list is a change for
users, so commit the list together with the change, and give the reason.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("zeroshard_core", "zeroshard_comm", "zeroshard", "zeroshard_integrations")
ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("public_names.txt")
_OPTIONAL = frozenset({"accelerate", "lightning", "transformers"})
"""Modules of the integrations that need another framework: their names are listed from the sources only."""


def public_names() -> list[str]:
    """Return a line for each public name, sorted, such as ``zeroshard_core.flat: storage_view(tensor)``."""
    found: list[str] = []
    for file in (file for package in PACKAGES for file in ROOT.glob(f"packages/*/src/{package}/**/*.py")):
        _, _, within = file.with_suffix("").as_posix().rpartition("/src/")
        name, source = within.replace("/", ".").removesuffix(".__init__"), file.read_text(encoding="utf-8")
        if "._" in name:
            continue
        if file.stem in _OPTIONAL:
            found += [f"{name}: {each}" for each in re.findall(r"^(?:class|def) ([A-Za-z]\w*)", source, re.MULTILINE)]
        elif "__all__ = " in source:
            loaded = importlib.import_module(name)
            found += [f"{name}: {line}" for each in loaded.__all__ for line in _described(each, getattr(loaded, each))]
    return sorted(found)


def _described(name: str, value: object) -> Iterator[str]:
    if not inspect.isclass(value):
        yield f"{name}{_signature(value) if inspect.isfunction(value) else ''}"
        return
    yield name if issubclass(value, (enum.Enum, BaseException)) else f"{name}{_signature(value)}"
    # Of torch's classes, list only the name.
    for attribute, held in vars(value).items() if value.__module__.startswith(PACKAGES) else ():
        if not attribute.startswith("_"):
            call = getattr(held, "__func__", held)
            yield f"{name}.{attribute}{_signature(call) if inspect.isfunction(call) else ''}"


def _signature(value: object) -> str:
    """Return the parameters with their defaults, without types."""
    assert callable(value)
    try:
        found = inspect.signature(value)
    except ValueError:
        return ""
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values()]
    # Addresses of objects differ.
    return re.sub(r" at 0x\w+", "", str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty)))


def main() -> int:
    """Compare the public names with the committed list, or write it; the exit status is 1 if they differ."""
    now = public_names()
    if "--write" in sys.argv:
        LIST.write_text("\n".join(now) + "\n", encoding="utf-8")
        return 0
    before = LIST.read_text(encoding="utf-8").splitlines()
    print(*(f"{'+' if line in now else '-'} {line}" for line in sorted({*now} ^ {*before})), sep="\n")
    return int(now != before)


if __name__ == "__main__":
    raise SystemExit(main())
