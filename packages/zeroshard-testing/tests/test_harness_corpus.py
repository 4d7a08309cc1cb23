"""Tests that go wrong on ranks in every way we know of: each is a failure with its true cause, and none stalls the run.

The whole corpus is run once, by a pytest of its own; each test here looks at what became of one of its cases.
"""

from __future__ import annotations

import re
import textwrap
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass

import pytest

pytest_plugins = ["pytester"]

PREAMBLE = """
    import ctypes, os, signal, sys, threading, time
    from concurrent.futures import ThreadPoolExecutor
    from datetime import timedelta
    import pytest
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from zeroshard_testing import rank_fixture

    two = pytest.mark.ranks(2, timeout=30)
    briefly = pytest.mark.ranks(2, timeout=1)

    def ones(*shape, **options):
        return torch.ones(*shape, **options)

    class Unpicklable(Exception):
        def __reduce__(self):
            raise TypeError("no")

    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError("no")
        __repr__ = __str__

    @rank_fixture
    def crashes_at_the_end(rank):
        yield rank
        raise OSError("cannot clean up")

    @rank_fixture
    def crashes_at_the_start(rank):
        raise OSError("cannot set up")

    @rank_fixture
    def yields_twice(rank):
        yield 1
        yield 2

    @two
    def test_healthy(rank):
        x = ones(3)
        dist.all_reduce(x)
        assert x.sum() == 6
"""

