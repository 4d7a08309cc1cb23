"""The trials: small tests of two ranks, each wrong in one way, and for each kind of them a right one of the same means.

A trial knows nothing of the harness that runs it: its body takes the rank and the world size, and finds
`torch.distributed` initialised. A harness on which a right trial fails cannot express the wrong ones of its kind and
form.
"""

# ruff: noqa: ARG001, D103 - a trial's name says what it does, and not every one asks who it is

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
import unittest
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist

Body = Callable[[int, int], None]
Around = Callable[[], AbstractContextManager[None]]

KINDS: dict[str, str] = {
    "raises": "a rank raises",
    "killed": "a rank is killed",
    "exits": "a rank exits with status 0",
    "skips": "a rank skips alone",
    "hangs": "a rank waits for ever",
    "left-out": "a rank leaves a collective out",
    "collectives": "ranks call different collectives",
    "arguments": "one collective, other dtypes, sizes or reduce operations",
    "messages": "a message is not received, or not as it was sent",
    "effect": "the code fails under what a fixture sets",
    "teardown": "a fixture's check after the test fails",
    "dies-late": "a rank dies just after its test",
    "expected": "a rank fails otherwise than `xfail` says, or not at all",
}
"""Kinds of wrong tests, in the order of the table, and how the table calls them."""

SCOPES = ("test", "class", "module")


@dataclass(frozen=True)
class Form:
    """What a trial needs of its harness besides ranks.

    Attributes:
        around: Entered before the test and left after it, by the means that the harness has for that.
        scope: What it is entered around: one of `SCOPES`.
        xfail: Whether the test is marked as failing, strictly.
        raises: The only exception that is expected then; any, if None.
    """

    around: Around | None = None
    scope: str = "test"
    xfail: bool = False
    raises: str | None = None


@dataclass(frozen=True)
class Trial:
    """One test of two ranks.

    Attributes:
        name: Of its function here.
        kind: A key of `KINDS`.
        wrong: Whether a harness must report a failure.
        body: Called with the rank and the world size on every rank.
        form: What else it needs.
    """

    name: str
    kind: str
    wrong: bool
    body: Body
    form: Form


TRIALS: dict[str, Trial] = {}


def skip_in_unittest(reason: str) -> object:
    """Skip the running test of a `unittest.TestCase`."""
    raise unittest.SkipTest(reason)


skip: Callable[[str], object] = skip_in_unittest
"""Skips the running test; a test file of another runner sets it."""


def wrong(kind: str, form: Form | None = None) -> Callable[[Body], Body]:
    """Make a trial of a body that a harness must not let pass."""
    return _trial(kind, True, form or Form())


def right(kind: str, *forms: Form) -> Callable[[Body], Body]:
    """Make trials of a body that must pass, one for each form that the wrong trials of its kind take."""

    def register(body: Body) -> Body:
        for form in forms or (Form(),):
            _trial(kind, False, form)(body)
        return body

    return register


def right_for(trial: Trial) -> Trial:
    """Return the right trial that shows whether a harness can express this wrong one."""
    return next(t for t in TRIALS.values() if not t.wrong and t.kind == trial.kind and t.form == trial.form)


def _trial(kind: str, is_wrong: bool, form: Form) -> Callable[[Body], Body]:
    def register(body: Body) -> Body:
        name = body.__name__
        while name in TRIALS:
            name += "_"
        TRIALS[name] = Trial(name, kind, is_wrong, body, form)
        return body

    return register


def _ones(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*size, dtype=dtype)


# A right test that does nothing, to time.


@right("raises")
def does_nothing(rank: int, world_size: int) -> None:
    """Returns."""


# A rank raises.


class UnpicklableError(Exception):
    """Cannot be sent to another process."""

    def __reduce__(self) -> str:
        raise TypeError("cannot be pickled")


@wrong("raises")
def raises_on_rank_0(rank: int, world_size: int) -> None:
    assert rank == 1


@wrong("raises")
def raises_on_rank_1(rank: int, world_size: int) -> None:
    assert rank == 0


@wrong("raises")
def raises_while_the_other_waits(rank: int, world_size: int) -> None:
    assert rank == 0
    dist.all_reduce(_ones(2))


@wrong("raises")
def raises_what_cannot_be_pickled(rank: int, world_size: int) -> None:
    if rank == 1:
        raise UnpicklableError


# A rank is killed.


