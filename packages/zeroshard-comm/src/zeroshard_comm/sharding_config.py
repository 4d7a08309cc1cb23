"""The configuration of a rank: the plan and the settings that all ranks must have in common."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from zeroshard_core import Plan

Setting = str | int | float | bool | None


@dataclass(frozen=True)
class ShardingConfig:
    """The plan, and the settings that change which messages a rank sends.

    Attributes:
        plan: the plan of this rank.
        settings: named values that must be equal on all ranks, e.g. ``{"parameters_as_bucket_view": True}``.
        active: for each tensor, whether it is stepped now; empty if unknown.
    """

    plan: Plan
    settings: Mapping[str, Setting] = field(default_factory=dict)
    active: tuple[bool, ...] = ()

    @cached_property
    def digest(self) -> int:
        """63 bits of a SHA-256 of the configuration, for :meth:`~zeroshard_comm.Coordinator.agree`."""
        text = json.dumps([self.plan.fingerprint(), dict(self.settings), self.active], sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    def to_json(self) -> str:
        """Return the configuration as text, from which :meth:`from_json` makes an equal one."""
        return json.dumps({"plan": self.plan.to_json(), "settings": dict(self.settings), "active": list(self.active)})

    @classmethod
    def from_json(cls, text: str) -> ShardingConfig:
        """Make a configuration from the text of :meth:`to_json`. Raises ValueError if the text is damaged."""
        parts = json.loads(text)
        return cls(Plan.from_json(parts["plan"]), parts["settings"], tuple(parts["active"]))


def explain_configs(reference: str, other: str, reference_rank: int, other_rank: int) -> str | None:
    """Name the first difference between two configurations in JSON; return None if there is none."""
    if not reference or not other:
        return None
    here, there = ShardingConfig.from_json(reference), ShardingConfig.from_json(other)
    difference = here.plan.difference(there.plan)
    if difference is not None:
        difference = f"{difference} (here: rank {reference_rank}, there: rank {other_rank})"
    if here.plan.tensors != there.plan.tensors:
        return difference
    for name in dict.fromkeys([*here.settings, *there.settings]):
        left, right = here.settings.get(name), there.settings.get(name)
        if left != right:
            return f"{name} is {left!r} on rank {reference_rank} and {right!r} on rank {other_rank}"
    # Owners come after settings, because they may depend on them.
    if difference is not None:
        return difference
    for index, (left, right) in enumerate(zip(here.active, there.active, strict=False)):
        if left != right:
            yes, no = (reference_rank, other_rank) if left else (other_rank, reference_rank)
            return (
                f"tensor {index} {here.plan.tensors[index].name!r} is trainable or has a gradient on rank {yes}, but "
                f"is frozen on rank {no}"
            )
    return None