# name: (decorator, arguments, body, what the report begins with)
CASES: dict[str, tuple[str, str, str, str]] = {
    "raised_on_one": ("two", "rank", "assert rank == 0", r"rank 1 failed: assert 1 == 0"),
    "raised_on_all": ("two", "rank", "raise ValueError('alike')", r"ranks 0, 1 failed: ValueError: alike"),
    "raised_while_others_wait": (
        "two",
        "rank",
        "assert rank == 0\ndist.all_reduce(ones(2))",
        r"rank 1 failed: assert 1 == 0",
    ),
    "killed": (
        "two",
        "rank",
        "if rank: os.kill(os.getpid(), signal.SIGKILL)\ndist.all_reduce(ones(2))",
        r"rank 1 was killed by SIGKILL before it reported",
    ),
    "killed_while_another_sleeps": (
        "two",
        "rank",
        "if rank: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(20)",
        r"rank 1 was killed by SIGKILL before it reported",
    ),
    "segmentation_fault": ("two", "rank", "if rank: ctypes.string_at(0)", r"rank 1 was killed by SIGSEGV"),
    "exited_at_once": ("two", "rank", "if rank: os._exit(0)", r"rank 1 exited with status 0 before it reported"),
    "exited_politely": ("two", "rank", "if rank: sys.exit(0)", r"rank 1 called sys.exit\(0\)"),
    "died_after_reporting": (
        "two",
        "rank",
        """
        if rank:
            timer = threading.Timer(0.2, os._exit, [3])
            timer.daemon = True
            timer.start()
        else:
            time.sleep(1)
        """,
        r"rank 1 exited with status 3 after it had reported 'passed'",
    ),
    "skipped_alone": ("two", "rank", "if rank: pytest.skip('not today')", r"rank 1 skipped alone: not today"),
    "skipped_while_another_waits": (
        "two",
        "rank",
        "if rank: pytest.skip('not today')\ndist.barrier()",
        r"rank 1 skipped alone: not today",
    ),
    "expected_a_failure_alone": ("two", "rank", "if rank: pytest.xfail('known')", r"rank 1 expected a failure alone"),
    "returned_early": (
        "two",
        "rank",
        "if rank == 0: dist.all_reduce(ones(4, 3))",
        r"rank 0 stuck in all_reduce \(collective #1 of the default group, float32\[4, 3\]\): rank 1 never joins, it "
        r"has ended",
    ),
    "returned_before_a_broadcast": (
        "two",
        "rank",
        "if rank == 0: dist.broadcast(ones(4), 0)",
        r"rank 0 stuck in broadcast \(collective #1 of the default group, float32\[4\]\): rank 1 never joins",
    ),
    "returned_before_what_nobody_waits_for": (
        "two",
        "rank",
        "dist.barrier()\nif rank == 0: dist.broadcast(ones(4), 0, async_op=True)",
        r"rank 1 returned without broadcast \(collective #2 of the default group, float32\[4\]\), which rank 0 has",
    ),
    "left_out_before_the_group_was_destroyed": (
        "two",
        "rank",
        "if rank == 0: dist.broadcast(ones(4), 0, async_op=True)\ntime.sleep(0.1)\ndist.destroy_process_group()",
        r"rank 1 returned without broadcast|rank 1 returned without collective #1",
    ),
    "left_out_beside_an_error_that_was_handled": (
        "two",
        "rank",
        """
        with pytest.raises(RuntimeError):
            dist.distributed_c10d._get_default_store().wait(["missing"], timedelta(seconds=0.1))
        if rank == 0: dist.broadcast(ones(4), 0, async_op=True)
        """,
        r"rank 1 returned without broadcast",
    ),
    "left_out_in_a_group_with_a_short_timeout": (
        "two",
        "rank",
        """
        group = dist.new_group([0, 1], timeout=timedelta(seconds=20))
        if rank == 0: dist.broadcast(ones(4), 0, group=group, async_op=True)
        """,
        r"rank 1 returned without broadcast",
    ),
    "one_of_four_missing": (
        "pytest.mark.ranks(4, timeout=30)",
        "rank",
        "dist.barrier()\nif rank != 2: dist.all_reduce(ones(2))",
        r"ranks 0, 1, 3 stuck in all_reduce \(collective #2 .*\): rank 2 never joins, it has ended",
    ),
    "mismatched_collective": (
        "two",
        "rank",
        "dist.barrier()\nif rank: dist.broadcast(ones(4), 0)\nelse: dist.all_reduce(ones(4))",
        r"rank 0 stuck: rank 0 is in all_reduce of float32\[4\], rank 1 in broadcast of .*, as collective #2",
    ),
    "mismatched_gather": (
        "two",
        "rank",
        "if rank: dist.all_gather([ones(4), ones(4)], ones(4))\nelse: dist.all_reduce(ones(4))",
        r"rank 0 stuck: rank 0 is in all_reduce of float32\[4\], rank 1 in all_gather of float32\[4\], as collective ",
    ),
    "mismatched_shape": (
        "two",
        "rank",
        "dist.all_reduce(ones(4 + rank))",
        r"rank \d was killed by SIGABRT: rank 0 is in all_reduce of float32\[4\], rank 1 in all_reduce of float32\[5\]",
    ),
    "mismatched_shape_that_gloo_accepts": (
        "two",
        "rank",
        "dist.broadcast(ones(4 + rank), 0)",
        r"rank 1 passed, but rank 0 is in broadcast of float32\[4\] .*, rank 1 in broadcast of float32\[5\]",
    ),
    "mismatched_dtype": (
        "two",
        "rank",
        "dist.all_reduce(ones(4, dtype=torch.float64 if rank else torch.float32))",
        r"rank \d was killed by SIGABRT: rank 0 is in all_reduce of float32\[4\], rank 1 in all_reduce of float64\[4\]",
    ),
    "roots_that_differ": (
        "two",
        "rank",
        "dist.barrier()\ndist.broadcast(ones(4), src=rank)",
        r"rank 0 stuck: rank 0 is in broadcast of float32\[4\] with root 0, rank 1 in broadcast of .* with root 1",
    ),
    "a_gather_and_a_barrier": (
        "two",
        "rank",
        "dist.gather(ones(4), [ones(4), ones(4)] if rank else None, dst=1) if rank else dist.barrier()",
        r"rank 0 stuck: rank 0 is in barrier, rank 1 in gather of float32\[4\] with root 1, as collective #1",
    ),
    "crossed_groups": (
        "two",
        "rank",
        """
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        dist.all_reduce(ones(2), group=groups[rank])
        dist.all_reduce(ones(2), group=groups[1 - rank])
        """,
        r"rank 0 stuck in all_reduce \(collective #1 of the group of ranks 0, 1, .*\): rank 1 never joins, it waits",
    ),
    "both_receive": (
        "two",
        "rank",
        "dist.recv(ones(3), 1 - rank)",
        r"rank 0 stuck waiting for message 1 from rank 1 in the default group: rank 1 waits for something else",
    ),
    "tags_that_differ": (
        "two",
        "rank",
        "if rank: dist.recv(ones(3), 0, tag=1)\nelse: dist.send(ones(3), 1, tag=2)",
        r"rank 0 stuck waiting for rank 1 to receive message 1 with tag 2",
    ),
    "a_group_made_by_one": (
        "two",
        "rank",
        "if rank == 0: dist.new_group([0, 1])",
        r"rank 0 (stuck waiting for the other ranks of a new process group: rank 1 has ended|failed: )",
    ),
    "a_key_that_nobody_sets": (
        "two",
        "rank",
        "if rank == 0: dist.distributed_c10d._get_default_store().get('missing')",
        r"rank 0 stuck waiting for a key of a store: rank 1 has ended",
    ),
    "a_backward_too_many": (
        "two",
        "rank",
        """
        model = DistributedDataParallel(torch.nn.Linear(3, 3))
        for _ in range(2 - rank):
            model(ones(2, 3)).sum().backward()
        """,
        r"rank 0 stuck in \w+ \(collective #\d+ of the default group, .*\): rank 1 never joins, it has ended",
    ),
    "a_model_on_one_rank": (
        "two",
        "rank",
        "if rank == 0: DistributedDataParallel(torch.nn.Linear(3, 3))",
        r"rank 0 stuck in \w+ \(collective #1 of the default group, .*\): rank 1 never joins, it has ended",
    ),
    "stuck_in_a_thread": (
        "two",
        "rank",
        """
        if rank == 0:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(dist.all_reduce, ones(2)).result()
        """,
        r"rank 0 stuck in all_reduce \(collective #1 .*\): rank 1 never joins, it has ended",
    ),
    "left_a_thread": (
        "two",
        "rank",
        "if rank: threading.Thread(target=time.sleep, args=[60], name='sleeper').start()",
        r"rank 1 left a thread running: 'sleeper'",
    ),
    "left_a_thread_in_a_collective": (
        "two",
        "rank",
        """
        if rank:
            threading.Thread(target=dist.all_reduce, args=[ones(2)], daemon=True, name='late').start()
            time.sleep(0.3)
        """,
        r"rank 1 left a thread running: 'late'",
    ),
    "hung_outside_a_collective": (
        "briefly",
        "rank",
        "def stands_here(): time.sleep(60)\nif rank: stands_here()",
        r"rank 1 timed out: no outcome after 1 s",
    ),
    "hung_with_pythons_lock_held": (
        "briefly",
        "rank",
        "if rank: ctypes.PyDLL(None).sleep(60)",
        r"rank 1 timed out: no outcome after 1 s",
    ),
    "stopped_by_a_signal": (
        "briefly",
        "rank",
        "if rank: os.kill(os.getpid(), signal.SIGSTOP)",
        r"rank 1 timed out: no outcome after 1 s",
    ),
    "closed_all_files": (
        "two",
        "rank",
        "if rank: os.closerange(3, 256)",
        r"rank 1 (exited|was killed|closed its control channel|failed)",
    ),
    "forked_a_copy_that_returns": (
        "two",
        "rank",
        "if rank and os.fork():\n    time.sleep(0.5)\n    raise ValueError('the parent speaks')",
        r"rank 1 failed: ValueError: the parent speaks",
    ),
    "an_exception_that_cannot_be_pickled": (
        "two",
        "rank",
        "if rank: raise Unpicklable('all the same')",
        r"rank 1 failed: test_corpus.Unpicklable: all the same|rank 1 failed: .*Unpicklable",
    ),
    "an_exception_that_cannot_be_printed": (
        "two",
        "rank",
        "if rank: raise Unprintable()",
        r"rank 1 failed: .*Unprintable",
    ),
    "a_fixture_that_cannot_be_pickled": (
        "two",
        "rank, capsys",
        "pass",
        r".*'capsys', a CaptureFixture, cannot be sent",
    ),
    "crashed_in_setup": ("two", "crashes_at_the_start", "pass", r"ranks 0, 1 failed: OSError: cannot set up"),
    "crashed_in_teardown": ("two", "crashes_at_the_end", "pass", r"ranks 0, 1 failed: OSError: cannot clean up"),
    "a_fixture_that_yields_twice": ("two", "yields_twice", "pass", r"ranks 0, 1 failed: .*yielded more than once"),
    "never_ran": ("two", "rank", "return (assertion for assertion in [0])", r".*its body never ran"),
    "a_fault_that_never_strikes": (
        "two",
        "faults",
        "faults.kill(rank=1, at='all_reduce#3')\ndist.all_reduce(ones(2))",
        r"rank 1 left faults unreached: kill at all_reduce#3",
    ),
    "a_dropped_operation": (
        "two",
        "faults",
        "faults.drop(rank=1, at='all_reduce#2')\nfor _ in range(2): dist.all_reduce(ones(2))",
        r"rank 0 stuck in all_reduce \(collective #2 .*\): rank 1 never joins, it has ended",
    ),
    "a_fault_that_raises": (
        "two",
        "faults",
        "faults.raise_(rank=1, at='barrier', error=OSError('disk full'))\ndist.barrier()",
        r"rank 1 failed: OSError: disk full",
    ),
}


