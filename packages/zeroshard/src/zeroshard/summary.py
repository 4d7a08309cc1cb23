"""What a sharded optimizer says of itself in a few lines, on one rank alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zeroshard.sharding import Sharding


def summarize(sharding: Sharding, partition: str, *, has_state: bool) -> str:
    """Say which rank this is, what it owns, and how large its state is; the state of all ranks is predicted from that.

    Args:
        sharding: the plan at work.
        partition: the name of the strategy.
        has_state: whether the ranks have made a step, or loaded a state.
    """
    plan, local, ranks = sharding.layout.plan, sharding.local, sharding.control.ranks
    owned = {index: shard.shard.numel * shard.param.element_size() for index, shard in local.shards.items()}
    everything = sum(spec.nbytes for spec in plan.tensors)
    lines = [
        f"{type(local.optim).__name__}, rank {ranks.rank} of {ranks.world_size}, partition {partition!r}",
        f"parameters here: {len(owned)} of {len(plan.tensors)} tensors, {_size(sum(owned.values()))} of "
        f"{_size(everything)}",
    ]
    state = local.optim.state
    here = _nbytes(state)
    if not has_state and not here:
        lines.append("state: none before the first step")
    else:
        lines.append(f"state here: {_size(here)}")
        held = sum(owned[index] for index, shard in local.shards.items() if state.get(shard.tensor))
        if ranks.world_size > 1 and held:
            trained = sum(spec.nbytes for spec in plan.tensors if spec.trainable)
            lines.append(f"state on all ranks: about {_size(here / held * trained)}, predicted from that")
        elif ranks.world_size > 1:
            lines.append("state on all ranks: not known here")
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
