"""The controller's side of one test: what is sent to the ranks, and what becomes of their verdict."""

from __future__ import annotations

import io
import os
import pickle
import re
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zeroshard_testing.launcher import Launcher, LaunchError
from zeroshard_testing.log_files import write_log_files
from zeroshard_testing.patching import PATCHED_ELSEWHERE, RankPickler, patches_elsewhere
from zeroshard_testing.pool import Job, Pool, Result
from zeroshard_testing.report import RanksFailure
from zeroshard_testing.spec import RanksSpec
from zeroshard_testing.verdict import judge


class RanksSession:
    """Runs the rank tests of one pytest session. Boots on first use.

    Args:
        config: pytest's configuration.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._pool: Pool | None = None
        self._machine: Mapping[str, Any] | None = None
        self._late_deaths: list[str] = []
        self._item: pytest.Item | None = None
        self._classes: dict[type, dict[str, object]] = {}
        self._conftests: dict[Path, list[list[str]]] = {}

    def boot(self) -> Pool:
        """Return the pool, whose forkserver boots in the background from the first call on."""
        if self._pool is None:
            self._pool = Pool(_launcher(self._config))
        return self._pool

    def machine(self) -> Mapping[str, Any]:
        """Return which backends and devices there are; see `zeroshard_testing.pool.Pool.probe`."""
        if self._machine is None:
            self._machine = self.boot().probe()
        return self._machine

    def remember(self, cls: type) -> None:
        """Note what a test class holds before any of its tests is set up."""
        self._classes.setdefault(cls, dict(vars(cls)))

    def _set_since(self, cls: type) -> dict[str, object]:
        """Return what ``setup_class`` and class fixtures have set on a class."""
        before, missing = self._classes.get(cls, {}), object()
        return {
            name: value
            for name, value in vars(cls).items()
            if before.get(name, missing) is not value and not name.startswith("__")
        }

    def begin(self, item: pytest.Item) -> None:
        """Say which test the calls that follow belong to."""
        self._item = item

    def run(self, item: pytest.Function, spec: RanksSpec) -> None:
        """Run a test on its ranks, and raise what pytest is to make of it.

        Args:
            item: The test, with its fixtures set up.
            spec: The ranks that it asks for.

        Raises:
            RanksFailure: If it has not passed on every rank, nor been skipped on all.
        """
        arguments = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
        for value in item.funcargs.values():
            if isinstance(value, pytest.MonkeyPatch) and patches_elsewhere(value):
                pytest.fail(f"{item.nodeid}: {PATCHED_ELSEWHERE}", pytrace=False)
        attributes = {} if item.cls is None else {**self._set_since(item.cls), **vars(item.instance)}
        message = {
            "module": [item.module.__name__, str(item.path)],
            "classes": [] if item.cls is None else item.cls.__qualname__.split("."),
            "function": item.originalname,
        }
        self._carry_out(item, item.nodeid, spec, message, _pickled(item.nodeid, arguments, attributes))

    def call(
        self, title: str, module: tuple[str, str], function: str, spec: RanksSpec, arguments: Mapping[str, object]
    ) -> None:
        """Run a function on ranks within the current test, and raise what pytest is to make of it.

        Args:
            title: What to call it in reports.
            module: Name and file of the function's module.
            function: Its name there.
            spec: The ranks.
            arguments: What to call it with, by name.

        Raises:
            RanksFailure: If it has not passed on every rank, nor been skipped on all.
        """
        assert self._item is not None
        message = {"module": list(module), "classes": [], "function": function}
        self._carry_out(self._item, title, spec, message, _pickled(title, arguments, {}))

    def _carry_out(
        self, item: pytest.Item, title: str, spec: RanksSpec, message: Mapping[str, object], payload: bytes
    ) -> None:
        if item.path not in self._conftests:
            self._conftests[item.path] = _conftests(item)
        job = Job(spec, {**_surroundings(item, self._conftests[item.path]), **message}, payload)
        try:
            result = self.boot().run(job)
        except LaunchError as error:
            self.close()
            pytest.fail(str(error), pytrace=False)
        _keep_output(item, result)
        _repeat_warnings(result)
        verdict = judge(result.outcomes)
        if verdict.kind == "skipped":
            pytest.skip(verdict.summary)
        if verdict.kind == "xfailed":
            pytest.xfail(verdict.summary)
        if verdict.kind != "passed":
            folder = write_log_files(self._log_folder(), title, result.outcomes, result.stdout, result.stderr)
            raise RanksFailure(replace(verdict, text=f"{verdict.text}\n\nA log file for each rank: {folder}"))

    def _log_folder(self) -> Path:
        chosen = self._config.getoption("--ranks-logs")
        if chosen is not None:
            return Path(chosen)
        factory: pytest.TempPathFactory = self._config._tmp_path_factory  # type: ignore[attr-defined]  # as tmp_path does
        return factory.getbasetemp() / "ranks-logs"

    def late_deaths(self) -> list[str]:
        """Return what is known of workers that died after their test had its verdict, in words."""
        if self._pool is not None:
            self._late_deaths += self._pool.take_late_deaths()
        return self._late_deaths

    def close(self) -> None:
        """End every process. Safe to call repeatedly."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _launcher(config: pytest.Config) -> Launcher:
    inherit_output = config.getoption("capture", default="fd") == "no"
    arguments, environment = _pytest_args(config), _worker_environment()
    if config.getoption("--ranks-launch") == "spawn":
        from zeroshard_testing.spawn_launcher import SpawnLauncher

        return SpawnLauncher(arguments, environment, inherit_output=inherit_output)
    from zeroshard_testing.fork_launcher import ForkLauncher

    return ForkLauncher(arguments, environment, inherit_output=inherit_output)


