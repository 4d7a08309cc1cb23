"""DDP with a hook of ours where no message can be matched by tag, as with NCCL, though the backend is gloo."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from support.ddp_training import HOOKS, Twins
from zeroshard import StepMode
from zeroshard_comm import RankGroup

STEPPING = {
    "reduce_to_owner_hook": StepMode.IN_STEP,
    "hook_with_zero_step": StepMode.AFTER_BACKWARD,
    "hook_with_zero_step_interleaved": StepMode.PER_BUCKET,
}


@contextlib.contextmanager
def without_tags() -> Iterator[None]:
    """Let what is built meanwhile believe that the backend cannot match messages by tag.

    Control messages then travel on a gloo group of their own, as beside NCCL, and parameters by broadcasts.
    """
    with mock.patch.object(RankGroup, "sends_tagged", return_value=False):
        yield


class CollectiveTwins(Twins):
    """Twins of which the sharded one moves everything by collectives."""

    def __init__(self, hook: str = HOOKS[0], **arguments: Any) -> None:
        with without_tags():
            super().__init__(hook, **arguments)
            self.optimizer.follow_backward(STEPPING[hook])


BOTH_WAYS = pytest.mark.parametrize("twins_by", [Twins, CollectiveTwins], ids=["messages", "collectives"])
"""Gradients and parameters travel by messages, or by collectives."""


def _both_ways(name: str, values: dict[str, Any]) -> pytest.MarkDecorator:
    """Parametrize by all combinations; by default each hook has one value by messages and the other by collectives."""
    ways = {"messages": Twins, "collectives": CollectiveTwins}
    cases = []
    for (place, way), (number, hook), (which, text) in itertools.product(*map(enumerate, (ways, HOOKS, values))):
        marks = [pytest.mark.exhaustive] if (place + number + which) % 2 else []
        cases.append(pytest.param(ways[way], hook, values[text], id=f"{way}-{hook}-{text}", marks=marks))
    return pytest.mark.parametrize(("twins_by", "hook", name), cases)


PARTITIONS_BOTH_WAYS = _both_ways("partition", {"whole": "whole", "split": "split"})
"""Each hook both ways, with one partition by messages and the other one by collectives; not by default, with both."""

VIEWS_BOTH_WAYS = _both_ways("views", {"views": True, "copies": False})
"""Each hook both ways, with gradients that are views of DDP's buckets one way, and copies the other way;
not by default, with both."""
