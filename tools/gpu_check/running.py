"""Runs steps one after the other. Each is a process with a time limit, and its process group ends with it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gpu_check.sharing import SHARED
from gpu_check.steps import FULL, NO_GPU, ROOT, VERSIONS, Command, Step, pythonpath

Verdict = Literal["passed", "failed", "timed out", "skipped"]
_GRACE = 5.0
"""Seconds that a program has to end after an interrupt. In this time, pytest lists the failures so far."""
_DEAD = 10.0
"""Seconds that a process has to end after it was killed, because a driver may delay that."""
_LEAST = 10.0
"""A step begins only if this many seconds are left."""
_TAIL = 15
_MOST_LINES = 40


@dataclass(frozen=True)
class Ended:
    """How a process ended: its status (None if it ran out of time), its output, and its time in seconds."""

    status: int | None
    output: str
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """The result of a step. The title names the substitute that ran, if any; the detail is a reason or counts of tests.

    Attributes:
        body: Markdown for the report.
        is_hopeless: whether nothing in the step worked, or NCCL refused two ranks on one GPU.
    """

    name: str
    title: str
    verdict: Verdict
    detail: str = ""
    seconds: float = 0.0
    body: str = ""
    is_hopeless: bool = False


@dataclass(frozen=True)
class Budget:
    """The seconds for all steps, counted from `began`; every step's limit is multiplied by `slow`."""

    seconds: float
    slow: float = 1.0
    began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds that a step may take now."""
        return self.seconds - (time.monotonic() - self.began) - _GRACE

    def limit_of(self, step: Step) -> float:
        """Return the seconds for a step: fewer than in the table if the budget is small, to leave some to others."""
        scaled = step.limit * self.slow * min(1.0, self.seconds / FULL)
        return min(max(scaled, min(step.limit, _LEAST)), self.left)


def run_process(command: Command, limit: float, environment: dict[str, str]) -> Ended:
    """Run a program in the checkout. Interrupt it after `limit` seconds, and kill its process group at the end."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, start_new_session=True, **streams)
        status: int | None = None
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_DEAD)
        output.seek(0)
        return Ended(status, output.read().decode(errors="replace"), time.monotonic() - began)


