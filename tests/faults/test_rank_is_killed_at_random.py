"""A rank is killed at a random moment: every other one raises within seconds, whatever the group's timeout is.

Where a rank that raises ends its process, as a script does, and where it catches the error and sleeps: then it has
closed our own connections, so that nobody waits for it there. What DDP itself communicates is not ours: there a rank
may raise torch's own RuntimeError, and, if all live on, wait until the group's timeout for one that has raised.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

Strike = Callable[..., dict[str, Any]]

FAR_AWAY = 300.0
"""A timeout of the group, in seconds, that no test waits for."""

ENDING = list(product(("ddp", "reduce_to_owner_hook", "hook_with_zero_step_interleaved"), (2, 3, 4), (True, False)))
LIVING = list(product(("steps", "reduce_to_owner_hook", "hook_with_zero_step_interleaved"), (2, 3, 4), (True, False)))
"""What ranks do, how many they are, and whether they read each other's memory."""

SHARDED = list(product(("sharded", "sharded with buffers"), (3, 4), (True, False), (True, False), (True, False)))
"""The same, whether a rank that raises lives on, and whether a thread finishes messages."""

WITHIN, TIMEOUT = 10.0, 15.0
"""Seconds after which a rank is taken to hang, and the timeout of a group for which it may wait in few cases."""


@pytest.fixture(scope="module")
def killed_ranks() -> Iterator[subprocess.Popen[str]]:
    """One process for all moments, which has torch loaded and forks the ranks of each."""
    program = [sys.executable, "-m", "support.killed_ranks"]
    tests = Path(__file__).parents[1]
    with subprocess.Popen(program, cwd=tests, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def strike(killed_ranks: subprocess.Popen[str], tmp_path: Path) -> Strike:
    """Kill a rank at a moment, and return what each other one has raised."""

    def ask(loop: str, ranks: int, reads: bool, *, timeout: float = FAR_AWAY, **others: Any) -> Any:
        moment = {"loop": loop, "ranks": ranks, "reads": reads, "timeout": timeout, **others}
        assert killed_ranks.stdin is not None
        assert killed_ranks.stdout is not None
        print(json.dumps({**moment, "folder": str(tmp_path)}), file=killed_ranks.stdin, flush=True)
        return json.loads(killed_ranks.stdout.readline())

    return ask


def check(outcome: dict[str, Any], *, may_be_torchs_own: bool) -> None:
    for rank, done in outcome["others"].items():
        when = f"rank {outcome['victim']} was killed in iteration {outcome['iteration']:.2f}"
        assert "hangs" not in done, f"{when}, and rank {rank} hangs:\n{done['hangs']}"
        own = done["raised"] == "RuntimeError" and not done["in_ours"] and may_be_torchs_own
        assert own or done["raised"] == "PeerLostError", f"{when}, and rank {rank} raised {done}"


def waits_until_the_timeout(done: dict[str, Any], *, reads: bool, lives_on: bool) -> bool:
    """Whether a rank that shards gradients was in one of the waits that last until the group's timeout."""
    in_broadcast = lives_on and "broadcast" in done["ours"]
    # gloo does not give up a message whose sender has ended in the middle.
    in_message = not reads and done["ours"][-1] == "wait"
    return in_broadcast or in_message


def several(ways: list[tuple[Any, ...]], moments: int, *flags: str) -> list[Any]:
    """Return as many moments, one way after the other; the id of each has the names of the flags that are set."""
    cases = []
    for seed in range(moments):
        loop, ranks, *values = ways[seed % len(ways)]
        names = [flag for flag, is_set in zip(flags, values, strict=True) if is_set]
        cases.append(pytest.param(loop, ranks, *values, seed, id="-".join([loop, str(ranks), *names, str(seed)])))
    return cases


@pytest.mark.by_default("ddp-3-3 | reduce_to_owner_hook-3-reads-8")
@pytest.mark.parametrize(("loop", "ranks", "reads", "seed"), several(ENDING, 100, "reads"))
def test_every_other_rank_raises_and_ends(strike: Strike, loop: str, ranks: int, reads: bool, seed: int) -> None:
    check(strike(loop, ranks, reads, lives_on=False, seed=seed), may_be_torchs_own=True)


@pytest.mark.by_default("steps-4-5 | reduce_to_owner_hook-4-reads-10 | hook_with_zero_step_interleaved-4-17")
@pytest.mark.parametrize(("loop", "ranks", "reads", "seed"), several(LIVING, 100, "reads"))
def test_every_other_rank_raises_where_all_live_on(
    strike: Strike, loop: str, ranks: int, reads: bool, seed: int
) -> None:
    check(strike(loop, ranks, reads, lives_on=True, seed=seed), may_be_torchs_own=False)


@pytest.mark.by_default("sharded-3-reads-3 | sharded-4-lives on-overlaps-12")
@pytest.mark.parametrize(
    ("loop", "ranks", "reads", "lives_on", "overlaps", "seed"), several(SHARDED, 60, "reads", "lives on", "overlaps")
)
def test_every_other_rank_that_shards_gradients_raises(
    strike: Strike, loop: str, ranks: int, reads: bool, lives_on: bool, overlaps: bool, seed: int
) -> None:
    moment = {"lives_on": lives_on, "overlaps": overlaps, "seed": seed}
    outcome = strike(loop, ranks, reads, **moment, timeout=TIMEOUT, within=TIMEOUT + WITHIN)
    check(outcome, may_be_torchs_own=False)
    for rank, done in outcome["others"].items():
        is_in_time = done["after"] < WITHIN or waits_until_the_timeout(done, reads=reads, lives_on=lives_on)
        assert is_in_time, f"rank {rank} raised after {done['after']:.1f} s in {done['ours']}: {done['message']}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(10))
def test_ddps_all_reduce_waits_for_who_lives_on_until_the_timeout(strike: Strike, seed: int) -> None:
    check(strike("ddp", 3, seed % 2 == 0, lives_on=True, seed=seed, timeout=5.0), may_be_torchs_own=True)
