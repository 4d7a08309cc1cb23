"""Measures coverage of the lines that run on ranks, if pytest-cov measures the controller.

Each worker writes a data file next to the controller's, and pytest-cov combines them. A killed worker writes none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zeroshard_testing.ipc import Message


def coverage_request(config: pytest.Config | None) -> Message | None:
    """Return the arguments with which `coverage.Coverage` measures as pytest-cov does; None if it does not measure."""
    plugin: Any = None if config is None else config.pluginmanager.get_plugin("_cov")
    controller = getattr(plugin, "cov_controller", None)
    if controller is None or controller.cov is None:
        return None
    cov = controller.cov
    return {
        "data_file": cov.config.data_file,
        "config_file": getattr(plugin.options, "cov_config", ".coveragerc"),
        "source": controller.cov_source,
        "branch": bool(cov.get_option("run:branch")) or None,
        "data_suffix": True,
    }


def measure_coverage(request: Message | None) -> Callable[[], None]:
    """Measure as `coverage_request` says. Return a function that saves the data so far; it may be called repeatedly."""
    if request is None:
        return lambda: None
    import coverage

    measured = coverage.Coverage(**request)
    measured.start()

    def save() -> None:
        measured.stop()
        measured.save()
        measured.start()

    return save
