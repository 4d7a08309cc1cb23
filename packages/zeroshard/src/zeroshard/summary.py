"""The ``repr()`` of a sharded optimizer, without communication."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zeroshard.sharding import Sharding
from zeroshard.state.metadata import StateMetadata


def summarize(sharding: Sharding, metadata: StateMetadata) -> str:
    """Describe which rank this is, what it owns, and how large its state and that of all ranks is.

    Args:
        sharding: the plan at work.
        metadata: tells what state other ranks have.
    """
    plan, local, ranks = sharding.layout.plan, sharding.local, sharding.control.ranks
    owned = {index: shard.shard.numel * shard.param.element_size() for index, shard in local.shards.items()}
    everything = sum(spec.nbytes for spec in plan.tensors)
    lines = [
        f"{type(local.optim).__name__}, rank {ranks.rank} of {ranks.world_size}, partition {sharding.policy.name!r}",
        f"parameters here: {len(owned)} of {len(plan.tensors)} tensors, {_size(sum(owned.values()))} of "
        f"{_size(everything)}",
    ]
    here = _nbytes(local.optim.state)
    everywhere = sum(_nbytes(metadata.placeholders(index)) for index in range(len(plan.tensors)))
    lines.append(f"state here: {_size(here)} of {_size(everywhere)}" if everywhere else "state: none yet")
    for number, group in enumerate(sharding.groups):
        rate = f", lr {group['lr']}" if "lr" in group else ""
        lines.append(f"group {number}: {len(group['params'])} tensors{rate}")
    return "\n  ".join(lines)


def _nbytes(value: object) -> int:
    """The bytes of all tensors in a state entry, or in all of them."""
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        value = value.coalesce()
        value = (value.indices(), value.values())
    if isinstance(value, torch.Tensor):
        return value.nbytes
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(_nbytes, parts))


def _size(nbytes: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"
