"""The controller's side of one test: what is sent to the ranks, and what becomes of their verdict."""

from __future__ import annotations

import os
import pickle
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from zeroshard_testing.launcher import Launcher, LaunchError
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

    def run(self, item: pytest.Function, spec: RanksSpec) -> None:
        """Run a test on its ranks, and raise what pytest is to make of it.

        Args:
            item: The test, with its fixtures set up.
            spec: The ranks that it asks for.

        Raises:
            RanksFailure: If it has not passed on every rank, nor been skipped on all.
        """
        if item.path not in self._conftests:
            self._conftests[item.path] = _conftests(item)
        job = _job(item, spec, self._config, self._conftests[item.path])
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
            raise RanksFailure(verdict)

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


def _job(item: pytest.Function, spec: RanksSpec, config: pytest.Config, conftests: list[list[str]]) -> Job:
    arguments = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    attributes = {} if item.cls is None else dict(vars(item.instance))
    message = {
        "name": item.name,
        "nodeid": f"{item.nodeid} (call)",
        "module": [item.module.__name__, str(item.path)],
        "conftests": conftests,
        "classes": [] if item.cls is None else item.cls.__qualname__.split("."),
        "function": item.originalname,
        "sys_path": sys.path,
        "cwd": os.getcwd(),  # noqa: PTH109 - a string, and per test
        "filterwarnings": [mark.args for mark in item.iter_markers("filterwarnings")],
        "tb_style": _traceback_style(config),
        "showlocals": bool(config.getoption("showlocals", default=False)),
    }
    return Job(spec, message, _pickled(item, arguments, attributes))


def _conftests(item: pytest.Function) -> list[list[str]]:
    """Return name and file of the conftest modules that hold for the test, outermost first."""
    loaded = {}
    for plugin in item.config.pluginmanager.get_plugins():
        file = getattr(plugin, "__file__", None)
        if file is not None and Path(file).name == "conftest.py":
            loaded[Path(file).parent] = [plugin.__name__, file]
    return [loaded[folder] for folder in reversed(item.path.parents) if folder in loaded]


def _pickled(item: pytest.Function, arguments: Mapping[str, object], attributes: Mapping[str, object]) -> bytes:
    try:
        return pickle.dumps((arguments, attributes), pickle.HIGHEST_PROTOCOL)
    except Exception as failure:  # noqa: BLE001 - any object may refuse in its own way
        error = failure
    culprit = "its arguments cannot be sent to the ranks together"
    for kind, values in (("fixture or parameter", arguments), ("attribute", attributes)):
        for name, value in values.items():
            if (own_error := _pickling_error(value)) is not None:
                error = own_error
                culprit = f"{kind} {name!r}, a {type(value).__name__}, cannot be sent to the ranks"
    pytest.fail(f"{item.nodeid}: {culprit}: {error}. Make it in the test itself.", pytrace=False)


def _pickling_error(value: object) -> Exception | None:
    try:
        pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001 - any object may refuse in its own way
        return error
    return None


def _keep_output(item: pytest.Function, result: Result) -> None:
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
