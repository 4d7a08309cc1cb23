"""Meetings: every rank goes on, or every rank raises the same error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist
from zeroshard_comm import Control, DisagreementError, RankGroup


class LibraryError(LookupError):
    """An error that the other ranks may not have at all."""


class OriginError(Exception):
    """An error without a nearer built-in type than Exception."""


def explain(here: str, there: str, rank: int, other: int) -> str:
    return f"{here} on {rank}, {there} on {other}"


@pytest.mark.ranks(1, 2, 4, backend="gloo")
def test_ranks_that_are_alike_go_on_and_send_a_header_alone(world_size: int) -> None:
    control = Control(RankGroup.of())
    for digest in (0, 2**63 - 1):
        control.meet("step()", digest, detail=lambda: pytest.fail("nobody asked"))
    sent = control.traffic.of("control")
    assert sent.bytes_sent == sent.bytes_received == 2 * 24 * (world_size - 1)


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
    control = Control(RankGroup.of())
    with pytest.raises(kind, match=f"rank 1: .*{words}"):
        control.meet("load()", error=make() if rank == 1 else None)
    control.meet("afterwards")


@pytest.mark.ranks(3, backend="gloo")
def test_an_error_that_all_ranks_have_is_raised_as_it_is() -> None:
    error = LibraryError("no")
    with pytest.raises(LibraryError, match=r"^no$") as caught:
        Control(RankGroup.of()).meet("load()", error=error)
    assert caught.value is error


@pytest.mark.ranks(4, backend="gloo")
def test_of_different_errors_the_first_ranks_is_raised_with_all_who_share_it(rank: int) -> None:
    errors = [None, ValueError("bad"), TypeError("worse"), ValueError("bad")]
    with pytest.raises(ValueError, match=r"^ranks 1, 3: bad$"):
        Control(RankGroup.of()).meet("load()", error=errors[rank])


@pytest.mark.ranks(3, backend="gloo")
def test_an_error_comes_before_a_difference(rank: int) -> None:
    with pytest.raises(MemoryError, match="rank 2: full"):
        Control(RankGroup.of()).meet(f"call {rank}", rank, error=MemoryError("full") if rank == 2 else None)


@pytest.mark.ranks(4, backend="gloo")
def test_different_operations_are_named_with_their_ranks(rank: int) -> None:
    control = Control(RankGroup.of())
    with pytest.raises(DisagreementError, match=r"ranks 0, 2, 3 called save\(\); rank 1 called load\(\)"):
        control.meet("load()" if rank == 1 else "save()")
    control.meet("afterwards")


@pytest.mark.ranks(3, backend="gloo")
def test_different_digests_are_explained_from_rank_0_to_the_first_other(rank: int) -> None:
    held = ["a", "a", "b"][rank]
    with pytest.raises(DisagreementError, match=r"save\(\): rank 2 differs from rank 0: a on 0, b on 2"):
        Control(RankGroup.of()).meet("save()", ord(held), detail=lambda: held, explain=explain)


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("raising", [(), (1,), (0, 1, 2)], ids=str)
def test_a_raised_hand_is_seen_by_all(rank: int, raising: tuple[int, ...]) -> None:
    assert Control(RankGroup.of()).any_raised(rank in raising, "step()") == bool(raising)


@pytest.mark.ranks(3, backend="gloo")
def test_a_rank_that_calls_something_else_meets_those_who_look_for_hands(rank: int) -> None:
    control = Control(RankGroup.of())
    with pytest.raises(DisagreementError, match=r"ranks 0, 1 called step\(\); rank 2 called save\(\)"):
        control.meet("save()", 7) if rank == 2 else control.any_raised(False, "step()")
    control.meet("afterwards")


@pytest.mark.ranks(4, backend="gloo")
def test_the_members_of_a_subgroup_meet_among_themselves(rank: int) -> None:
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        with pytest.raises(DisagreementError, match=r"rank 0 called save\(\); rank 1 called load\(\)"):
            Control(RankGroup.of(group)).meet("load()" if rank == 3 else "save()")


@pytest.mark.ranks(8, backend="fake", fake_rank=3)
def test_on_a_fake_group_a_rank_hears_itself_alone() -> None:
    control = Control(RankGroup.of())
    control.meet("step()", 1)
    assert control.any_raised(True, "step()")
    with pytest.raises(LibraryError, match=r"^mine$"):
        control.meet("step()", error=LibraryError("mine"))
