"""Counting what was sent."""

from __future__ import annotations

import pytest
from zeroshard_comm import Traffic, Volume


def test_totals_add_up_per_kind() -> None:
    traffic = Traffic()
    traffic.add("broadcast", sent=10, received=5, calls=2, waited=0.5)
    traffic.add("broadcast", sent=1)
    traffic.add("state", received=7)
    assert traffic.of("broadcast") == Volume(11, 5, 2, 0.5)
    assert traffic.total() == Volume(11, 12, 2, 0.5)


def test_a_difference_tells_what_was_added_since() -> None:
    traffic = Traffic()
    traffic.add("control", sent=3)
    before = traffic.of("control")
    traffic.add("control", sent=4, calls=1)
    assert traffic.of("control") - before == Volume(bytes_sent=4, calls=1)


def test_reset_and_unknown_kinds() -> None:
    traffic = Traffic()
    traffic.add("broadcast", sent=1)
    traffic.reset()
    assert traffic.total() == Volume()
    with pytest.raises(KeyError):
        traffic.add("nonsense", sent=1)
