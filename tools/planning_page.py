"""Writes the outputs of the commands on docs/planning.md: each block that begins with ``$ zeroshard plan``.

Run as ``python tools/planning_page.py`` where transformers and the extra ``zeroshard[cli]`` are installed. Commands run
in docs/examples/configs. With ``--check`` nothing is written, and the exit status is 1 if an output has changed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "planning.md"
_BLOCK = re.compile(
    r"^```console\n\$ zeroshard (?P<arguments>(?:[^\n]*\\\n)*[^\n]*)\n(?P<output>.*?)^```$", re.MULTILINE | re.DOTALL
)


def output_of(arguments: str) -> str:
    """Run the command in docs/examples/configs, and return what it prints.

    Raises:
        subprocess.CalledProcessError: if it fails.
    """
    words = shlex.split(arguments.replace("\\\n", " "))
    done = subprocess.run(
        [sys.executable, "-c", "from zeroshard.planner import main; main()", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=True,
    )
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


def with_outputs(page: str) -> str:
    """Return a page with the outputs of its commands as they are now."""
    return _BLOCK.sub(lambda m: f"```console\n$ zeroshard {m['arguments']}\n{output_of(m['arguments'])}```", page)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page; return the exit status.

    Args:
        arguments: The command line, without the program's name; that of the process if None.
    """
    parser = argparse.ArgumentParser(description="Write the outputs of the commands on docs/planning.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if an output has changed")
    options = parser.parse_args(arguments)
    before = PAGE.read_text(encoding="utf-8")
    now = with_outputs(before)
    if options.check:
        return int(now != before)
    PAGE.write_text(now, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
