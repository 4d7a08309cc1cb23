"""The pytest of a worker: configured as the controller's, without plugins that belong to a run rather than to a test.

A rank collects a test's file and runs its setup, call and teardown by itself, so that every habit of pytest holds on
ranks. What makes a run of tests (reports, distribution, reruns, coverage, timeouts) stays with the controller.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from zeroshard_testing.ipc import Message

NOT_ON_RANKS = (
    "terminal",
    "terminalprogress",
    "faulthandler",
    "junitxml",
    "pastebin",
    "lfplugin",
    "xdist.looponfail",
    "pytest_cov",
    "timeout",
    "randomly",
    "rerunfailures",
    "flaky",
    "html",
    "metadata",
    "pytest_jsonreport",
    "instafail",
    "sugar",
    "random_order",
    "zeroshard",
    "zeroshard_testing.plugin",
)
"""Plugins that act in the controller alone, by the names under which pytest registers them."""

_OPTIONS = {
    "maxfail": 0,
    "keyword": "",
    "markexpr": "",
    "deselect": None,
    "lf": False,
    "failedfirst": False,
    "newfirst": False,
    "stepwise": False,
    "stepwise_skip": False,
    "usepdb": False,
    "trace": False,
    "setuponly": False,
    "setupplan": False,
    "setupshow": False,
    "basetemp": None,
    "log_file": None,
    "xmlpath": None,
    "strict_config": False,
    "capture": "no",
    "dist": "no",
    "numprocesses": None,
    "tx": [],
    "tbstyle": "auto",
    "plugins": [],
}
"""Options whose meaning is the controller's; ranks have these values of them instead."""


def description_of(config: pytest.Config | None) -> Message:
    """Return what `run_idle_pytest` needs to configure a worker's pytest, as a JSON object.

    Args:
        config: The controller's configuration, None outside pytest.
    """
    if config is None:
        return {
            "options": _OPTIONS,
            "arguments": ["-c", os.devnull, "--noconftest", "-p", "no:cacheprovider"],
            "markers": [],
            "worker": {},
        }
    options = {name: value for name, value in vars(config.option).items() if _is_plain(value)}
    overrides = [*(config.getoption("override_ini") or []), "log_file="]
    arguments = [
        "--rootdir",
        str(config.rootpath),
        "-c",
        str(config.inipath or os.devnull),
        f"--import-mode={config.getoption('importmode')}",
        "--noconftest",
        *(text for value in overrides for text in ("-o", value)),
        *(text for value in config.getoption("pythonwarnings") or [] for text in ("-W", value)),
        *(text for name in config.getoption("plugins") or [] for text in ("-p", name)),
    ]
    style = {"line": "short", "no": "short"}.get(options.get("tbstyle", "auto"), options.get("tbstyle", "auto"))
    # Those of plugins that ranks do without, too.
    markers = config.getini("markers")
    # What pytest-xdist tells a worker: its ranks have its name.
    worker = {name: value for name, value in getattr(config, "workerinput", {}).items() if _is_plain(value)}
    options |= {**_OPTIONS, "tbstyle": style}
    return {"options": options, "arguments": arguments, "markers": markers, "worker": worker}


def run_idle_pytest(description: Mapping[str, Any], body: Callable[[pytest.Session], None]) -> None:
    """Load torch, configure pytest, and call ``body`` where the session would collect.

    Args:
        description: What `description_of` returned.
        body: Takes the session.
    """
    # Before pytest is configured: a filter that makes an error of warnings is for tests, not for torch's own modules.
    import torch

    # Here, so that workers need not import it after the fork.
    from zeroshard_testing import process_group, process_state, rank_inspector, rank_values  # noqa: F401
    from zeroshard_testing.rank_plugin import RankPlugin

    if "numpy" in sys.modules:
        # torch has loaded the rest of it; every worker seeds it.
        importlib.import_module("numpy.random")
    torch.set_num_threads(1)
    # As pytest-xdist does in its workers.
    config = pytest.Config.fromdictargs(dict(description["options"]), list(description["arguments"]))
    for name in NOT_ON_RANKS:
        if config.pluginmanager.has_plugin(name):
            config.pluginmanager.unregister(name=name)
    config.pluginmanager.register(_TakeOver(body))
    config.pluginmanager.register(RankPlugin(), RankPlugin.name)
    config.pluginmanager.register(rank_values)
    if description["worker"]:
        config.workerinput = description["worker"]  # type: ignore[attr-defined]  # as pytest-xdist does
    for line in description["markers"]:
        config.addinivalue_line("markers", line)
    config.hook.pytest_cmdline_main(config=config)


class Collector:
    """Collects test files in a worker, each once.

    Args:
        session: The worker's session.
        temporary: Folder for ``tmp_path_factory``, made when it is asked for.
    """

    def __init__(self, session: pytest.Session, temporary: Path) -> None:
        self._session = session
        self._items: dict[str, dict[str, pytest.Item]] = {}
        # Private to pytest: the worker was configured without conftest files, which are loaded when a file is
        # collected, after the fork; and a base folder that is given by an option would be emptied by each worker.
        session.config.pluginmanager._noconftest = False
        session.config._tmp_path_factory._given_basetemp = temporary  # type: ignore[attr-defined]

    def has(self, path: str) -> bool:
        """Whether a file has been collected, so that nothing of it is executed any more."""
        return path in self._items

    def item(self, path: str, nodeid: str) -> pytest.Item:
        """Return a test of a file.

        Raises:
            LookupError: If collecting the file here gives no such test.
            CollectionFailure: If the file cannot be collected.
        """
        self.collect(path)
        try:
            return self._items[path][nodeid]
        except KeyError:
            raise LookupError(
                f"collecting {path} on the rank gives no test {nodeid!r}, as it did in pytest's own process: names and "
                f"parameters of tests must not depend on the process (sets, object addresses, random numbers)"
            ) from None

    def collect(self, path: str) -> None:
        """Import a test file and the conftest files that hold for it, as pytest does.

        Raises:
            CollectionFailure: If it cannot be collected.
        """
        if path in self._items:
            return
        plugins = self._session.config.pluginmanager.get_plugins()
        rank_plugin: Any = self._session.config.pluginmanager.get_plugin("zeroshard-rank")
        with rank_plugin.collecting(path) as collected, warnings.catch_warnings():
            # Those of collection the controller has shown.
            warnings.simplefilter("ignore")
            self._session.perform_collect([path])
        if collected.failures:
            raise CollectionFailure("\n".join(collected.failures))
        self._items[path] = {item.nodeid: item for item in collected.items}
        # Conftest files of a run begin with its session.
        start = self._session.config.pluginmanager.subset_hook_caller("pytest_sessionstart", plugins)
        start(session=self._session)


class CollectionFailure(Exception):  # noqa: N818 - as pytest's own
    """A file cannot be collected on a rank; the text is pytest's report."""


class _TakeOver:
    def __init__(self, body: Callable[[pytest.Session], None]) -> None:
        self._body = body

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        self._body(session)
        return True


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int, float, bool))
