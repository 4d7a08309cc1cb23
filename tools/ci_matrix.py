"""Turns the list that ``nox -l --json`` prints into the matrix of a GitHub workflow, one cell for each session.

Run as ``nox -l --json -t ci | python tools/ci_matrix.py``, with ``--python 3.10 3.13`` for a cell for each Python.
The matrix goes to standard output, on one line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence

DEFAULT_PYTHON = "3.12"


def cells(listing: object, pythons: Iterable[str] = (DEFAULT_PYTHON,)) -> list[dict[str, str]]:
    """Make a cell for each session and Python.

    A backend that a cell was made for must be there: such a cell gets ``--require``, for a run that skips everything
    would be green without having tested anything.

    Args:
        listing: What ``nox -l --json`` printed, parsed: a list of objects with ``"session"`` and ``"name"``.
        pythons: Versions of Python, such as ``"3.10"``.

    Returns:
        Cells with the keys ``session`` (for ``nox -s``), ``python`` and ``arguments`` (what comes after the session).

    Raises:
        ValueError: If the list has another form, or would give no cell at all.

    Example:
        >>> cells([{"session": "lint", "name": "lint"}], ["3.10"])
        [{'session': 'lint', 'python': '3.10', 'arguments': ''}]
    """
    if not isinstance(listing, list):
        raise ValueError("expected the list that `nox -l --json` prints")
    versions = list(pythons)
    found = []
    for entry in listing:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("session", "name")):
            raise ValueError(f"expected a session as `nox -l --json` prints it, found {entry!r}")
        arguments = "-- --require" if entry["name"] == "ranks" else ""
        found += [{"session": entry["session"], "python": version, "arguments": arguments} for version in versions]
    if not found:
        raise ValueError("no session is selected, so that no cell would run: look at the tags in noxfile.py")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the list from standard input and print the matrix.

    Args:
        arguments: The command line, without the program's name; that of the process if None.

    Returns:
        The exit status: 1 if there is nothing to make a matrix of.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--python", nargs="+", default=[DEFAULT_PYTHON], help="versions of Python to run on")
    options = parser.parse_args(arguments)
    try:
        matrix = {"include": cells(json.load(sys.stdin), options.python)}
    except ValueError as error:
        print(f"ci_matrix: {error}", file=sys.stderr)
        return 1
    print(json.dumps(matrix))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