@dataclass(frozen=True)
class Corpus:
    """What became of the corpus."""

    seconds: float
    text: str
    found: dict[str, tuple[str, str]]


_RUNS: list[Corpus] = []


def source() -> str:
    """Return the corpus as a module, with a healthy test after each case."""
    parts = [textwrap.dedent(PREAMBLE)]
    for name, (decorator, arguments, body, _) in CASES.items():
        code = textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")
        parts.append(f"@{decorator}\ndef test_{name}({arguments}):\n{code}\n")
        parts.append(f"@two\ndef test_healthy_after_{name}(rank):\n    test_healthy(rank)\n")
    return "\n".join(parts)


@pytest.fixture
def corpus(pytester: pytest.Pytester) -> Corpus:
    """The corpus, run once for all tests of this module."""
    if not _RUNS:
        pytester.makepyfile(test_corpus=source())
        began = time.monotonic()
        result = pytester.runpytest_subprocess("--junitxml=report.xml", "-p", "no:cacheprovider", timeout=200)
        found = {}
        for case in ElementTree.parse(pytester.path / "report.xml").iter("testcase"):
            verdict = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
            text = "" if verdict is None else f"{verdict.get('message')}\n{verdict.text}"
            found[case.get("name", "")] = ("passed" if verdict is None else verdict.tag, text)
        _RUNS.append(Corpus(time.monotonic() - began, result.stdout.str(), found))
    return _RUNS[0]


