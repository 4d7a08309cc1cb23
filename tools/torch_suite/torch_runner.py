"""PyTorch's own runner: unittest, in one process, with ranks that each test spawns for itself.

``python torch_runner.py VERDICTS MODULE CLASS METHOD...`` runs the methods one after another and appends a line of JSON
to the file VERDICTS as each of them ends: ``method``, ``verdict``, ``seconds`` and ``text`` (why it was skipped or how
it failed).
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import unittest
from pathlib import Path
from typing import Any

Failure = Any
"""What `sys.exc_info` returns."""


class _Verdicts(unittest.TestResult):
    """Appends what becomes of each test to a file."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file
        self._began = 0.0

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        super().startTest(test)
        self._began = time.monotonic()

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self._append(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self._append(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Failure) -> None:  # noqa: N802
        self._append(test, "failed", str(err[1]))

    addError = addFailure  # noqa: N815

    def addExpectedFailure(self, test: unittest.TestCase, err: Failure) -> None:  # noqa: N802
        self._append(test, "skipped", str(err[1]))

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self._append(test, "failed", "unexpected success")

    def _append(self, test: unittest.TestCase, verdict: str, text: str = "") -> None:
        line = {
            "method": test.id().rpartition(".")[2],
            "verdict": verdict,
            "seconds": time.monotonic() - self._began,
            "text": text,
        }
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def main(verdicts: str, module: str, class_name: str, *methods: str) -> None:
    """Run the methods of a class.

    Args:
        verdicts: the file to append to.
        module: the name of an importable module; each rank imports it as well.
        class_name: the test case in it.
        *methods: the names of its methods, in the order in which to run them.
    """
    case = getattr(importlib.import_module(module), class_name)
    unittest.TestSuite(case(method) for method in methods).run(_Verdicts(Path(verdicts)))


if __name__ == "__main__":
    main(*sys.argv[1:])
