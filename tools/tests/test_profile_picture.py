"""The picture of a profile: what is drawn of the events, and in which lane."""

from __future__ import annotations

from profile_picture import BACKWARD, FORWARD, Bar, bars, draw

NODE = "autograd::engine::evaluate_function: AddmmBackward0"
EVENTS = [
    ("DistributedDataParallel.forward", 1, 1_000.0, 11_000.0),
    ("aten::addmm", 1, 2_000.0, 3_000.0),
    (NODE, 1, 11_000.0, 20_000.0),
    (NODE, 1, 20_010.0, 31_000.0),
    ("zeroshard::reduce bucket 0", 2, 21_000.0, 25_000.0),
    ("zeroshard::reduce bucket 1", 3, 26_000.0, 36_000.0),
    ("zeroshard::step", 1, 33_000.0, 41_000.0),
    ("zeroshard::update", 1, 34_000.0, 36_000.0),
    (NODE, 1, 50_000.0, 60_000.0),
]


def test_functions_of_autograd_are_one_bar_until_a_pause():
    found = [(bar.start, bar.end) for bar in bars(EVENTS) if bar.name == BACKWARD]

    assert found == [(10.0, 30.0), (49.0, 59.0)]


def test_ranges_are_named_without_their_package_and_others_are_left_out():
    names = [bar.name for bar in bars(EVENTS)]

    assert names == [FORWARD, BACKWARD, "reduce bucket 0", "reduce bucket 1", "step", "update", BACKWARD]


def test_a_thread_has_a_lane_and_what_lies_within_a_range_is_drawn_below_it(tmp_path):
    draw(bars(EVENTS), "two iterations", tmp_path / "profile.svg")

    text = (tmp_path / "profile.svg").read_text()
    # Threads that live one after another share the lane.
    assert text.count(">main thread<") == text.count(">worker thread<") == 1
    for label in ("two iterations", "reduce bucket 1", "step", "reduce", "backward"):
        assert label in text, label


def test_a_profile_without_any_of_it_has_no_bars():
    assert bars([("aten::mm", 1, 0.0, 1.0)]) == []
    assert Bar("broadcast bucket 2", 1, 0.0, 1.0).phase == "broadcast"
