"""Agreements: every rank goes on, or every rank raises the same error."""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from zeroshard_comm import (
    Coordinator,
    DisagreementError,
    Position,
    RankGroup,
    agreed,
)


class LibraryError(LookupError):
    """An error that the other ranks may not have at all."""


class OriginError(Exception):
    """An error without a nearer built-in type than Exception."""


def explain(here: str, there: str, rank: int, other: int) -> str:
    return f"{here} on {rank}, {there} on {other}"


@pytest.mark.by_default("ring-1 | ring-4 | rounds-2 | rounds-5")
@pytest.mark.ranks(1, 2, 4, 5, backend="gloo")
def test_ranks_that_are_alike_go_on_and_send_a_word_in_each_round_or_make_one_collective(
    world_size: int, way: str
) -> None:
    coordinator = Coordinator(RankGroup.of())
    for number, digest in enumerate((0, 2**63 - 1)):
        before = coordinator.traffic.of("control")
        coordinator.agree("step()", digest, detail=lambda: pytest.fail("nobody asked"))
        sent = coordinator.traffic.of("control") - before
        rounds = math.ceil(math.log2(world_size))
        if number and way == "ring" and world_size > 1:
            assert (sent.bytes_sent, sent.bytes_received, sent.calls) == (8, 8, 1)
        else:
            # The word, and which rank was lost, if any.
            assert sent.bytes_sent == sent.bytes_received == 16 * rounds
            assert sent.calls == 2 * rounds


ERRORS: dict[str, tuple[Callable[[], Exception], type[Exception], str]] = {
    "built-in": (lambda: ZeroDivisionError("no"), ZeroDivisionError, "no"),
    "of a library": (lambda: LibraryError("no"), LookupError, "no"),
    "of nobody": (lambda: OriginError("no"), Exception, "no"),
    "not to be made from a text": (lambda: UnicodeDecodeError("utf-8", b"x", 0, 1, "no"), RuntimeError, "no"),
    "without a text": (ValueError, ValueError, ""),
    "not ASCII": (lambda: OSError("kein Ger\u00e4t \U0001f4a5"), OSError, "kein Ger\u00e4t \U0001f4a5"),
    "long": (lambda: ValueError("x" * 1_000_000), ValueError, "x{1000000}"),
}


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("name", ERRORS)
def test_the_error_of_one_rank_is_raised_on_all(rank: int, name: str) -> None:
    make, kind, words = ERRORS[name]
    coordinator = Coordinator(RankGroup.of())
    with pytest.raises(kind, match=f"rank 1: .*{words}"):
        coordinator.agree("load()", error=make() if rank == 1 else None)
    coordinator.agree("afterwards")


@pytest.mark.ranks(3, backend="gloo")
def test_an_error_that_all_ranks_have_is_raised_as_it_is() -> None:
    error = LibraryError("no")
    with pytest.raises(LibraryError, match=r"^no$") as caught:
        Coordinator(RankGroup.of()).agree("load()", error=error)
    assert caught.value is error


@pytest.mark.exhaustive_at(1)
@pytest.mark.ranks(1, 3, backend="gloo")
@pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "implicit"])
@pytest.mark.parametrize("while_another_is_handled", [True, False], ids=["while another is handled", "alone"])
def test_an_error_that_all_ranks_have_keeps_what_it_was_raised_from(
    explicit: bool, while_another_is_handled: bool
) -> None:
    reason = KeyError("x")

    def load() -> None:
        with agreed(Coordinator(RankGroup.of()), "load()"):
            try:
                raise reason
            except KeyError:
                if not explicit:
                    raise ValueError("mine")  # noqa: B904 - the implicit context is what is tested
                raise ValueError("mine") from reason

    def call() -> None:
        with pytest.raises(ValueError, match="mine") as caught:
            load()
        assert caught.value.__context__ is reason
        assert caught.value.__cause__ is (reason if explicit else None)
        assert caught.value.__suppress_context__ is explicit

    if not while_another_is_handled:
        call()
        return
    try:
        raise OSError("before")
    except OSError:
        call()


@pytest.mark.ranks(2, backend="gloo")
def test_the_chain_of_one_ranks_error_is_there_on_that_rank(rank: int) -> None:
    error = ValueError("mine")
    error.__cause__ = reason = KeyError("x")
    with pytest.raises(ValueError, match="rank 1: mine") as caught:
        Coordinator(RankGroup.of()).agree("load()", error=error if rank else None)
    assert caught.value.__cause__ is (error if rank else None)
    assert not rank or error.__cause__ is reason


@pytest.mark.ranks(4, backend="gloo")
def test_of_different_errors_the_first_ranks_is_raised_with_all_who_share_it(rank: int) -> None:
    errors = [None, ValueError("bad"), TypeError("worse"), ValueError("bad")]
    with pytest.raises(ValueError, match=r"^ranks 1, 3: bad$"):
        Coordinator(RankGroup.of()).agree("load()", error=errors[rank])


@pytest.mark.ranks(3, backend="gloo")
def test_an_error_comes_before_a_difference(rank: int) -> None:
    with pytest.raises(MemoryError, match="rank 2: full"):
        Coordinator(RankGroup.of()).agree(f"call {rank}", rank, error=MemoryError("full") if rank == 2 else None)