@right("killed")
def starts_and_ends(rank: int, world_size: int) -> None:
    dist.all_reduce(_ones(2))


@wrong("killed")
def killed_on_rank_0(rank: int, world_size: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)


@wrong("killed")
def killed_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@wrong("killed")
def killed_while_the_other_waits(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(_ones(2))


@wrong("killed")
def segmentation_fault(rank: int, world_size: int) -> None:
    if rank == 1:
        ctypes.string_at(0)


# A rank exits with status 0.


@right("exits")
def ends_without_an_exit(rank: int, world_size: int) -> None:
    dist.all_reduce(_ones(2))


@wrong("exits")
def exits_at_once_on_rank_0(rank: int, world_size: int) -> None:
    if rank == 0:
        os._exit(0)


@wrong("exits")
def exits_at_once_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(0)


@wrong("exits")
def exits_by_sys_exit(rank: int, world_size: int) -> None:
    if rank == 1:
        raise SystemExit(0)


@wrong("exits")
def exits_while_the_other_waits(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(0)
    dist.all_reduce(_ones(2))


# A rank skips alone.


@right("skips")
def skips_on_all_ranks(rank: int, world_size: int) -> None:
    skip("not here")


@wrong("skips")
def skips_on_rank_0(rank: int, world_size: int) -> None:
    if rank == 0:
        skip("not here")


@wrong("skips")
def skips_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        skip("not here")


@wrong("skips")
def skips_while_the_other_waits(rank: int, world_size: int) -> None:
    if rank == 1:
        skip("not here")
    dist.barrier()


@wrong("skips")
def skips_where_the_other_is_killed(rank: int, world_size: int) -> None:
    if rank == 0:
        skip("not here")
    os.kill(os.getpid(), signal.SIGKILL)


# A rank waits for ever.


@right("hangs")
def waits_for_what_comes(rank: int, world_size: int) -> None:
    dist.distributed_c10d._get_default_store().set(f"done-{rank}", "1")
    dist.distributed_c10d._get_default_store().wait([f"done-{1 - rank}"])
    for group in [dist.new_group([0, 1]), dist.new_group([0, 1])]:
        dist.all_reduce(_ones(2), group=group)
    with threading.Lock():
        time.sleep(0.1)


@wrong("hangs")
def waits_for_a_key_that_is_never_set(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.distributed_c10d._get_default_store().wait(["missing"])


@wrong("hangs")
def waits_in_groups_in_opposite_order(rank: int, world_size: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups if rank == 0 else reversed(groups):
        dist.all_reduce(_ones(2), group=group)


@wrong("hangs")
def waits_for_its_own_lock(rank: int, world_size: int) -> None:
    lock = threading.Lock()
    for _ in range(1 + rank):
        lock.acquire()


@wrong("hangs")
def sleeps_for_an_hour(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(3600)


# A rank leaves a collective out.


@right("left-out")
def all_ranks_call_all_collectives(rank: int, world_size: int) -> None:
    dist.all_reduce(_ones(2))
    dist.broadcast(_ones(2), 0)
    dist.all_reduce(_ones(2), group=dist.new_group([0, 1]))
    work = dist.all_reduce(_ones(2), async_op=True)
    assert work is not None
    work.wait()
    dist.barrier()


@wrong("left-out")
def leaves_out_an_all_reduce(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.all_reduce(_ones(2))


@wrong("left-out")
def leaves_out_the_last_of_three(rank: int, world_size: int) -> None:
    for _ in range(3 - rank):
        dist.all_reduce(_ones(2))


@wrong("left-out")
def leaves_out_an_all_reduce_of_a_subgroup(rank: int, world_size: int) -> None:
    group = dist.new_group([0, 1])
    if rank == 1:
        dist.all_reduce(_ones(2), group=group)


@wrong("left-out")
def leaves_out_what_the_other_does_not_wait_for(rank: int, world_size: int) -> None:
    dist.barrier()
    if rank == 0:
        dist.all_reduce(_ones(2), async_op=True)


@wrong("left-out")
def leaves_out_a_broadcast_to_itself(rank: int, world_size: int) -> None:
    dist.barrier()
    if rank == 0:
        dist.broadcast(_ones(2), 0)


# Ranks call different collectives.


@right("collectives")
def ranks_call_the_same_collectives(rank: int, world_size: int) -> None:
    dist.all_reduce(_ones(2))
    dist.broadcast(_ones(2), 0)
    dist.all_gather([_ones(2), _ones(2)], _ones(2))
    dist.gather(_ones(2), [_ones(2), _ones(2)] if rank == 0 else None, 0)
    dist.barrier()


@wrong("collectives")
def all_reduce_and_broadcast(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.all_reduce(_ones(2))
    else:
        dist.broadcast(_ones(2), 0)


@wrong("collectives")
def all_gather_and_all_reduce(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.all_gather([_ones(2), _ones(2)], _ones(2))
    else:
        dist.all_reduce(_ones(2))


@wrong("collectives")
def gather_and_barrier(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.gather(_ones(2), [_ones(2), _ones(2)], 0)
    else:
        dist.barrier()


@wrong("collectives")
def broadcasts_from_two_roots(rank: int, world_size: int) -> None:
    dist.broadcast(_ones(2), src=rank)


# The same collective with other dtypes, sizes or reduce operations.


@right("arguments")
def ranks_pass_the_same_arguments(rank: int, world_size: int) -> None:
    for dtype in (torch.float32, torch.int32):
        dist.all_reduce(_ones(2, dtype=dtype), dist.ReduceOp.SUM)
        dist.all_reduce(_ones(2, dtype=dtype), dist.ReduceOp.MAX)
        dist.broadcast(_ones(2, dtype=dtype), 0)
        dist.all_gather([_ones(2, dtype=dtype), _ones(2, dtype=dtype)], _ones(2, dtype=dtype))


def _dtype(rank: int) -> torch.dtype:
    return torch.int32 if rank else torch.float32


@wrong("arguments")
def all_reduces_of_two_dtypes(rank: int, world_size: int) -> None:
    dist.all_reduce(_ones(2, dtype=_dtype(rank)))


@wrong("arguments")
def broadcasts_of_two_dtypes(rank: int, world_size: int) -> None:
    dist.broadcast(_ones(2, dtype=_dtype(rank)), 0)


@wrong("arguments")
def all_gathers_of_two_dtypes(rank: int, world_size: int) -> None:
    mine = _ones(2, dtype=_dtype(rank))
    dist.all_gather([torch.zeros_like(mine), torch.zeros_like(mine)], mine)


@wrong("arguments")
def broadcasts_of_two_sizes(rank: int, world_size: int) -> None:
    dist.broadcast(_ones(2 + rank), 0)


@wrong("arguments")
def sum_on_one_rank_and_maximum_on_the_other(rank: int, world_size: int) -> None:
    dist.all_reduce(_ones(2), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)


# A message is not received, or not as it was sent.


@right("messages")
def messages_are_received(rank: int, world_size: int) -> None:
    work = dist.isend(_ones(2), 1, tag=1) if rank == 0 else dist.irecv(_ones(2), 0, tag=1)
    assert work is not None
    work.wait()


_under_way: list[object] = []
"""Keeps messages, for gloo gives up one that is forgotten."""


@wrong("messages")
def message_is_not_received(rank: int, world_size: int) -> None:
    if rank == 0:
        _under_way.append(dist.isend(_ones(2), 1))


@wrong("messages")
def one_message_of_two_is_received(rank: int, world_size: int) -> None:
    if rank == 0:
        _under_way.extend([dist.isend(_ones(2), 1), dist.isend(_ones(2), 1)])
    else:
        dist.recv(_ones(2), 0)


@wrong("messages")
def message_is_received_as_another_dtype(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.send(_ones(2), 1)
    else:
        dist.recv(_ones(2, dtype=torch.int32), 0)


@wrong("messages")
def messages_have_two_tags(rank: int, world_size: int) -> None:
    _under_way.append(dist.irecv(_ones(2), 0, tag=2) if rank else dist.isend(_ones(2), 1, tag=1))


# The code under test fails under what a fixture sets, so that the test must fail; without the fixture it passes.


@contextmanager
def disk_is_full() -> Iterator[None]:
    with mock.patch("torch.save", side_effect=OSError("no space left on device")):
        yield


@contextmanager
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextmanager
def float64_is_the_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def environment_names_no_devices() -> Iterator[None]:
    with mock.patch.dict(os.environ, {"TRIAL_DEVICES": "0"}):
        yield


_FULL, _STRICT, _PRECISE, _EMPTY = (
    Form(disk_is_full),
    Form(warnings_are_errors),
    Form(float64_is_the_default, scope="class"),
    Form(environment_names_no_devices, scope="module"),
)


@right("effect", _FULL, _STRICT, _PRECISE, _EMPTY)
def runs_under_any_fixture(rank: int, world_size: int) -> None:
    dist.all_reduce(_ones(2))


@wrong("effect", _FULL)
def writes_on_a_full_disk(rank: int, world_size: int) -> None:
    torch.save(_ones(2), os.devnull)


@wrong("effect", _STRICT)
def warns_where_warnings_are_errors(rank: int, world_size: int) -> None:
    warnings.warn("deprecated", UserWarning, stacklevel=1)


@wrong("effect", _PRECISE)
def mixes_float32_with_the_default_dtype(rank: int, world_size: int) -> None:
    torch.nn.Linear(2, 2, dtype=torch.float32)(torch.ones(2))


@wrong("effect", _EMPTY)
def divides_by_the_number_of_devices(rank: int, world_size: int) -> None:
    assert 1 // int(os.environ.get("TRIAL_DEVICES", "1")) == 1


# A fixture checks after the test what the test left in its process.

_left: list[int] = []


@contextmanager
def nothing_is_left() -> Iterator[None]:
    yield
    assert not _left, "the test left something"


@contextmanager
def nothing_is_saved() -> Iterator[None]:
    with mock.patch("torch.save") as save:
        yield
    save.assert_not_called()


_CHECKED = [Form(nothing_is_left, scope=scope) for scope in SCOPES]
_UNSAVED = Form(nothing_is_saved)


@right("teardown", *_CHECKED, _UNSAVED)
def leaves_nothing(rank: int, world_size: int) -> None:
    dist.all_reduce(_ones(2))


@wrong("teardown", _CHECKED[0])
def leaves_something_after_the_test(rank: int, world_size: int) -> None:
    _left.append(rank)


@wrong("teardown", _CHECKED[1])
def leaves_something_after_the_class(rank: int, world_size: int) -> None:
    _left.append(rank)


@wrong("teardown", _CHECKED[2])
def leaves_something_after_the_module(rank: int, world_size: int) -> None:
    _left.append(rank)


@wrong("teardown", _UNSAVED)
def saves_what_must_not_be_saved(rank: int, world_size: int) -> None:
    if rank == 1:
        torch.save(_ones(2), os.devnull)


# A rank's process dies just after the test has returned. No daemon thread: a process that ends waits for it.


def _die_soon(action: Callable[[], object]) -> None:
    def die() -> None:
        time.sleep(0.05)
        action()

    threading.Thread(target=die).start()


@right("dies-late")
def thread_ends_just_after_the_test(rank: int, world_size: int) -> None:
    _die_soon(lambda: None)


@wrong("dies-late")
def exits_just_after_the_test_on_rank_0(rank: int, world_size: int) -> None:
    if rank == 0:
        _die_soon(lambda: os._exit(3))


@wrong("dies-late")
def exits_just_after_the_test_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        _die_soon(lambda: os._exit(3))


@wrong("dies-late")
def exits_after_its_test_and_before_the_others(rank: int, world_size: int) -> None:
    if rank == 1:
        _die_soon(lambda: os._exit(3))
    else:
        time.sleep(0.5)


@wrong("dies-late")
def segmentation_fault_just_after_the_test(rank: int, world_size: int) -> None:
    if rank == 1:
        _die_soon(lambda: ctypes.string_at(0))


# A test marked as failing, on whose ranks something else happens.

_FAILS = Form(xfail=True)
_RAISES = Form(xfail=True, raises="ValueError")


@right("expected", _FAILS, _RAISES)
def raises_on_all_ranks_as_expected(rank: int, world_size: int) -> None:
    raise ValueError("expected")


@wrong("expected", _FAILS)
def passes_on_rank_1_against_expectation(rank: int, world_size: int) -> None:
    assert rank == 1


@wrong("expected", _FAILS)
def passes_on_rank_0_against_expectation(rank: int, world_size: int) -> None:
    assert rank == 0


@wrong("expected", _RAISES)
def is_killed_on_rank_1_against_expectation(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("expected")


@wrong("expected", _RAISES)
def raises_something_else_first(rank: int, world_size: int) -> None:
    if rank == 1:
        raise TypeError("not expected")
    time.sleep(0.5)
    raise ValueError("expected")


@wrong("expected", _RAISES)
def raises_something_else_later(rank: int, world_size: int) -> None:
    if rank == 0:
        raise ValueError("expected")
    time.sleep(0.5)
    raise TypeError("not expected")
