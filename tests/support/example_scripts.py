"""The scripts of the pages about frameworks, run as tests: what two of them trained is compared."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from support.training import cutting
from zeroshard import ZeroRedundancyOptimizer

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS / "examples"


@dataclass(frozen=True)
class Trained:
    """What one training left on a rank."""

    params: dict[str, torch.Tensor]
    losses: list[float]
    norms: list[float]
    complaints: list[str]
    """Warnings, and what was logged as one."""


def script(name: str) -> ModuleType:
    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        return importlib.import_module(name)


def page_script(page: str) -> str:
    """Return the program that a page of the documentation shows, without the process group that a test has already."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(encoding="utf-8"), re.DOTALL)
    program = next(block for block in blocks if "init_process_group" in block)
    return program.replace('dist.init_process_group("gloo")\n', "").replace("dist.destroy_process_group()\n", "")


def train(name: str, *arguments: Any, replaced: dict[str, Any] | None = None, **options: Any) -> Trained:
    """Call a script's ``train()``, with some of its names replaced."""
    module = script(name)
    with mock.patch.dict(vars(module), replaced or {}), _recorded() as complaints:
        model, losses, norms = module.train(*arguments, **options)
    params = {name: param.detach().clone() for name, param in model.named_parameters()}
    return Trained(params, losses, norms, sorted(complaints))


def assert_equal(ours: Trained, theirs: Trained, steps: int, rounding: float = 0.0) -> None:
    assert len(ours.losses) == steps
    for numbers in ((ours.losses, theirs.losses), (ours.norms, theirs.norms)):
        found, expected = (torch.tensor(each, dtype=torch.float64) for each in numbers)
        torch.testing.assert_close(found, expected, rtol=0, atol=rounding)
    torch.testing.assert_close(ours.params, theirs.params, rtol=0, atol=rounding)
    assert ours.complaints == theirs.complaints


PLUGINS: dict[str, dict[str, Any]] = {
    "hook": {},
    "sharded": {"gradients": "sharded"},
    "sharded, local": {"gradients": "sharded", "accumulate": "local"},
}
"""Arguments of the plugins for frameworks, by the name of a test's case."""


def sharded(partition: str) -> Callable[..., ZeroRedundancyOptimizer]:
    """ZeroRedundancyOptimizer with this partition, whichever a script names; it cuts small tensors too."""

    def build(*arguments: Any, **options: Any) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(*arguments, **{**options, "partition": cutting(partition)})

    return build


def lines_that_differ(first: str, second: str) -> list[str]:
    texts = [(EXAMPLES / f"{name}.py").read_text().splitlines() for name in (first, second)]
    return [line for line in difflib.ndiff(*texts) if line.startswith("+ ")]


@contextlib.contextmanager
def _recorded() -> Iterator[list[str]]:
    """Record warnings, and what Python's logging is told of them by any library."""
    found: list[str] = []

    class Record(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(f"{record.name}: {record.getMessage()}")

    handler = Record(logging.WARNING)
    # Some of them do not hand on what they log.
    loggers = [logging.getLogger(name) for name in ("", "accelerate", "transformers", "torch")]
    loggers = [each for each in loggers if each.name == "root" or not each.propagate]
    for each in loggers:
        each.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
        found += [f"{each.category.__name__}: {each.message}" for each in caught]
    finally:
        for each in loggers:
            each.removeHandler(handler)