def _of(corpus: Corpus, name: str) -> tuple[str, str]:
    return next(found for key, found in corpus.found.items() if key.partition("[")[0] == f"test_{name}")


@pytest.mark.parametrize("name", CASES)
def test_a_test_that_goes_wrong_fails_with_its_cause(corpus: Corpus, name: str) -> None:
    kind, text = _of(corpus, name)
    assert kind in ("failure", "error"), f"{name} {kind}: {text}"
    assert re.match(CASES[name][3], text), text


def test_every_test_after_one_that_went_wrong_passes(corpus: Corpus) -> None:
    wrong = {name: text for name, (kind, text) in corpus.found.items() if "healthy" in name and kind != "passed"}
    assert not wrong
    assert len(corpus.found) == 2 * len(CASES) + 1


def test_a_deadlock_is_told_with_every_stack_and_the_last_collective(corpus: Corpus) -> None:
    _, text = _of(corpus, "mismatched_collective")
    assert "Last collective: all_reduce (#2 of the default group, float32[4]), unfinished" in text
    assert "Last collective: broadcast (#2 of the default group, float32[4]), unfinished" in text
    assert text.count("dist.barrier()") == 0
    assert "else: dist.all_reduce(ones(4))" in text
    assert "if rank: dist.broadcast(ones(4), 0)" in text


def test_a_rank_that_holds_pythons_lock_still_shows_where_it_stands(corpus: Corpus) -> None:
    _, text = _of(corpus, "hung_with_pythons_lock_held")
    assert "in test_hung_with_pythons_lock_held" in text


def test_each_failure_leaves_a_log_file_for_each_rank(corpus: Corpus) -> None:
    _, text = _of(corpus, "raised_on_one")
    assert "A log file for each rank:" in text
