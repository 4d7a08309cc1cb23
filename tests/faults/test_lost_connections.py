"""Lost ranks and connections: the others raise and name the rank, and nobody waits."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.groups import group_of
from zeroshard_comm import (
    Coordinator,
    Message,
    PeerLostError,
    RankGroup,
    Traffic,
    agreement,
    process_group,
    receive,
    ring,
    rounds,
    send,
)
from zeroshard_comm._torch_private import backends_of
from zeroshard_testing import Faults


def connected(group: dist.ProcessGroup | None = None) -> Coordinator:
    """Return the coordinator of ranks that have connections of their own."""
    coordinator = Coordinator(RankGroup.of(group))
    coordinator.agree("warming up")
    coordinator.agree("connected")
    return coordinator


CALLS: dict[str, Callable[[Coordinator, int], object]] = {
    "agree": lambda coordinator, _: coordinator.agree("step()"),
    "gather_ints": lambda coordinator, rank: coordinator.gather_ints([rank], "step()"),
}


@pytest.mark.by_default("ring-2-agree | ring-5-agree | rounds-3-gather_ints")
@pytest.mark.ranks(2, 3, 4, 5, 17, backend="gloo")
@pytest.mark.parametrize("call", CALLS)
def test_all_ranks_learn_of_a_killed_one_in_the_same_agreement(rank: int, faults: Faults, call: str, way: str) -> None:
    # They live on: nobody's end tells the others.
    coordinator = connected()
    faults.kill(rank=1, at="send")
    if way == "ring" and rank == 1:
        dist.isend(torch.zeros(1), 0)
    with pytest.raises(PeerLostError, match="lost rank 1"):
        CALLS[call](coordinator, rank)
    with pytest.raises(PeerLostError):
        CALLS[call](coordinator, rank)


@pytest.mark.ranks(2, backend="gloo", isolation="process")
def test_connections_that_cannot_be_opened_name_the_limit_of_files(rank: int) -> None:
    coordinator = Coordinator(RankGroup.of(group_of(seconds=2)))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())), hard))
    try:
        with pytest.raises(PeerLostError, match=r"check that `ulimit -n` allows 1 more connections per rank"):
            coordinator.agree("step()")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class StubBackend:
    """A backend for devices that only counts how often it is aborted."""

    def __init__(self) -> None:
        self.aborted = 0

    def abort(self) -> None:
        self.aborted += 1


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("switch", ["1", "0"])
def test_what_is_under_way_on_devices_is_aborted_once_when_a_rank_is_lost(
    rank: int, faults: Faults, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = StubBackend()
    monkeypatch.setenv(process_group.ABORT, switch)
    monkeypatch.setattr(process_group, "backends_of", lambda group: [*backends_of(group), stub])
    coordinator = Coordinator(RankGroup.of())
    coordinator.agree("warming up")
    with pytest.raises(ValueError, match="bad input"):
        coordinator.agree("step()", error=ValueError("bad input"))
    assert stub.aborted == 0
    faults.kill(rank=1, at="send")
    if rank == 1:
        dist.isend(torch.zeros(1), 0)
    for _ in range(2):
        with pytest.raises(PeerLostError):
            coordinator.agree("step()")
    assert stub.aborted == int(switch)


@pytest.mark.ranks(5, backend="gloo")
def test_a_rank_that_has_closed_its_connections_since_another_is_lost_is_not_named(
    rank: int, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "MOST_RANKS", 1)
    coordinator = connected()
    if rank == 0:

        def send_late(channel: RankGroup, peer: int, *arguments: Any) -> Message:
            if peer == 2:
                dist.recv(torch.zeros(1), 2)
            message = send(channel, peer, *arguments)
            if peer == 1:
                # All receives have been posted.
                dist.send(torch.zeros(1), 1)
            return message

        monkeypatch.setattr(rounds, "send", send_late)
    if rank == 1:
        dist.recv(torch.zeros(1), 0)
    faults.kill(rank=1, at="send")
    with pytest.raises(PeerLostError, match="lost rank 1"):
        coordinator.agree("step()")
    if rank == 2:
        dist.send(torch.zeros(1), 0)


@pytest.mark.ranks(4, backend="gloo")
def test_a_rank_that_refuses_a_send_is_named_if_the_ranks_that_could_name_another_are_late(
    rank: int, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "MOST_RANKS", 1)
    coordinator = connected()
    faults.kill(rank=1, at="send")
    # Rank 0 sends to rank 1, and first hears of rank 3.
    if rank == 0:
        with pytest.raises(RuntimeError):
            dist.recv(torch.zeros(1), 1)
        time.sleep(0.5)
    if rank == 3:
        time.sleep(4)
    with pytest.raises(PeerLostError, match="lost rank" if rank == 3 else "lost rank 1"):
        coordinator.agree("step()")


@pytest.mark.exhaustive_at(4)
@pytest.mark.ranks(4, 5, backend="gloo")
@pytest.mark.parametrize("call", CALLS)
def test_nobody_waits_for_a_rank_that_is_killed_between_two_rounds(
    rank: int, faults: Faults, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "MOST_RANKS", 1)
    # Its word is out, so ranks may rightly have agreed with it.
    coordinator = connected()
    faults.kill(rank=1, at="send#2")
    with contextlib.suppress(PeerLostError):
        CALLS[call](coordinator, rank)


@pytest.mark.exhaustive_at(2, 5)
@pytest.mark.ranks(2, 4, 5, backend="gloo", checks="no:messages")
@pytest.mark.parametrize("after", [False, True], ids=["at once", "after an agreement"])
def test_ranks_of_which_one_has_left_the_ring_raise(
    rank: int, world_size: int, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = connected()
    combine = ring.Ring.combine

    def fail(this: ring.Ring, numbers: torch.Tensor, traffic: Traffic) -> bool:
        if after:
            combine(this, numbers, traffic)
        return False

    leaves = rank == world_size - 1
    if leaves:
        monkeypatch.setattr(ring.Ring, "combine", fail)
    waits_for_values = after and not leaves
    if waits_for_values:
        # It has agreed.
        coordinator.agree("step()")
        values = receive(coordinator.channel, world_size - 1, torch.zeros(1), 1, "step()")
    with pytest.raises(PeerLostError):
        values.wait("step()") if waits_for_values else coordinator.agree("step()")
    # The others raise although it lives on.
    store = dist.PrefixStore("test", dist.group.WORLD.get_group_store())  # type: ignore[union-attr]
    store.set(str(rank), "")
    if leaves:
        store.wait([str(other) for other in range(rank)], timedelta(seconds=60))


@pytest.mark.ranks(3, backend="gloo", checks="no:messages")
def test_ranks_that_lose_another_one_in_different_agreements_raise(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = connected()
    combine = ring.Ring.combine
    begun = []

    def fail(this: ring.Ring, numbers: torch.Tensor, traffic: Traffic) -> bool:
        """As if gloo reported the lost rank to rank 1 in the first of them, and to the others in the second."""
        begun.append(numbers)
        return combine(this, numbers, traffic) and rank != 1 and len(begun) < 2

    monkeypatch.setattr(ring.Ring, "combine", fail)
    if rank == 1:
        with pytest.raises(PeerLostError):
            coordinator.gather_ints([rank], "the sizes")
        assert len(begun) == 1
    else:
        assert coordinator.gather_ints([rank], "the sizes") == [[0], [1], [2]]
        with pytest.raises(PeerLostError):
            coordinator.gather_ints([rank] * 13, "the texts")


@pytest.mark.ranks(3, backend="gloo", checks="no:messages")
def test_a_rank_gives_a_ring_up_that_another_one_has_left_unnoticed(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = connected()
    store = dist.PrefixStore("test", dist.group.WORLD.get_group_store())  # type: ignore[union-attr]
    if rank == 1:
        # As if gloo had not seen that its connections are closed.
        connections = coordinator.ranks.context.connections
        assert connections is not None
        connections._notice.leave(ring._LOST)
        store.wait(["0", "2"], timedelta(seconds=60))
    with pytest.raises(PeerLostError):
        coordinator.agree("step()")
    store.set(str(rank), "")


@pytest.mark.by_default("ring-3-lost some | rounds-3-lost 2")
@pytest.mark.ranks(3, backend="gloo", checks="no:messages")
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("lost", [None, 2], ids=["lost some", "lost 2"])
def test_a_rank_that_has_lost_another_one_tells_so_in_the_next_agreement(
    rank: int, lost: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All live, and hear of it, however late they are.
    monkeypatch.setattr(rounds, "_TELLING", timedelta(seconds=30))
    coordinator = connected()
    error = PeerLostError("some collective could not be finished")
    error.peer = lost
    others = "another rank has lost a rank, whose" if lost is None else "another rank has lost rank 2, whose"
    with pytest.raises(PeerLostError, match="some collective" if rank == 1 else others) as raised:
        coordinator.agree("the end of step()", error=error if rank == 1 else None)
    assert raised.value.peer == lost


@pytest.mark.ranks(3, backend="gloo", checks="no:messages")
@pytest.mark.usefixtures("way")
def test_nobody_waits_for_a_rank_that_has_lost_another_and_the_users_group_works_on(rank: int) -> None:
    coordinator = connected()
    assert coordinator.channel is not None
    if rank == 0:
        with pytest.raises(PeerLostError):
            coordinator.agree("step()", error=PeerLostError("another one was lost"))
    else:
        # Not in an agreement: nothing could be told it.
        message = receive(coordinator.channel, 0, torch.zeros(1), 1, "a test")
        with pytest.raises(PeerLostError):
            message.wait("a test")
    with pytest.raises(PeerLostError):
        coordinator.agree("step()")
    with pytest.raises(PeerLostError, match=r"on a new process group\. It closed them after this error: .*lost"):
        coordinator.agree("step()")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 3


@pytest.mark.ranks(2, backend="gloo", checks="no:messages")
def test_a_rank_that_never_connects_is_not_waited_for_until_the_timeout(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "_TO_CONNECT", timedelta(seconds=2))
    group = dist.new_group(timeout=timedelta(minutes=10))
    store = dist.PrefixStore("test", group.get_group_store())
    if rank:
        monkeypatch.setattr(agreement, "Connections", lambda _: store.wait(["raised"], timedelta(seconds=60)))
        Coordinator(RankGroup.of(group)).agree("a call")
    else:
        with pytest.raises(PeerLostError, match="connect"):
            Coordinator(RankGroup.of(group)).agree("a call")
        store.set("raised", "")


@pytest.mark.exhaustive_at(2, 5)
@pytest.mark.ranks(2, 4, 5, backend="gloo")
def test_ranks_look_for_lost_ones_while_they_wait_for_a_late_one(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = connected()
    looked = []
    connections = coordinator.ranks.context.connections
    assert connections is not None
    is_there = connections._notice.is_there
    monkeypatch.setattr(connections._notice, "is_there", lambda: looked.append(1) or is_there())
    time.sleep(2 * (rank == 1))
    coordinator.agree("another call")
    assert bool(looked) == (rank != 1)


@pytest.mark.ranks(2, backend="gloo")
def test_a_rank_that_an_earlier_group_on_the_same_store_has_lost_is_forgotten(rank: int) -> None:
    assert dist.group.WORLD is not None
    ring.Notice(dist.group.WORLD.get_group_store()).leave(ring._LOST)
    coordinator = connected()
    # Rank 0 looks for lost ranks while it waits for rank 1.
    time.sleep(rank)
    coordinator.agree("another call")


@pytest.mark.exhaustive_at(3, 8)
@pytest.mark.ranks(3, 4, 8, backend="gloo", checks="no:messages")
def test_the_late_rank_alone_is_blamed(rank: int, world_size: int) -> None:
    group = group_of(seconds=2)
    coordinator = Coordinator(RankGroup.of(group))
    coordinator.agree("a call")
    store = dist.PrefixStore("test", group.get_group_store())
    if rank == 1:
        store.wait([str(other) for other in range(world_size) if other != 1], timedelta(seconds=60))
        return
    # One comes a little later to the rounds, in which another waits for it.
    time.sleep(0.2 * (rank == 2))
    with pytest.raises(PeerLostError, match=r"^rank 1 did not call step\(\) within 2 s: call it on every") as raised:
        coordinator.agree("step()")
    assert raised.value.peer == 1
    store.set(str(rank), "")


@pytest.mark.exhaustive_at(8)
@pytest.mark.ranks(4, 8, backend="gloo", checks="no:messages")
@pytest.mark.parametrize("late", [0, 2, 3])
def test_nobody_waits_for_a_late_rank_once_another_one_is_lost_and_nobody_blames_it(
    rank: int, world_size: int, late: int, faults: Faults
) -> None:
    coordinator = connected()
    store = dist.PrefixStore("test", dist.group.WORLD.get_group_store())  # type: ignore[union-attr]
    faults.kill(rank=1, at="send")
    if rank == 1:
        dist.isend(torch.zeros(1), 0)
    if rank == late:
        store.wait([str(other) for other in range(world_size) if other not in (1, late)], timedelta(seconds=60))
    with pytest.raises(PeerLostError) as raised:
        coordinator.agree("step()")
    assert raised.value.peer == 1
    store.set(str(rank), "")


@pytest.mark.exhaustive_at(2, 5, 17)
@pytest.mark.ranks(2, 4, 5, 17, backend="gloo", checks="no:messages")
def test_a_rank_that_is_stopped_ends_the_others_by_the_timeout(rank: int, faults: Faults) -> None:
    group = group_of(seconds=3)
    coordinator = connected(group)
    faults.stop(rank=1, at="send")
    if rank == 1:
        dist.isend(torch.zeros(1), 0)
    with pytest.raises(PeerLostError, match=r"did not call step\(\) within (3 s|the process group's timeout)"):
        coordinator.agree("step()")
