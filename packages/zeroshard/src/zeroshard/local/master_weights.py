"""Holds master weights, which the local optimizer steps: float32 copies of half-precision parameters on their owners.

A step converts gradients to float32, and writes the copies to parameters, rounded to their dtype, as in
`Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_. In checkpoints they are the entry ``"master_param"``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from zeroshard._torch_private import foreach_copy_
from zeroshard.local.extra_state import MASTER, ExtraEntries, Loaded
from zeroshard.local.shard import LocalShard


class MasterWeights(ExtraEntries):
    """Holds the master weights of this rank, which are tensors of the local optimizer. All ``shards`` have one.

    After a step a parameter always has its master's rounded values. If it has other values before the next step, for
    example because a model was loaded or averaged, the master adopts them.
    """

    names = (MASTER,)

    def __init__(self) -> None:
        self.shards: list[LocalShard] = []
        self._entries: dict[int, Mapping[str, torch.Tensor]] = {}

    def rebuild(self, shards: Sequence[LocalShard]) -> None:
        """Adopt this rank's shards, with or without a master."""
        self.shards = [shard for shard in shards if shard.is_master]
        self._entries = {shard.index: {MASTER: shard.tensor.detach()} for shard in self.shards}

    def entries(self, shard: LocalShard) -> Mapping[str, torch.Tensor]:
        """Return the master of a shard, if it has one."""
        return self._entries.get(shard.index, {})

    def load(self, loaded: Loaded) -> None:
        """Adopt loaded masters; a shard without one adopts its parameter's values."""
        with torch.no_grad():
            for shard in self.shards:
                shard.tensor.copy_(loaded.get(shard.index, {}).get(MASTER, shard.local_view))

    def refresh(self) -> None:
        """Adopt values that were written to parameters, where these differ from the rounded masters."""
        with torch.no_grad():
            for shard in self.shards:
                master, values = shard.tensor, shard.local_view
                rounded = master.to(values.dtype)
                if not values.is_cpu or not torch.equal(rounded, values):
                    torch.where(rounded == values, master, values, out=master)

    def round(self, shards: Collection[LocalShard] | None = None) -> None:
        """Write the masters of some shards, or of all, to their parameters."""
        chosen = self.shards if shards is None else [shard for shard in shards if shard.is_master]
        if chosen:
            with torch.no_grad():
                foreach_copy_([shard.local_view for shard in chosen], [shard.tensor for shard in chosen])

    def end_step(self, shards: Collection[LocalShard]) -> None:
        """Round the masters, and drop gradients that were converted."""
        self.round(shards)
        for shard in shards:
            if shard.is_master:
                shard.tensor.grad = None
