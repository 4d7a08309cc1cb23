"""The commands that README.md and the guides show run as they stand, and print what the pages show.

The commands of a page run in one shell, in a copy of the repository: lines of ``sh`` blocks, lines of ``console``
blocks that begin with ``$``, and commands in the text, which run at the root of the copy. What a console block shows
after a command must be printed, with any numbers. A Python block that begins with ``# name.py`` becomes that file.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NO_GUIDES = ("benchmarks.md", "changelog.md", "design.md", "index.md")
GUIDES = [page for page in ROOT.glob("docs/**/*.md") if page.parent.name in ("docs", "frameworks")]
# As text: the page of all frameworks comes first, and what it installs is there for the page of each.
PAGES = [ROOT / "README.md", *sorted((page for page in GUIDES if page.name not in NO_GUIDES), key=str)]
NOT_RUN = {
    r"(.*\.venv/bin/)?nox -s (?!quickstart)": "nox runs it by itself, or a developer does",
    r"nox -s quickstart": "README's quickstart is run",
    r"torchrun --nnodes": "needs several hosts",
    r"torchrun --max-restarts": "an option, not a command",
    r"ZEROSHARD_DROP_EDGE": "names a file of the reader",
    r"hf download": "fetches a file from the network",
}
"""Commands that do not run, by a regular expression of their beginning, with the reason."""
PART = re.compile(
    r"^```(?P<kind>python|sh|console)\n(?P<block>.*?)^```$"
    r"|`(?P<inline>(?:bash|hf|pip|python|torchrun|zeroshard plan|(?:\.venv/bin/)?nox) [^`\n]+)`",
    re.MULTILINE | re.DOTALL,
)
LINES = re.compile(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
AT_THE_ROOT = 'cd "$COPY" && '


def commands(page: str) -> Iterator[tuple[str, str]]:
    """Each command of a page, for a shell whose ``$COPY`` is the root, and the output that the page shows."""
    for part in PART.finditer(page):
        block = part["block"] or ""
        if part["inline"]:
            yield f"({AT_THE_ROOT}{part['inline']})", ""
        elif part["kind"] == "sh":
            yield from ((line, "") for line in block.splitlines())
        elif part["kind"] == "console":
            yield from LINES.findall(block)
        elif name := re.match(r"# (\S+\.py)\n", block):
            yield f"cat > {name[1]} <<'END OF FILE'\n{block}END OF FILE", ""


def reasons(command: str) -> list[str]:
    typed = command.removeprefix(f"({AT_THE_ROOT}")
    return [beginning for beginning in NOT_RUN if re.match(beginning, typed)]


TYPED = {
    page.name: typed
    for page in PAGES
    if (typed := [(line, shown) for line, shown in commands(page.read_text("utf-8")) if not reasons(line)])
}
"""The commands of each page that run, in order, with what they print."""


def missing(shown: str, printed: str) -> str:
    """The first shown line that was not printed after those above it, whatever its numbers; empty if all were.

    Blank lines do not count.
    """
    expected, found = (
        [re.sub(r"\d[\d.,]*", "1", " ".join(line.split())) for line in text.splitlines() if line.strip()]
        for text in (shown, printed)
    )
    left = iter(found)
    return next((line for line in expected if not any(other.startswith(line) for other in left)), "")


def run(typed: Iterable[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run commands in a new copy of the repository; each prints a record separator first."""
    made = shutil.ignore_patterns(".git", ".nox", ".venv", "_build", "__pycache__", ".*_cache")
    copy = shutil.copytree(ROOT, folder, ignore=made)
    # Alone, -e would not see that a command before && fails.
    script = "\n".join(["exec 2>&1", *(f"printf '\\036'\n{{ {command}\n}} || exit 1" for command in typed)])
    return subprocess.run(
        [shutil.which("bash") or "bash", "-ec", script], cwd=copy, env={**os.environ, "COPY": str(copy)}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False,
    )  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", TYPED)
def test_the_commands_of_a_page_run_and_print_what_it_shows(page: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="some pages train under frameworks, and others read their configs")
    typed = TYPED[page]

    for attempt in range(3):
        ran = run([command for command, _ in typed], tmp_path / str(attempt))
        # In torch a process may abort while it exits, after it has done its work: pytorch#190489.
        if "terminate called without an active exception" not in ran.stdout:
            break

    printed = ran.stdout.split("\036")[1:]
    assert ran.returncode == 0, f"{typed[len(printed) - 1][0]}\n{printed[-1][-5000:]}"
    for (command, shown), text in zip(typed, printed, strict=True):
        assert not missing(shown, text), f"{command}\n{text[-5000:]}"


def test_each_reason_not_to_run_a_command_is_that_of_some_page() -> None:
    every = [command for page in PAGES for command, _ in commands(page.read_text("utf-8"))]
    assert len(every) > 70
    assert {reason for command in every for reason in reasons(command)} == {*NOT_RUN}


@pytest.mark.exhaustive
def test_a_command_that_fails_before_another_one_ends_the_page(tmp_path: Path) -> None:
    ran = run(["cd docs", "false && echo never", "echo after"], tmp_path / "copy")
    assert (ran.returncode, ran.stdout) == (1, "\036\036")


def test_commands_are_found_with_what_they_print_and_the_files_that_they_need() -> None:
    page = "\n".join([
        "Run `pip install it`, not `pip`.", "```python", "# it.py", "print(1)", "```", "```console", "$ python \\",
        "    it.py", "1 is printed", "$ true", "```", "```python", "print(2)", "```",
    ])  # fmt: skip
    found = [*commands(page)]
    assert found == [
        ('(cd "$COPY" && pip install it)', ""),
        ("cat > it.py <<'END OF FILE'\n# it.py\nprint(1)\nEND OF FILE", ""),
        ("python \\\n    it.py", "1 is printed\n"),
        ("true", ""),
    ]


@pytest.mark.parametrize(
    ("printed", "lacks"),
    [
        ("warning\nloss 2.51\n  saved in 3  s\n", ""),
        ("saved in 1 s\nloss 2.5", "saved in 1 s"),
        ("a loss 2.5\nsaved in 1 s", "loss 1"),
        ("loss 2.5\n", "saved in 1 s"),
    ],
    ids=["other numbers and lines", "another order", "another line", "an end after a blank line"],
)
def test_lines_are_printed_in_the_order_of_the_page_with_any_numbers(printed: str, lacks: str) -> None:
    assert missing("loss 2.5\n\nsaved in 1 s\n", printed) == lacks
