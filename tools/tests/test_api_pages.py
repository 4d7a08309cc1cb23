"""Every public name is on a page of the API: documented, and in a table at its top."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
REEXPORTED = {"ZeroRedundancyOptimizer"}
"""Under this name frameworks' modules have the one of zeroshard, which is documented there."""
CONSTANTS_AND_TORCHS = {"Joinable", "JoinHook"}
"""Names of torch's, which have no summary of ours in a table."""


def exported() -> dict[str, list[str]]:
    """The names in each module's ``__all__``, read from its source: not every framework is installed."""
    found = {}
    for source in ROOT.glob("packages/*/src"):
        for file in sorted(source.rglob("*.py")):
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                    module = ".".join(file.relative_to(source).with_suffix("").parts)
                    found[module.removesuffix(".__init__")] = list(ast.literal_eval(node.value))
    return found


def documented() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """What each module has on the pages: names with an entry, and names in tables."""
    entries: dict[str, set[str]] = defaultdict(set)
    tables: dict[str, set[str]] = defaultdict(set)
    for page in PAGES:
        module, in_table = "", False
        for line in page.read_text(encoding="utf-8").splitlines():
            if moved := re.match(r"\.\. (?:currentmodule|automodule):: (\S+)", line):
                module = moved[1]
            elif entry := re.match(r"\.\. (?:auto\w+|py:\w+):: (\w+)$", line):
                entries[module].add(entry[1])
            in_table = line.startswith(".. autosummary::") or (in_table and not re.match(r"\S", line))
            if in_table and (name := re.match(r"   (\w+)$", line)):
                tables[module].add(name[1])
    return entries, tables


EXPORTED = exported()


@pytest.mark.parametrize("module", [name for name in EXPORTED if name != "zeroshard_core.plan"])
def test_every_exported_name_has_an_entry_and_a_place_in_a_table(module: str) -> None:
    assert EXPORTED.keys() >= {"zeroshard", "zeroshard_core", "zeroshard_comm", "zeroshard_testing"}
    entries, tables = documented()
    names = set(EXPORTED[module]) - (REEXPORTED if module != "zeroshard" else set())
    constants = {name for name in names if name.isupper() or name in {"Cost", "Owners", "Probed", "Strategy"}}
    assert names - entries[module] == set()
    assert names - constants - CONSTANTS_AND_TORCHS - tables[module] == set()
    # Nor is there an entry or a row for what is gone.
    assert entries[module] - names <= {"sharded_optimizer"}
    assert tables[module] <= entries[module]


def test_the_optimizer_comes_first() -> None:
    page = (ROOT / "docs/api/zeroshard.md").read_text(encoding="utf-8")
    assert page.index("ZeroRedundancyOptimizer") < page.index("autosummary") < page.index("AveragedParameters")
    assert re.findall(r"\.\. auto(?:class|function):: (\w+)", page)[0] == "ZeroRedundancyOptimizer"
