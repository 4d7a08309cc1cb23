"""What the documentation's pages say of the sources is still there."""

from __future__ import annotations

import ast
import difflib
import importlib
import re
from pathlib import Path

import inlined_code
import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGES = ("zeroshard_core", "zeroshard_comm", "zeroshard", "zeroshard_integrations", "zeroshard_testing")
HOLE = "…"


def text_of(node: ast.AST) -> str:
    """The text of a string expression, with a hole for each value in it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    return HOLE


def texts() -> list[str]:
    files = [file for package in PACKAGES for file in ROOT.glob(f"packages/*/src/{package}/**/*.py")]
    found = []
    for tree in (ast.parse(file.read_text(encoding="utf-8")) for file in files):
        prose = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        nodes = {node for node in ast.walk(tree) if isinstance(node, (ast.Constant, ast.JoinedStr))}
        found += [text_of(node) for node in nodes - prose]
    return found


def rows(page: str) -> list[list[str]]:
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def test_every_message_on_the_page_of_errors_is_one_of_the_sources():
    cells = [first for first, *others in rows("errors.md") if first.startswith("`") and len(others) == 2]
    messages = [message for cell in cells for message in re.findall("`([^`]+)`", cell)]
    patterns = [".*".join(map(re.escape, message.split(HOLE))) for message in messages]
    found = texts()

    assert len(messages) > 50
    assert not [pattern for pattern in patterns if not any(re.search(pattern, text, re.DOTALL) for text in found)]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_error_is_on_the_page_of_errors(package):
    module = importlib.import_module(package)
    public = [getattr(module, name) for name in getattr(module, "__all__", [])]
    errors = [kind.__name__ for kind in public if isinstance(kind, type) and issubclass(kind, Exception)]
    page = (DOCS / "errors.md").read_text(encoding="utf-8")

    assert [name for name in errors if f"`{name}`" not in page] == []


def test_every_name_on_the_page_for_contributors_exists():
    names = set(re.findall(r"`(zeroshard\w*(?:\.\w+)+)(?:\(\))?`", (DOCS / "contributing.md").read_text("utf-8")))

    assert len(names) > 20
    for name in sorted(names):
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:length]))
                break
            except ModuleNotFoundError:
                continue
        for part in parts[length:]:
            assert hasattr(found, part), name
            found = getattr(found, part)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_lines_that_change_are_lines_of_the_examples(page):
    # Given the two examples, and the difference that the page shows first,
    plain, sharded = ((DOCS / "examples" / name).read_text("utf-8").splitlines() for name in ("plain.py", "sharded.py"))
    shown = re.search("```diff\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)[1].splitlines()
    # when they are compared,
    compared = [line[0] + line[2:] for line in difflib.ndiff(plain, sharded) if line[0] in "+-"]
    # then the examples change these lines too.
    assert len(shown) == 4
    assert not {*shown} - {*compared}


def test_pages_show_the_code_of_the_examples():
    assert inlined_code.main(["--check"]) == 0


@pytest.mark.parametrize("file", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_every_relative_link_at_the_root_has_a_target(file):
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / file).read_text("utf-8"))
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        # A link of an anchor alone is into the same file.
        target = ROOT / (path or file)
        assert target.exists(), link
        if anchor:
            headings = re.findall("^#+ (.*)$", target.read_text("utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in slugs, link