@dataclass
class Run:
    """Runs the table of steps, and continues after failures.

    Attributes:
        record_outcome: called with each outcome and all output of its step.
        machine: the result of `gpu_check.machine.describe`; empty before `find_machine`.
    """

    budget: Budget
    record_outcome: Callable[[Outcome, str], object]
    machine: Mapping[str, str] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def has_gpu(self) -> bool:
        """Whether the first step found a GPU."""
        return self.machine.get("GPU", NO_GPU) != NO_GPU

    def find_machine(self) -> None:
        """Run the first step."""
        reason = self._why_not(VERSIONS)
        outcome, output = (_skipped(VERSIONS, reason), "") if reason else self._run(VERSIONS, {})
        lines = output.splitlines()
        if outcome.verdict == "passed":
            try:
                self.machine = json.loads([line for line in lines if line.startswith("{")][-1])
            except (IndexError, ValueError):
                outcome = replace(outcome, verdict="failed", detail="no JSON", body=body_of(output, is_well=False))
        elif outcome.verdict == "failed" and lines:
            outcome = replace(outcome, detail=f"{outcome.detail}: {lines[-1]}")
        self._end(outcome, output)

    def run(self, steps: Iterable[Step], share: Callable[[], Mapping[str, str]]) -> None:
        """Run steps. Before steps on two NCCL ranks of one GPU, call `share` for more environment variables."""
        for step in steps:
            chosen = step if self.has_gpu else step.on_cpu()
            reason = self._why_not(step) or (chosen if isinstance(chosen, str) else "")
            if reason or isinstance(chosen, str):
                self._end(_skipped(step, reason), "")
            elif shutil.which(chosen.command[0]) is None:
                self._end(_skipped(step, f"{chosen.command[0]} is not installed"), "")
            else:
                shared = share() if self.has_gpu and SHARED in step.environment else {}
                # That may have taken a minute.
                reason = self._why_not(step)
                self._end(*((_skipped(step, reason), "") if reason else self._run(chosen, shared)))

    def _why_not(self, step: Step) -> str:
        if self.budget.left < _LEAST:
            return f"the budget of {self.budget.seconds:g} s is spent"
        if not self.machine and step is not VERSIONS:
            return "step 1 failed"
        for each in self.outcomes:
            is_needed = self.has_gpu and each.name in step.after
            if is_needed and (each.verdict == "timed out" or (each.verdict == "failed" and each.is_hopeless)):
                return f"step {each.name} {each.verdict}"
        return ""

    def _run(self, step: Step, shared: Mapping[str, str]) -> tuple[Outcome, str]:
        base = {"PYTHONPATH": pythonpath(), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        limit = self.budget.limit_of(step)
        ended = run_process(step.command, limit, {**base, **step.environment, **shared})
        verdict, detail = judge(ended, limit, counts_tests="pytest" in step.command)
        body = body_of(ended.output, is_well=verdict == "passed")
        worked = any(line.endswith("| ok |") for line in ended.output.splitlines()) or "passed" in detail
        is_hopeless = not worked or "Duplicate GPU" in ended.output
        return Outcome(step.name, step.title, verdict, detail, ended.seconds, body, is_hopeless), ended.output

    def _end(self, outcome: Outcome, output: str) -> None:
        self.outcomes.append(outcome)
        self.record_outcome(outcome, output)


def _skipped(step: Step, reason: str) -> Outcome:
    return Outcome(step.name, step.title, "skipped", reason)


# "tests/a.py::test[x] PASSED [ 50%]", and with pytest-xdist "[gw0] [ 50%] PASSED tests/a.py::test[x]".
_TEST = re.compile(
    r"^(?:\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (\S+::.*)"
    r"|(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b.*\[ *\d+%\])$"
)


def find_tests(output: str) -> list[tuple[str, str]]:
    """Return outcome and name of each test in the output of ``pytest -v``, even of a run that did not end."""
    found = filter(None, map(_TEST.match, output.splitlines()))
    return [(match[1] or match[4], (match[2] or match[3]).strip()) for match in found]


def find_unfinished(output: str) -> list[str]:
    """Return the tests that began and have no outcome, because they ran when ``pytest -v`` was interrupted."""
    begun = [line.strip() for line in output.splitlines() if re.match(r"\S+\.py::", line) and not _TEST.match(line)]
    ended = {name for _, name in find_tests(output)}
    return [name for name in dict.fromkeys(begun) if name not in ended]


def judge(ended: Ended, limit: float, *, counts_tests: bool) -> tuple[Verdict, str]:
    """Return the verdict of a process, and its reason or the counts of its tests."""
    counts = Counter(outcome.lower() for outcome, _ in find_tests(ended.output)) if counts_tests else Counter[str]()
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    if ended.status is None:
        return "timed out", f"after {limit:.0f} s" + (f": {told}" if told else "")
    if ended.status:
        how = f"exit status {ended.status}" if ended.status > 0 else f"killed by {signal.Signals(-ended.status).name}"
        return "failed", f"{how}: {told}" if told else how
    if counts_tests and not counts["passed"]:
        return "failed", f"no test ran: {told}" if told else "no test ran"
    return "passed", told


def body_of(output: str, *, is_well: bool) -> str:
    """Return an output's tables and tests that did not pass; unless all is well, also what was running and its end."""
    lines = output.splitlines()
    tables = [line if line.startswith("| ") else "" for line in lines]
    parts = re.split(r"\n{2,}", "\n".join(tables).strip("\n")) if any(tables) else []
    # The summary has the causes; a run that was killed has no summary.
    wrong = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    wrong = wrong or [" ".join(found) for found in find_tests(output) if found[0] in ("FAILED", "ERROR")]
    wrong = [f"running: {name}" for name in find_unfinished(output) if not is_well] + wrong
    wrong += [line for line in lines if line.startswith("SKIPPED [") or "NCCL WARN" in line]
    parts += [_fenced(wrong[:_MOST_LINES])] if wrong else []
    parts += [] if is_well else [_fenced(lines[-_TAIL:])]
    return "\n\n".join(filter(None, parts))


def _fenced(lines: Sequence[str]) -> str:
    """Return lines as a block of code."""
    return "\n".join(["```text", *(line[:300].replace("```", "'''") for line in lines), "```"])
