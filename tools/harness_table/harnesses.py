"""The harnesses that are compared: how each is written for, started, and told its time limit.

All run under pytest without any plugin but their own, each test file in a process and a folder of its own.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness_table.trials import Trial

TOOLS = Path(__file__).resolve().parents[1]
INI = "[pytest]\nmarkers = world_size\n"


@dataclass(frozen=True)
class Harness:
    """One harness.

    Attributes:
        key: Its name on the command line.
        title: Its name in the table.
        write: The text of a test file that runs a trial, once for each of some test names, within a limit in seconds;
            None if the harness has no means for the trial's form.
        python_path: Folders that its ranks import from.
        options: Of pytest.
        limit_variable: The environment variable that sets the limit, if it is not in the test file.
        environment: Further environment variables.
        files: Files to be copied beside the test file.
        default_limit: Seconds of its own time limit if nothing is said.
        cannot: Why it cannot express the trials of some kinds.
        blocked: Why it cannot be run; empty if it can.
        remark: What must be known to read its column.
    """

    key: str
    title: str
    write: Callable[[Trial, Sequence[str], float], str | None]
    default_limit: int
    python_path: tuple[Path, ...] = ()
    options: tuple[str, ...] = ()
    limit_variable: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    cannot: Mapping[str, str] = field(default_factory=dict)
    blocked: str = ""
    remark: str = ""


def harnesses(deepspeed_common: Path | None) -> list[Harness]:
    """Return the harnesses, in the order of the table's columns.

    Args:
        deepspeed_common: ``tests/unit/common.py`` of a checkout of DeepSpeed, whose harness is not in its package; its
            ``tests/conftest.py`` is used too. None blocks that harness.
    """
    return [
        _pytorch("multi-process", "MultiProcessTestCase", _multi_process),
        replace(
            _pytorch(
                "multi-threaded",
                "MultiThreadedTestCase",
                _multi_threaded,
                messages="its process group has no point-to-point operations",
            ),
            remark="its ranks are threads, so what ends one ends the run, with its exit status",
        ),
        _deepspeed(deepspeed_common),
        Harness("zeroshard", "zeroshard-testing", _zeroshard_file, 60, options=("-p", "zeroshard_testing.plugin")),
    ]


def _pytorch(key: str, name: str, write: Callable[[Trial, Sequence[str], float], str | None], **cannot: str) -> Harness:
    return Harness(
        key,
        f"PyTorch `{name}`",
        write,
        default_limit=300,
        limit_variable="DISTRIBUTED_TESTS_DEFAULT_TIMEOUT",
        cannot={"expected": "unittest's expectedFailure names no exception", **cannot},
    )


def _deepspeed(common: Path | None) -> Harness:
    unset = Harness("deepspeed", "DeepSpeed `DistributedTest`", lambda *_: None, default_limit=600)
    if common is None:
        why = "it is not part of DeepSpeed's package; name a checkout's tests/unit/common.py with --deepspeed-common"
        return replace(unset, blocked=why)
    tests, module = common.resolve().parents[1], f"{common.parent.name}.{common.stem}"
    return replace(
        unset,
        write=lambda trial, names, _: _deepspeed_file(trial, names, module),
        python_path=(tests,),
        limit_variable="DS_UNITTEST_TIMEOUT",
        # Its accelerator for CPUs takes the number of devices from the second.
        environment={"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2"},
        files=(tests / "conftest.py",),
    )


def _zeroshard_file(trial: Trial, names: Sequence[str], limit: float) -> str:
    return _pytest_file(
        trial,
        names,
        before=f"@pytest.mark.ranks(2, timeout={limit})\nclass TestIt:",
        arguments="self, rank, world_size",
        call="trial.body(rank, world_size)",
    )


def _deepspeed_file(trial: Trial, names: Sequence[str], module: str) -> str:
    return _pytest_file(
        trial,
        names,
        before=f"import torch.distributed as dist\nfrom {module} import DistributedTest\n\n"
        "class TestIt(DistributedTest):\n    world_size = 2",
        arguments="self",
        call="trial.body(dist.get_rank(), dist.get_world_size())",
    )


def _pytest_file(trial: Trial, names: Sequence[str], *, before: str, arguments: str, call: str) -> str:
    form = trial.form
    lines = [*_head(trial, "pytest", "pytest.skip")]
    if form.around is not None:
        scope = {"test": "function"}.get(form.scope, form.scope)
        lines += [
            f"@pytest.fixture(autouse=True, scope={scope!r})",
            "def around():",
            "    with trial.form.around():",
            "        yield",
        ]
    lines += [before]
    for name in names:
        if form.xfail:
            raises = f", raises={form.raises}" if form.raises else ""
            lines += [f"    @pytest.mark.xfail(strict=True{raises})"]
        lines += [f"    def test_{name}({arguments}):", f"        {call}"]
    return "\n".join(lines) + "\n"


def _multi_process(trial: Trial, names: Sequence[str], _: float) -> str | None:
    initialize = (
        "dist.init_process_group('gloo', rank=self.rank, world_size=2, store=dist.FileStore(self.file_name, 2))"
    )
    return _unittest_file(trial, names, "MultiProcessTestCase", "_spawn_processes", initialize)


def _multi_threaded(trial: Trial, names: Sequence[str], _: float) -> str | None:
    return _unittest_file(trial, names, "MultiThreadedTestCase", "_spawn_threads", "pass")


def _unittest_file(trial: Trial, names: Sequence[str], base: str, spawn: str, initialize: str) -> str | None:
    form = trial.form
    if form.raises is not None:
        return None
    enter, leave = "around = trial.form.around()\naround.__enter__()", "around.__exit__(None, None, None)"
    around = {form.scope: (enter, leave)} if form.around is not None else {}
    module, of_class, test = (around.get(scope, ("pass", "pass")) for scope in ("module", "class", "test"))
    head = "\n".join(_head(trial, "unittest", "trials.skip_in_unittest"))
    text = f"""
import torch.distributed as dist
from torch.testing._internal import common_distributed

def setUpModule():
    global around
{_indented(module[0], 1)}

def tearDownModule():
    {module[1]}

class TestIt(common_distributed.{base}):
    world_size = property(lambda self: 2)

    @classmethod
    def setUpClass(cls):
        global around
        super().setUpClass()
{_indented(of_class[0], 2)}

    @classmethod
    def tearDownClass(cls):
        {of_class[1]}
        super().tearDownClass()

    def setUp(self):
        global around
        super().setUp()
{_indented(test[0], 2)}
        self.{spawn}()

    def tearDown(self):
        try:
            {test[1]}
        finally:
            super().tearDown()
"""
    for name in names:
        if form.xfail:
            text += "\n    @unittest.expectedFailure"
        text += f"\n    def test_{name}(self):\n        {initialize}\n        trial.body(self.rank, 2)\n"
    return head + text


def _head(trial: Trial, runner: str, skip: str) -> list[str]:
    return [
        f"import {runner}",
        "from harness_table import trials",
        f"trials.skip = {skip}",
        f"trial = trials.TRIALS[{trial.name!r}]",
        "",
    ]


def _indented(text: str, levels: int) -> str:
    return textwrap.indent(text, "    " * levels)
