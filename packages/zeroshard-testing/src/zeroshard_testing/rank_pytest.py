"""The pytest of a worker: configured as the controller's, without plugins that belong to a run rather than to a test.

A rank collects a test's file and runs its setup, call and teardown by itself, so that pytest behaves on ranks as it
does elsewhere. Only the controller handles the run: reports, distribution, reruns, coverage, timeouts.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import pytest
from _pytest.config import create_terminal_writer

from zeroshard_testing.ipc import Message
from zeroshard_testing.marker import place_of

NOT_ON_RANKS = (
    *("terminal", "terminalprogress", "faulthandler", "junitxml", "pastebin", "lfplugin", "xdist.looponfail"),
    *("pytest_cov", "timeout", "randomly", "rerunfailures", "flaky", "html", "metadata", "pytest_jsonreport"),
    *("instafail", "sugar", "random_order", "zeroshard", "zeroshard_testing.plugin"),
)
"""Plugins that act only in the controller, by the names under which pytest registers them."""

_OPTIONS: Message = {
    **dict.fromkeys(("keyword", "markexpr"), ""),
    **dict.fromkeys(("lf", "failedfirst", "newfirst", "stepwise", "stepwise_skip"), False),
    **dict.fromkeys(("usepdb", "trace", "setuponly", "setupplan", "setupshow", "strict_config"), False),
    **dict.fromkeys(("deselect", "basetemp", "log_file", "xmlpath", "numprocesses"), None),
    "maxfail": 0,
    "capture": "no",
    "dist": "no",
    "tx": [],
    "tbstyle": "auto",
    "plugins": [],
}
"""Options that apply to the controller, with their values on ranks."""


def description_of(config: pytest.Config | None) -> Message:
    """Return the configuration of the controller's pytest for `run_idle_pytest`, as a JSON object."""
    if config is None:
        arguments = ["-c", os.devnull, "--noconftest", "-p", "no:cacheprovider"]
        return {"options": _OPTIONS, "paths": {}, "arguments": arguments, "markers": [], "worker": {}}
    options = _plain_values(vars(config.option))
    options.pop("file_or_dir", None)
    paths = {name: str(value) for name, value in vars(config.option).items() if isinstance(value, Path)}
    overrides = [*(config.getoption("override_ini") or []), "log_file="]
    arguments = [
        *("--rootdir", str(config.rootpath), "-c", str(config.inipath or os.devnull)),
        f"--import-mode={config.getoption('importmode')}",
        "--noconftest",
        *(text for value in overrides for text in ("-o", value)),
        *(text for value in config.getoption("pythonwarnings") or [] for text in ("-W", value)),
        *(text for name in config.getoption("plugins") or [] for text in ("-p", name)),
    ]
    style = options.get("tbstyle", "auto")
    return {
        "options": {**options, **_OPTIONS, "tbstyle": "short" if style in ("line", "no") else style},
        "paths": paths,
        "arguments": arguments,
        # Includes options of plugins that ranks do not have.
        "markers": config.getini("markers"),
        # The name of the pytest-xdist worker is also the name of its ranks.
        "worker": _plain_values(getattr(config, "workerinput", {})),
    }


def run_idle_pytest(description: Mapping[str, Any], body: Callable[[pytest.Session], None]) -> None:
    """Load torch, configure pytest as `description_of` says, and call ``body`` instead of collecting tests."""
    # Before pytest is configured, because its filter of warnings is for tests, not for modules of torch.
    import torch

    from zeroshard_testing import rank_values
    from zeroshard_testing.rank_plugin import RankPlugin

    if "numpy" in sys.modules:
        # torch has loaded the rest of the package; every worker seeds it.
        importlib.import_module("numpy.random")
    torch.set_num_threads(1)
    # pytest-xdist does the same in its workers.
    paths = {name: Path(path) for name, path in description["paths"].items()}
    config = pytest.Config.fromdictargs({**description["options"], **paths}, list(description["arguments"]))
    for name in NOT_ON_RANKS:
        if config.pluginmanager.has_plugin(name):
            config.pluginmanager.unregister(name=name)
    config.pluginmanager.register(RankPlugin(body), RankPlugin.name)
    config.pluginmanager.register(rank_values)
    # Until pytest 9, its own one needs a plugin of the run to explain assertions.
    config.get_terminal_writer = lambda: create_terminal_writer(config)  # type: ignore[method-assign]
    if description["worker"]:
        config.workerinput = description["worker"]  # type: ignore[attr-defined]  # as pytest-xdist does
    for line in description["markers"]:
        config.addinivalue_line("markers", line)
    config.hook.pytest_cmdline_main(config=config)


