"""The values that ranks compare before they send anything: the plan, and settings that change the messages."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch.distributed as dist
from zeroshard_core import Plan

from zeroshard_comm.agreement import Control, Explain
from zeroshard_comm.process_group import RankGroup

Setting = str | int | float | bool | None


@dataclass(frozen=True)
class ShardingConfig:
    """The plan, and the settings that change which messages a rank sends.

    Attributes:
        plan: the plan this rank holds.
        settings: named values that must be equal on all ranks, e.g. ``{"parameters_as_bucket_view": True}``.
        active: per tensor, whether it takes part now; empty if that is not said.
    """

    plan: Plan
    settings: Mapping[str, Setting] = field(default_factory=dict)
    active: tuple[bool, ...] = ()

    @cached_property
    def digest(self) -> int:
        """A 63-bit number, equal on two ranks if and (up to SHA-256 collisions cut to 63 bits) only if they agree."""
        text = json.dumps([self.plan.fingerprint(), dict(self.settings), self.active], sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    def to_json(self) -> str:
        """Write the configuration as text that :meth:`from_json` reads."""
        return json.dumps({"plan": self.plan.to_json(), "settings": dict(self.settings), "active": list(self.active)})

    @classmethod
    def from_json(cls, text: str) -> ShardingConfig:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: if the text is damaged.
        """
        parts = json.loads(text)
        return cls(Plan.from_json(parts["plan"]), parts["settings"], tuple(parts["active"]))


def agree(plan: Plan, group: dist.ProcessGroup | None = None, *, settings: Mapping[str, Setting] | None = None) -> None:
    """Make sure that every rank of ``group`` holds the same plan. Collective.

    Args:
        plan: this rank's plan.
        group: the process group, the default group if None.
        settings: further values that must be equal on all ranks.

    Raises:
        DisagreementError: on every rank, naming the first difference and the ranks that differ.
        PeerLostError: if a rank is gone.
    """
    check_config(Control(RankGroup.of(group)), "agree()", ShardingConfig(plan, settings or {}))


def check_config(
    control: Control,
    operation: str,
    config: ShardingConfig,
    *,
    error: Exception | None = None,
    once: Mapping[str, Setting] | None = None,
) -> None:
    """As :func:`agree`, over an existing control channel.

    Args:
        control: the channel.
        operation: what this rank is about to do.
        config: what it holds.
        error: its own failure, if it had one.
        once: settings of this call alone, which must be equal on all ranks too.

    Raises:
        DisagreementError: as :func:`agree`.
        PeerLostError: as :func:`agree`.
        Exception: if a rank reported an error: that error, on every rank.
    """
    settings = once or {}

    def detail() -> str:
        return replace(config, settings={**config.settings, **settings}).to_json()

    # Not by replacing: the digest of a plan takes a while, and is kept.
    digest = config.digest ^ zlib.crc32(json.dumps(dict(settings), sort_keys=True).encode())
    control.agree(operation, digest, error=error, detail=detail, explain=explain_configs)


@dataclass
class Proposal:
    """This rank's contribution to the agreement at the end of a block of :func:`agreed`; initially none.

    Attributes:
        digest: a 63-bit number that is equal on ranks that agree.
        detail: called only after a difference: the text behind the digest.
        flag: sets ``flagged`` of the channel on every rank.
    """

    digest: int = 0
    detail: Callable[[], str] = str
    flag: bool = False

    def set(self, config: ShardingConfig) -> None:
        """Propose a configuration."""
        self.digest, self.detail = config.digest, config.to_json


@contextmanager
def agreed(control: Control, operation: str, explain: Explain | None = None) -> Iterator[Proposal]:
    """Run a block, and then raise on every rank if it failed on one, or if ranks differ. Collective.

    Args:
        control: the channel.
        operation: what this rank is about to do.
        explain: names a difference of two details, see :meth:`Control.agree`; of configurations if None.

    Yields:
        The contribution, for the block to set.

    Raises:
        DisagreementError: as :func:`agree`.
        PeerLostError: as :func:`agree`.
        Exception: an error of the block on some rank, on every rank.
    """
    proposal, failure = Proposal(), None
    try:
        yield proposal
    except Exception as error:  # noqa: BLE001 - every rank must hear of it, whatever it is
        failure = error
    control.agree(
        operation,
        proposal.digest,
        error=failure,
        detail=proposal.detail,
        explain=explain or explain_configs,
        flag=proposal.flag,
    )


def explain_configs(reference: str, other: str, reference_rank: int, other_rank: int) -> str | None:
    """Name the first difference between two configurations, given as JSON; None if there is none."""
    if not reference or not other:
        return None
    here, there = ShardingConfig.from_json(reference), ShardingConfig.from_json(other)
    difference = here.plan.difference(there.plan)
    if difference is not None:
        return f"{difference} (here: rank {reference_rank}, there: rank {other_rank})"
    for name in dict.fromkeys([*here.settings, *there.settings]):
        left, right = here.settings.get(name), there.settings.get(name)
        if left != right:
            return f"{name} is {left!r} on rank {reference_rank} and {right!r} on rank {other_rank}"
    for index, (left, right) in enumerate(zip(here.active, there.active, strict=False)):
        if left != right:
            yes, no = (reference_rank, other_rank) if left else (other_rank, reference_rank)
            return (
                f"tensor {index} {here.plan.tensors[index].name!r} is trainable or has a gradient on rank {yes}, but "
                f"is frozen on rank {no}"
            )
    return None
