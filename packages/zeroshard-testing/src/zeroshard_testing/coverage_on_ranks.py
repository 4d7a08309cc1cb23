"""Coverage of the lines that run on ranks, where pytest-cov measures the controller.

Each worker writes a data file beside the controller's, which pytest-cov combines. One that is killed leaves nothing.
"""

from __future__ import annotations

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


class Coverage:
    """The measurement of one worker, from when it is made with what `coverage_request` returned."""

    def __init__(self, request: Message | None) -> None:
        self._coverage: Any = None
        if request is None:
            return
        import coverage

        self._coverage = coverage.Coverage(**request)
        self._coverage.start()

    def save(self) -> None:
        """Write what was measured so far. Safe to call repeatedly."""
        if self._coverage is not None:
            self._coverage.stop()
            self._coverage.save()
            self._coverage.start()