@pytest.mark.ranks(4, backend="gloo")
def test_different_operations_are_named_with_their_ranks(rank: int) -> None:
    coordinator = Coordinator(RankGroup.of())
    with pytest.raises(DisagreementError, match=r"ranks 0, 2, 3 called save\(\); rank 1 called load\(\)"):
        coordinator.agree("load()" if rank == 1 else "save()")
    coordinator.agree("afterwards")


@pytest.mark.ranks(3, backend="gloo")
def test_different_digests_are_explained_from_rank_0_to_the_first_other(rank: int) -> None:
    held = ["a", "a", "b"][rank]
    with pytest.raises(DisagreementError, match=r"save\(\): rank 2 differs from rank 0: a on 0, b on 2"):
        Coordinator(RankGroup.of()).agree("save()", ord(held), detail=lambda: held, explain=explain)


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("raising", [(), (1,), (0, 1, 2)], ids=str)
def test_a_raised_hand_is_seen_by_all(rank: int, raising: tuple[int, ...]) -> None:
    assert Coordinator(RankGroup.of()).agree("step()", flag=rank in raising) == bool(raising)


@pytest.mark.ranks(3, backend="gloo")
def test_a_rank_that_calls_something_else_meets_those_who_look_for_hands(rank: int) -> None:
    coordinator = Coordinator(RankGroup.of())
    with pytest.raises(DisagreementError, match=r"ranks 0, 1 called step\(\); rank 2 called save\(\)"):
        coordinator.agree("save()", 7) if rank == 2 else coordinator.agree("step()")
    coordinator.agree("afterwards")


@pytest.mark.by_default("ring-1 | ring-3 | ring-5 | rounds-2 | rounds-4 | rounds-8")
@pytest.mark.ranks(1, 2, 3, 4, 5, 8, backend="gloo")
@pytest.mark.usefixtures("way")
def test_numbers_of_all_ranks_come_to_all_in_rank_order(rank: int, world_size: int) -> None:
    coordinator = Coordinator(RankGroup.of())
    coordinator.agree("a test")
    mine = [rank, -rank, 2**62 + rank]
    assert coordinator.gather_ints(mine, "a test") == [[r, -r, 2**62 + r] for r in range(world_size)]
    slots = torch.zeros(world_size, dtype=torch.float64)
    slots[rank] = 0.1 * rank if rank else math.nan
    floats = coordinator.combine_disjoint(slots, "a test").tolist()
    assert floats[1:] == [0.1 * r for r in range(1, world_size)]
    assert math.isnan(floats[0])
    bits = [rank == place % (world_size + 1) for place in range(20)]
    assert coordinator.any_of(bits, "a test") == [place % (world_size + 1) < world_size for place in range(20)]


@pytest.mark.ranks(3, backend="gloo")
def test_positions_are_compared_and_told(rank: int) -> None:
    coordinator = Coordinator(RankGroup.of())
    coordinator.position = Position(1 + (rank == 2), "Adam", 4)
    told = r"ranks 0, 1 called step\(\) after 4 steps of optimizer 1 \(Adam\); rank 2 called step\(\) after 4 steps of"
    with pytest.raises(DisagreementError, match=told):
        coordinator.agree("step()", 7)
    coordinator.position = Position(1, "Adam", 4)
    coordinator.agree("step()", 7)


@pytest.mark.ranks(2, backend="gloo")
def test_a_second_thread_is_refused_by_the_name_of_what_the_first_is_in(rank: int) -> None:
    coordinator = Coordinator(RankGroup.of())
    if rank == 0:
        # Before its peer comes, this rank waits in the agreement.
        waiting = threading.Thread(target=coordinator.agree, args=["step()"])
        waiting.start()
        while coordinator.ranks.context.doing != "step()":
            time.sleep(0.001)
        with pytest.raises(RuntimeError, match=r"save\(\) was called while another thread is in step\(\)"):
            Coordinator(RankGroup.of()).agree("save()")
        dist.barrier()
        waiting.join()
    else:
        dist.barrier()
        coordinator.agree("step()")
    coordinator.agree("afterwards")


@pytest.mark.ranks(4, backend="gloo")
def test_the_members_of_a_subgroup_meet_among_themselves(rank: int) -> None:
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        with pytest.raises(DisagreementError, match=r"rank 0 called save\(\); rank 1 called load\(\)"):
            Coordinator(RankGroup.of(group)).agree("load()" if rank == 3 else "save()")


@pytest.mark.ranks(8, backend="fake", fake_rank=3)
def test_on_a_fake_group_a_rank_hears_itself_alone() -> None:
    coordinator = Coordinator(RankGroup.of())
    coordinator.agree("step()", 1)
    assert coordinator.agree("step()", flag=True)
    with pytest.raises(LibraryError, match=r"^mine$"):
        coordinator.agree("step()", error=LibraryError("mine"))


@pytest.mark.ranks(2, backend="gloo")
def test_a_process_group_that_is_destroyed_is_freed_although_its_ranks_have_agreed() -> None:
    group = dist.new_group()
    for _ in range(2):
        Coordinator(RankGroup.of(group)).agree("a call")
    dist.destroy_process_group(group)
    freed = weakref.ref(group)
    del group
    gc.collect()
    assert freed() is None


@pytest.mark.ranks(2, backend="gloo")
def test_the_store_of_the_process_group_keeps_its_timeout() -> None:
    group = dist.new_group()
    store = group.get_group_store()
    store.set_timeout(timedelta(seconds=77))
    Coordinator(RankGroup.of(group)).agree("a call")
    assert store.timeout == timedelta(seconds=77)
