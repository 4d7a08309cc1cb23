"""Runs steps one after the other: each is a process with a time limit, and its process group ends with it."""

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
from dataclasses import dataclass, field
from typing import Literal

from gpu_check.steps import NO_GPU, ROOT, VERSIONS, Command, Step, pythonpath

Verdict = Literal["passed", "failed", "timed out", "skipped"]
_GRACE = 5.0
"""Seconds that a program has after an interrupt, in which pytest lists the failures so far."""
_LEAST = 10.0
"""Seconds of the budget without which no step begins."""
_TAIL = 15
_MOST_LINES = 40


@dataclass(frozen=True)
class Ended:
    """How a process ended: its status, None if it ran out of time, all it printed, and its seconds."""

    status: int | None
    output: str
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What became of a step.

    Attributes:
        name: the step's.
        title: the step's, with the name of what ran in its place.
        verdict: how it ended.
        detail: counts of tests, or the reason.
        seconds: that it took.
        body: Markdown for the report.
    """

    name: str
    title: str
    verdict: Verdict
    detail: str = ""
    seconds: float = 0.0
    body: str = ""


@dataclass(frozen=True)
class Budget:
    """How much time there is.

    Attributes:
        seconds: for all steps.
        slow: factor of every step's limit.
        began: when the budget began, by the monotonic clock.
    """

    seconds: float
    slow: float = 1.0
    began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.monotonic() - self.began)


def run_process(command: Command, limit: float, environment: Mapping[str, str]) -> Ended:
    """Run a program in the checkout; interrupt it after `limit` seconds, and kill its process group in the end."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
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
            process.wait()
        output.seek(0)
        return Ended(status, output.read().decode(errors="replace"), time.monotonic() - began)


@dataclass
class Run:
    """Runs the table of steps, and goes on after failures.

    Attributes:
        budget: how much time there is.
        took_place: called with each outcome and all output of its step.
        machine: what `gpu_check.machine.describe` found, empty before `find_machine`.
        outcomes: of the steps so far.
    """

    budget: Budget
    took_place: Callable[[Outcome, str], object]
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
        if outcome.verdict == "passed":
            self.machine = json.loads(output.splitlines()[-1])
        self._end(outcome, output)

    def run(self, steps: Iterable[Step], share: Callable[[], Mapping[str, str]]) -> None:
        """Run steps.

        Args:
            steps: in this order.
            share: called before each step on two NCCL ranks of one GPU; returns variables that it needs too.
        """
        for step in steps:
            chosen = step if self.has_gpu else step.on_cpu()
            reason = self._why_not(step) or (chosen if isinstance(chosen, str) else "")
            if reason or isinstance(chosen, str):
                self._end(_skipped(step, reason), "")
            elif shutil.which(chosen.command[0]) is None:
                self._end(_skipped(step, f"{chosen.command[0]} is not installed"), "")
            else:
                self._end(*self._run(chosen, share() if self.has_gpu and step.shares else {}))

    def _why_not(self, step: Step) -> str:
        if self.budget.left < _LEAST:
            return f"the budget of {self.budget.seconds:g} s is spent"
        if not self.machine and step is not VERSIONS:
            return "step 1 failed"
        hung = self.has_gpu and (step.after, "timed out") in ((each.name, each.verdict) for each in self.outcomes)
        return f"step {step.after} timed out" if hung else ""

    def _run(self, step: Step, shared: Mapping[str, str]) -> tuple[Outcome, str]:
        base = {"PYTHONPATH": pythonpath(), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        limit = max(min(step.limit * self.budget.slow, self.budget.left - _GRACE), 0.0)
        ended = run_process(step.command, limit, {**base, **step.environment, **shared})
        verdict, detail = judge(ended, limit, counts_tests="pytest" in step.command)
        body = body_of(ended.output, is_well=verdict == "passed")
        return Outcome(step.name, step.title, verdict, detail, ended.seconds, body), ended.output

    def _end(self, outcome: Outcome, output: str) -> None:
        self.outcomes.append(outcome)
        self.took_place(outcome, output)


def _skipped(step: Step, reason: str) -> Outcome:
    return Outcome(step.name, step.title, "skipped", reason)


# "tests/a.py::test[x] PASSED [ 50%]", and with pytest-xdist "[gw0] [ 50%] PASSED tests/a.py::test[x]".
_TEST = re.compile(
    r"^(?:\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (\S+::.*)"
    r"|(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b.*\[ *\d+%\])$"
)


def find_tests(output: str) -> list[tuple[str, str]]:
    """Return outcome and name of each test in the output of ``pytest -v``, also of a run that did not end."""
    found = filter(None, map(_TEST.match, output.splitlines()))
    return [(match[1] or match[4], (match[2] or match[3]).strip()) for match in found]


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
    """Return the tables of an output, its failed and skipped tests, and the end of it unless all is well."""
    lines = output.splitlines()
    tables = [line if line.startswith("| ") else "" for line in lines]
    parts = re.split(r"\n{2,}", "\n".join(tables).strip("\n")) if any(tables) else []
    # The summary has causes; a run that was killed has none.
    wrong = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    wrong = wrong or [" ".join(found) for found in find_tests(output) if found[0] in ("FAILED", "ERROR")]
    wrong += [line for line in lines if line.startswith("SKIPPED [") or "NCCL WARN" in line]
    parts += [_fenced(wrong[:_MOST_LINES])] if wrong else []
    parts += [] if is_well else [_fenced(lines[-_TAIL:])]
    return "\n\n".join(filter(None, parts))


def _fenced(lines: Sequence[str]) -> str:
    """Return lines as a block of code."""
    return "\n".join(["```text", *(line[:300].replace("```", "'''") for line in lines), "```"])
