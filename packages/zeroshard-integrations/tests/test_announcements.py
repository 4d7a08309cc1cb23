"""What ranks announce arrives as it was."""

from __future__ import annotations

from itertools import product

from zeroshard_integrations.join.announcements import Announcement, Held, Kind, Status, _read, _written, agreed


def test_every_announcement_is_read_as_it_was_written() -> None:
    seen = set()
    for status, kind, place, reduces, with_grad, held in product(
        Status, Kind, (0, 1, 5000), (False, True), (False, True), Held
    ):
        announcement = Announcement(status, kind, place, reduces, with_grad, held)
        word = _written(announcement)
        assert 0 <= word < 2**32
        read = _read(word)
        assert (read, read.held) == (announcement, held)
        seen.add(word)
    assert len(seen) == len(Status) * len(Kind) * 3 * 4 * len(Held)


def test_what_most_has_become_of_gradients_counts_and_the_first_rank_gives() -> None:
    answers = [
        Announcement(Status.JOINED, held=Held.CHANGED),
        *[Announcement(Status.RUNNING, Kind.BACKWARD, held=held) for held in (Held.KEPT, Held.CHANGED, Held.CHANGED)],
    ]
    assert agreed(answers) == (Held.CHANGED, 2)
    assert agreed(answers, [1]) == (Held.KEPT, 1)
