"""All ranks issue the same collectives in the same order, from one thread, whatever becomes of a step."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ddp_by_collectives import BOTH_WAYS, STEPPING, CollectiveTwins
from support.ddp_models import Branches
from support.ddp_training import EVERY_HOOK, HOOKS_AND_PARTITIONS, Twins
from torch import nn, optim
from zeroshard.grads.stream import SideStream
from zeroshard_comm import collectives, ring
from zeroshard_testing import Faults

REDUCTIONS, BROADCASTS = ("reduce", "reduce_scatter"), ("broadcast", "all_gather")


class Issued:
    """Writes down the collectives that this rank issues on groups other than the default one."""

    def __init__(self, patch: pytest.MonkeyPatch, log: list[str] | None = None) -> None:
        self.log = log if log is not None else []
        self.calls: list[tuple[str, int, int]] = []
        self.threads: set[str] = set()
        for name in ("reduce", "broadcast"):
            patch.setattr(dist, name, self._noting(name, getattr(dist, name)))
        for name in ("reduce_scatter", "all_gather"):
            patch.setattr(collectives, name, self._noting(name, getattr(collectives, name)))

    def _noting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
            if keywords.get("group") is not None:
                owner = keywords.get("group_dst", keywords.get("group_src", -1))
                self.calls.append((name, owner, tensor.nbytes))
                self.log.append("reduce" if name in REDUCTIONS else "broadcast")
                self.threads.add(threading.current_thread().name)
            return call(tensor, *arguments, **keywords)

        return noting


@pytest.mark.ranks(3, backend="gloo")
@HOOKS_AND_PARTITIONS
def test_all_ranks_issue_the_same_collectives_in_the_same_order_from_one_thread(
    rank: int, hook: str, partition: str, monkeypatch: pytest.MonkeyPatch, faults: Faults
) -> None:
    # Ranks differ in what they own, in which parameters they use, and in how fast they are. They agree by messages.
    monkeypatch.setattr(ring, "MOST_RANKS", 1)
    twins = CollectiveTwins(
        hook, model=Branches, partition=partition, ddp={"find_unused_parameters": True, "bucket_cap_mb": 0.01}
    )
    for operation in ("send", "recv"):
        faults.delay(1, f"{operation}#*", (0.0, 0.002), seed=3)
    issued = Issued(monkeypatch)
    for number in range(6):
        chosen = (number + rank) % 3
        twins.iterate(number, lambda ddp, inputs, chosen=chosen: ddp(inputs, chosen).square().mean())
    everyone: list[Any] = [None] * 3
    dist.all_gather_object(everyone, issued.calls)
    assert everyone[0] == everyone[1] == everyone[2]
    kinds = {name for name, *_ in issued.calls}
    if partition == "whole":
        assert kinds == {"reduce", "broadcast"}
    else:
        # Whole tensors travel with the parts of others, where that pads the matrix by little.
        assert {"reduce_scatter", "all_gather"} <= kinds <= {*REDUCTIONS, *BROADCASTS}
    assert issued.threads == {threading.current_thread().name}
    twins.check("after it all")


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize(
    ("finds_unused", "partition"), [(False, "whole"), (True, "split")], ids=["all are used", "some may be unused"]
)
def test_interleaved_broadcasts_come_before_the_last_reduction_where_all_parameters_are_used(
    partition: str, finds_unused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ddp = {"find_unused_parameters": finds_unused, "bucket_cap_mb": 0.01}
    twins = CollectiveTwins("hook_with_zero_step_interleaved", partition=partition, ddp=ddp)
    twins.iterate(0)
    twins.iterate(1)
    issued = Issued(monkeypatch)
    twins.iterate(2)
    are_reductions = [name in REDUCTIONS for name, *_ in issued.calls]
    last = len(are_reductions) - 1 - are_reductions[::-1].index(True)
    assert (False in are_reductions[:last]) == (not finds_unused)
    twins.check("after it all")


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_buckets_are_reduced_on_the_side_stream_which_is_joined_once(
    hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []

    class Noted(SideStream):
        @contextlib.contextmanager
        def as_current(self) -> Iterator[None]:
            log.append("begin")
            yield
            log.append("end")

        def join(self) -> None:
            log.append("join")

        def keep(self, tensor: torch.Tensor) -> None:
            # While it is current: what is kept is about to be used there.
            assert log.count("begin") == log.count("end") + 1
            log.append("keep")

    monkeypatch.setattr("zeroshard.grads.stream.SideStream", Noted)
    twins = CollectiveTwins(hook)
    issued = Issued(monkeypatch, log)
    for number in range(4):
        twins.optimizer.zero_grad()
        log.clear()
        twins.backward(twins.ddp, number)
        backward = "".join({"begin": "(", "end": ")", "join": "|"}.get(word, word[0]) for word in log)
        buckets = twins.optimizer.follow_backward(STEPPING[hook]).buckets.arrived
        with_norms = [state for state in buckets if hook == "reduce_to_owner_hook" and state.owned_gradients()]
        # Buckets are packed and sent on the side stream, which is joined at the end.
        inside = "".join(re.findall(r"\(([^()]*)\)", backward))
        outside = re.sub(r"\([^()]*\)", "", backward)
        assert set(outside) <= {"|", "b"}, backward
        assert "r" in inside, backward
        assert inside.count("k") == len(buckets) + len(with_norms), backward
        assert outside.count("|") == 1, backward
        # Broadcasts of early steps lie on the side stream, the last one (of what is in no bucket) behind it.
        assert ("b" in inside) == (hook == "hook_with_zero_step_interleaved"), backward
        assert outside.rstrip("b").endswith("|"), backward
        assert issued.threads == {threading.current_thread().name}
        twins.optimizer.step()


class Fallible(optim.SGD):
    """Raises in its step when it is told to."""

    steps_in_pieces = True
    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ZeroDivisionError("no step today")
        return super().step(closure)


@pytest.mark.ranks(3, backend="gloo")
@BOTH_WAYS
@pytest.mark.parametrize(
    ("problem", "hook"),
    [
        ("lr", "reduce_to_owner_hook"),
        ("members", "hook_with_zero_step"),
        ("fails", "hook_with_zero_step_interleaved"),
        ("alone", "reduce_to_owner_hook"),
    ],
)
def test_a_rank_that_cannot_step_changes_nothing_in_the_order(
    rank: int, twins_by: type[Twins], hook: str, problem: str
) -> None:
    twins = twins_by(hook, optimizer=Fallible, settings={"lr": 0.01})
    twins.iterate(0)
    twins.iterate(1)
    twins.optimizer.zero_grad()
    if problem == "lr" and rank == 1:
        twins.optimizer.param_groups[0]["lr"] = 0.5
    if problem == "members" and rank == 1:
        twins.optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(2)))
    if problem == "fails" and rank == 1:
        twins.optimizer.optim.fails = True
    if problem == "alone":
        # A hook of the local optimizer, on one rank alone: that rank steps everything at once.
        if rank == 1:
            twins.optimizer.optim.register_step_post_hook(lambda *_: None)
        for number in range(2, 5):
            twins.iterate(number)
            twins.check(f"after iteration {number}")
        return

    def iterate() -> None:
        twins.backward(twins.ddp, 2)
        twins.optimizer.step()

    expected = {
        "lr": "lr of group 0 is '0.01' on rank 0 and '0.5' on rank 1",
        "members": "the members of param_groups are not those",
        "fails": "no step today",
    }[problem]
    with pytest.raises((RuntimeError, ZeroDivisionError), match=expected):
        iterate()
    # Nobody waits for anybody.
    dist.barrier()
    if problem == "lr":
        twins.optimizer.param_groups[0]["lr"] = 0.01
        twins.optimizer.zero_grad()
        iterate()
