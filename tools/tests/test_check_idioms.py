"""Phrases that readers stumbled over are found in prose, and nowhere else."""

from __future__ import annotations

from pathlib import Path

from check_idioms import LIST, ROOT, check, prose, read, strings

TWO = read("# again\n\\banew\\b\n\n# raises\n\\b(is|are) an error\\b\n")


def test_the_pages_and_the_packages_are_free_of_them() -> None:
    patterns = read(LIST.read_text(encoding="utf-8"))
    assert len(patterns) > 20
    assert check(ROOT, patterns) == []


def test_a_phrase_is_found_over_a_line_break_in_pages_and_sources(tmp_path: Path) -> None:
    module = tmp_path / "packages" / "one" / "src" / "one.py"
    module.parent.mkdir(parents=True)
    module.write_text('"""One module.\n\nTwo models that differ are an\nerror.\n"""\n')
    (tmp_path / "README.md").write_text("Build it.\nAnother order is\nan error. Build it anew.\n")
    assert check(tmp_path, TWO) == [
        "README.md:2: 'is an error'", "README.md:3: 'anew'", "packages/one/src/one.py:3: 'are an error'"
    ]  # fmt: skip


def test_code_is_no_prose() -> None:
    page = "before anew\n```python\nx = 'anew'\n```\n`anew` and\n~~~\nanew\n~~~\nanew\n"
    assert [number for number, line in enumerate(prose(page).splitlines(), 1) if "anew" in line] == [1, 9]


def test_strings_of_a_module_are_messages_if_they_have_words() -> None:
    source = 'x = "anew"\nraise ValueError(f"rank {rank} must be built anew" + f" with {name}")\n'
    assert list(strings(source)) == [(2, "rank … must be built anew")]
