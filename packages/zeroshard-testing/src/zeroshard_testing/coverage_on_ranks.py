"""Coverage of the lines that run on ranks, where pytest-cov measures the controller.

Each worker writes a data file beside the controller's, which pytest-cov combines. One that is killed leaves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zeroshard_testing.ipc import Message


def coverage_request(config: pytest.Config | None) -> Message | None:
    """Return the arguments with which `coverage.Coverage` measures as pytest-cov does, None where it does not."""
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
    """Measure as `coverage_request` says; return what writes what was measured so far, and may be called repeatedly."""
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
