"""DDP with a hook of ours where no message can be matched by tag, as with NCCL, though the backend is gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from support.ddp_training import Twins
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

    def __init__(self, hook: str, **arguments: Any) -> None:
        with without_tags():
            super().__init__(hook, **arguments)
            self.optimizer.follow_backward(STEPPING[hook])