def _worker_environment() -> dict[str, str]:
    environment = dict(os.environ)
    # One thread a rank: the ranks share the machine. Read once, when torch is loaded.
    environment.setdefault("OMP_NUM_THREADS", "1")
    # The pytest in the workers is there for its assertions; plugins and options act in the controller.
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        environment.pop(name, None)
    return environment


def running_session() -> RanksSession | None:
    """Return what runs rank tests in this process, None outside pytest and on ranks."""
    return _running[-1] if _running else None


def set_running_session(session: RanksSession | None) -> None:
    """Say what runs rank tests in this process; None when the innermost pytest of this process ends."""
    if session is None:
        _running.pop()
    else:
        _running.append(session)


_running: list[RanksSession] = []


def _surroundings(item: pytest.Item, conftests: list[list[str]]) -> dict[str, object]:
    """Return the part of a request that is the same for all that one test runs on ranks."""
    return {
        "name": item.name,
        "nodeid": f"{item.nodeid} (call)",
        "conftests": conftests,
        "sys_path": sys.path,
        "cwd": os.getcwd(),  # noqa: PTH109 - a string, and per test
        "filterwarnings": [mark.args for mark in item.iter_markers("filterwarnings")],
        "tb_style": _traceback_style(item.config),
        "showlocals": bool(item.config.getoption("showlocals", default=False)),
    }


def _conftests(item: pytest.Item) -> list[list[str]]:
    """Return name and file of the conftest modules that hold for the test, outermost first."""
    loaded = {}
    for plugin in item.config.pluginmanager.get_plugins():
        file = getattr(plugin, "__file__", None)
        if file is not None and Path(file).name == "conftest.py":
            loaded[Path(file).parent] = [plugin.__name__, file]
    return [loaded[folder] for folder in reversed(item.path.parents) if folder in loaded]


def _pickled(title: str, arguments: Mapping[str, object], attributes: Mapping[str, object]) -> bytes:
    try:
        return _dumped((arguments, attributes))
    except Exception as failure:  # noqa: BLE001 - any object may refuse in its own way
        error = failure
    culprit = "its arguments cannot be sent to the ranks together"
    for kind, values in (("fixture or parameter", arguments), ("attribute", attributes)):
        for name, value in values.items():
            if (own_error := _pickling_error(value)) is not None:
                error = own_error
                culprit = f"{kind} {name!r}, a {type(value).__name__}, cannot be sent to the ranks"
    pytest.fail(f"{title}: {culprit}: {error}. Make it in the test itself.", pytrace=False)


def _dumped(value: object) -> bytes:
    written = io.BytesIO()
    RankPickler(written, pickle.HIGHEST_PROTOCOL).dump(value)
    return written.getvalue()


def _pickling_error(value: object) -> Exception | None:
    try:
        _dumped(value)
    except Exception as error:  # noqa: BLE001 - any object may refuse in its own way
        return error
    return None


def _keep_output(item: pytest.Item, result: Result) -> None:
    for stream, texts in (("stdout", result.stdout), ("stderr", result.stderr)):
        for rank, text in texts.items():
            item.add_report_section("call", f"{stream} rank {rank}", text)


def _repeat_warnings(result: Result) -> None:
    """Warn here of what the ranks warned of, once each, so that pytest counts and shows it."""
    seen = dict.fromkeys(warning for outcome in result.outcomes.values() for warning in outcome.warnings)
    for category, text, filename, line in seen:
        module, _, name = category.rpartition(".")
        known: object = getattr(sys.modules.get(module), name, None)
        with warnings.catch_warnings():
            # The filters have been applied where the warning arose.
            warnings.simplefilter("always")
            if isinstance(known, type) and issubclass(known, Warning):
                warnings.warn_explicit(text, known, filename, line)
            else:
                warnings.warn_explicit(f"{category}: {text}", UserWarning, filename, line)


def _traceback_style(config: pytest.Config) -> str:
    style: str = config.getoption("tbstyle", default="auto")
    return {"auto": "long", "line": "short", "no": "short"}.get(style, style)


def _pytest_args(config: pytest.Config) -> list[str]:
    """Return the command line for the pytest in the workers: this one's assertions, and none of its plugins."""
    files = " ".join(config.getini("python_files"))
    filters = "\n".join(config.getini("filterwarnings"))
    # An unknown marker is a warning when the test module is imported, and filters may make that an error.
    markers = "\n".join(re.split(r"[:(\n]", line)[0].strip() for line in config.getini("markers"))
    warnings = [text for given in config.getoption("pythonwarnings") or [] for text in ("-W", given)]
    verbosity = config.getoption("verbose")
    disabled = ["cacheprovider", "faulthandler", "logging"]
    return [
        "-c",
        os.devnull,
        "--rootdir",
        str(config.rootpath),
        "--noconftest",
        "--color=no",
        "--capture=no",
        f"--assert={config.getoption('assertmode')}",
        f"--import-mode={config.getoption('importmode')}",
        "-o",
        f"python_files={files}",
        "-o",
        f"filterwarnings={filters}",
        "-o",
        f"markers={markers}",
        *warnings,
        *([f"-{'v' * verbosity}"] if verbosity > 0 else []),
        *(text for name in disabled for text in ("-p", f"no:{name}")),
    ]
