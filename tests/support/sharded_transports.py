"""The ways in which sharded gradients travel, each of them for models however small."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.ddp_by_collectives import without_tags
from zeroshard_comm import Coordinator, RankGroup, transport
from zeroshard_comm.same_host import all_read, probe_peer_memory

TRANSPORTS = ("messages", "messages in turn", "reads", "collectives")
"""Messages that a thread finishes, messages without a thread, reads of the memory of others, and collectives."""

NEVER = 2**60


def use_transport(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(transport, "WORTH_OVERLAPPING", NEVER if name == "messages in turn" else 0)
    monkeypatch.setattr(transport, "WORTH_READING", 1 if name == "reads" else NEVER)
    if name == "reads":
        coordinator = Coordinator(RankGroup.of())
        coordinator.agree("a test")
        probe_peer_memory(coordinator)
        if not all_read(RankGroup.of()):
            pytest.skip("this kernel does not let processes of one user read each other's memory")
    if name != "collectives":
        yield
        return
    with without_tags():
        yield
