"""Steps some shards of a local optimizer, for communication hooks that step bucket by bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zeroshard.local.optimizer import LocalOptimizer, unwrapped_step
from zeroshard.local.shard import LocalShard
from zeroshard.plan.groups import ParamGroup


class PartialStepper:
    """Steps some shards of a local optimizer, on copies that share its state and have only these in their groups."""

    def __init__(self, local: LocalOptimizer, shards: Sequence[LocalShard]) -> None:
        self._local, self._shards = local, shards
        chosen = {shard.tensor for shard in shards}
        self._groups: list[tuple[int, ParamGroup]] = []
        for number, group in enumerate(local.local_groups):
            places = [place for place, tensor in enumerate(group["params"]) if tensor in chosen]
            if places:
                self._groups.append((number, {key: [group[key][place] for place in places] for key in group}))
        # Uninitialized copies, which get the attributes of their inner optimizers in each step.
        stepped = sorted({local.assignment[number] for number, _ in self._groups})
        self._copies = {number: object.__new__(type(local.members[number])) for number in stepped}

    def step(self, arguments: Mapping[str, Any]) -> None:
        """Step the shards that have a gradient, with the hyperparameters that the param groups have now."""
        local = self._local
        for number, copied in self._copies.items():
            attributes = vars(local.members[number]).items()
            # Methods that show shards belong to the inner optimizer, and not to a copy.
            vars(copied).update({key: value for key, value in attributes if key not in local.shown_methods})
            own = [(public, narrowed) for public, narrowed in self._groups if local.assignment[public] == number]
            copied.param_groups = [{**local.groups[public], **narrowed} for public, narrowed in own]
        if not self._copies:
            return
        # Grad mode is per thread: the worker thread would record a graph.
        with torch.no_grad(), local.keeping_extra(self._shards):
            for number, copied in self._copies.items():
                unwrapped_step(type(local.members[number]))(copied, **arguments)