class Collector:
    """Collects test files in a worker, each once. ``tmp_path_factory`` makes and uses the temporary folder."""

    def __init__(self, session: pytest.Session, temporary: Path) -> None:
        self._session = session
        self._items: dict[str, dict[str, pytest.Item]] = {}
        self._path = Path()
        self._folders: dict[Path, pytest.Collector | None] = {}
        self._found: list[pytest.Item] = []
        self._failures: list[str] = []
        self._skipped: dict[Path, str] = {}
        # Private to pytest: the worker was configured without conftest files, which it loads when a file is
        # collected, after the fork; and a base folder that is given by an option would be emptied by each worker.
        session.config.pluginmanager._noconftest = False
        # Lets the conftest file of the root name plugins.
        session.config.pluginmanager._configured = False
        session.config._tmp_path_factory._given_basetemp = temporary  # type: ignore[attr-defined]
        session.config.pluginmanager.register(self)

    def has(self, path: str) -> bool:
        """Return True if a file has been collected, so that its code does not run again."""
        return path in self._items

    def item(self, path: str, place: str) -> pytest.Item:
        """Return a test of a file that has been collected, or raise LookupError, or skip as the file does."""
        if (reason := self._skipped.get(Path(path))) is not None:
            pytest.skip(reason)
        try:
            return self._items[path][place]
        except KeyError:
            raise LookupError(
                f"collecting on the rank gives no test {place}, as it did in pytest's own process: names and "
                f"parameters of tests must not depend on the process (sets, object addresses, random numbers)"
            ) from None

    def collect(self, path: str) -> None:
        """Import a test file and the conftest files that apply to it, as pytest does, or raise CollectionFailure."""
        plugins = self._session.config.pluginmanager.get_plugins()
        self._path = Path(path)
        self._failures.clear()
        with warnings.catch_warnings():
            # The controller has shown the warnings of collection.
            warnings.simplefilter("ignore")
            try:
                self._session.perform_collect([path])
            except pytest.UsageError as error:
                self._failures.append(str(error))
        if self._failures:
            raise CollectionFailure("\n".join(self._failures))
        self._items[path] = {place_of(item): item for item in self._found}
        # Conftest files of a run are loaded at the start of its session.
        start = self._session.config.pluginmanager.subset_hook_caller("pytest_sessionstart", plugins)
        start(session=self._session)

    @pytest.hookimpl(tryfirst=True)
    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Ignore all paths except the parents of the file; a folder may have thousands of files."""
        return None if collection_path in (self._path, *self._path.parents) else True

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_directory(self, path: Path) -> Generator[None, pytest.Collector | None, pytest.Collector | None]:
        """Reuse the node of a folder for all its files, because fixtures of its conftest file belong to it."""
        return self._folders.setdefault(path, (yield))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep the reports of files that failed in collection or are skipped."""
        if report.skipped and isinstance(report.longrepr, tuple):
            self._skipped[self._path] = report.longrepr[2].removeprefix("Skipped: ")
        if report.failed:
            self._failures.append(report.longreprtext)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep all items: conftest files may mark them, but the controller has already selected."""
        self._found = list(items)


class CollectionFailure(Exception):  # noqa: N818 - as pytest's own
    """Raised if a file cannot be collected on a rank. The text is pytest's report."""


def _plain_values(values: Mapping[str, Any]) -> Message:
    return {name: value for name, value in values.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int, float, bool))
