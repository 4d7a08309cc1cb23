"""The scripts of the page about Lightning and Fabric, trained with the options of their frameworks."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from support import example_scripts
from support.framework_training import Run

TWENTY = 20

CLIPPING: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "lightning": {
        "norm": {"gradient_clip_val": 0.5},
        "value": {"gradient_clip_val": 0.003, "gradient_clip_algorithm": "value"},
        "off": {},
    },
    "fabric": {"norm": {"max_norm": 0.5}, "value": {"clip_val": 0.003}, "off": {}},
}


def script(name: str) -> ModuleType:
    """Import a script of the page."""
    # Lightning's module, which registers the strategy, even for scripts that leave it out.
    importlib.import_module("zeroshard_integrations.lightning")
    return example_scripts.script(name)


def strategy(framework: str, plugin: str) -> Any:
    """Return the strategy of a test's case: ours with the arguments of a plugin; a name is what it says."""
    ours = importlib.import_module("zeroshard_integrations.lightning")
    if plugin not in example_scripts.PLUGINS:
        return "ddp" if plugin == "none" else plugin
    made = ours.ZeroShardStrategy if framework == "lightning" else ours.FabricZeroShardStrategy
    return made(gradient_as_bucket_view=True, **example_scripts.PLUGINS[plugin])


def train(
    framework: str,
    is_sharded: bool,
    checkpoint: Path,
    *,
    resume_from: Path | None = None,
    steps: int = TWENTY,
    accumulated: int = 1,
    clipping: str = "off",
    plugin: str = "hook",
    partition: str = "whole",
    **options: Any,
) -> Run:
    """Run one of the four scripts; ``options`` are those of ``Trainer``, or of the script of Fabric."""
    module = script(f"{framework}_{'sharded' if is_sharded else 'plain'}")
    if is_sharded and plugin != "hook":
        options["strategy"] = strategy(framework, plugin)
    options |= CLIPPING[framework][clipping]
    if framework == "lightning":
        options |= {"max_steps": steps, "accumulate_grad_batches": accumulated}
    else:
        options |= {"steps": steps, "accumulated": accumulated}
    ours = example_scripts.sharded(partition)
    # Lightning removes WORLD_SIZE at the end of a training that torchrun has not started.
    with mock.patch.dict(os.environ), mock.patch.object(module, "ZeroRedundancyOptimizer", ours, create=True):
        trained = module.train(checkpoint, resume_from, **options)
    return Run(*trained) if framework == "fabric" else Run(trained.model, trained.losses)


@contextlib.contextmanager
def recorded() -> Iterator[set[str]]:
    """Collect what Lightning logs and what anything warns of, without names in which two equal runs differ."""
    found: set[str] = set()
    handler = logging.Handler()
    handler.emit = lambda record: found.add(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("", "lightning.pytorch", "lightning.fabric")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield found
        found.update(str(warning.message) for warning in caught)
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    renamed = {re.sub("(?<=lr_find_)[0-9a-f-]+", "", line.replace("ZeroShardS", "DDPS")) for line in found}
    found.clear()
    found.update(renamed)
