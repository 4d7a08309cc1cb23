"""``monkeypatch`` on the ranks: each has one of its own, and what it patched is undone behind the test."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from zeroshard_testing.rank_fixtures import begin

PATCHED_ELSEWHERE = (
    "an ordinary fixture has patched something with monkeypatch in the controller, and ranks are processes of their "
    "own; patch it in the test, or in a fixture made with zeroshard_testing.rank_fixture"
)


class RankPickler(pickle.Pickler):
    """Pickles what is sent to ranks: pytest's ``monkeypatch`` as a request for one of their own."""

    def reducer_override(self, value: object) -> Any:  # noqa: ANN401 - what pickle expects, or NotImplemented
        """Replace what ranks make for themselves."""
        if type(value) is not pytest.MonkeyPatch:
            return NotImplemented
        return _of_rank, ()


def patches_elsewhere(patch: pytest.MonkeyPatch) -> bool:
    """Tell whether something was patched that ranks are not told of: they get the environment."""
    items = [target for target, *_ in patch._setitem if target is not os.environ]
    return bool(patch._setattr or items)


def _of_rank() -> pytest.MonkeyPatch:
    made: pytest.MonkeyPatch = begin("monkeypatch", _patching())
    return made


def _patching() -> Iterator[pytest.MonkeyPatch]:
    patch = pytest.MonkeyPatch()
    yield patch
    patch.undo()
