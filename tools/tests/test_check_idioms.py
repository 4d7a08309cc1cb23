"""Phrases that readers stumbled over are found in prose, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
from check_idioms import LIST, ROOT, Idioms, check, prose, strings

TWO = Idioms.read("# again\n\\banew\\b\n# raises\n\\b(is|are) an error\\b\n")


def test_the_pages_are_free_of_them() -> None:
    idioms = Idioms.read(LIST.read_text(encoding="utf-8"))
    assert len(idioms.patterns) > 20
    assert check(ROOT, idioms, sources=False) == []
    # Nor does the list excuse what is gone.
    for each in idioms.exempt:
        assert each.part in (ROOT / each.file).read_text(encoding="utf-8"), each


def test_a_phrase_is_found_over_a_line_break_and_named_by_its_first_line() -> None:
    text = "Build it.\nAnother order is\nan error. Build it anew."
    assert sorted(TWO.found_in("a.md", text)) == [(2, "is an error"), (3, "anew")]


def test_code_is_no_prose() -> None:
    page = "before anew\n```python\nx = 'anew'\n```\n`anew` and\nanew\n"
    assert [line for line, _ in TWO.found_in("a.md", prose(page))] == [1, 6]


def test_strings_of_a_module_are_messages_if_they_have_words() -> None:
    source = 'x = "anew"\nraise ValueError(f"rank {rank} must be built anew" + f" with {name}")\n'
    assert [(line, text) for line, text in strings(source)] == [(2, "rank … must be built anew")]


def test_sources_are_looked_at_if_asked_for(tmp_path: Path) -> None:
    module = tmp_path / "packages" / "one" / "src" / "one.py"
    module.parent.mkdir(parents=True)
    module.write_text('"""Two models that differ are an error."""\n')
    (tmp_path / "README.md").write_text("Build it anew.\n")
    assert check(tmp_path, TWO, sources=False) == ["README.md:1: 'anew'"]
    assert check(tmp_path, TWO, sources=True) == ["README.md:1: 'anew'", "packages/one/src/one.py:1: 'are an error'"]


def test_an_exception_holds_for_one_line_of_one_file() -> None:
    idioms = Idioms.read("# again\n\\banew\\b\n@ a.md | as torch says | a quotation\n")
    assert list(idioms.found_in("a.md", "as torch says: anew\nanew")) == [(2, "anew")]
    assert len(list(idioms.found_in("b.md", "as torch says: anew"))) == 1


@pytest.mark.parametrize("wrong", ["@ a.md | as torch says\n", "@ a.md | as torch says |\n", "\\banew\\b\n"])
def test_an_exception_needs_a_reason_and_a_pattern_a_comment(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"reason|comment"):
        Idioms.read(wrong)
