"""Rank arithmetic in one place: group ranks inside, global ranks only at torch's own door."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class RankGroup:
    """A process group as one of its ranks sees it.

    Attributes:
        group: torch's process group.
        rank: this process's rank in the group (group rank).
        world_size: number of ranks in the group.
    """

    group: dist.ProcessGroup
    rank: int
    world_size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> RankGroup:
        """Describe ``group``, or the default group.

        Raises:
            RuntimeError: if torch.distributed is not initialised, or this process is not in the group.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "torch.distributed is not initialised: call torch.distributed.init_process_group() first "
                "(a script started by torchrun needs only init_process_group('gloo') or ('nccl'))"
            )
        found = group if group is not None else dist.group.WORLD
        # torch answers -1 for a process that is outside, and hands such a process a marker in place of the group.
        if found is None or not isinstance(found, dist.ProcessGroup) or dist.get_rank(found) < 0:
            raise RuntimeError(f"global rank {dist.get_rank()} is not a member of the process group it was given")
        return cls(found, dist.get_rank(found), dist.get_world_size(found))

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks, starting behind this one, so that not all ranks turn to the same peer first."""
        return tuple((self.rank + step) % self.world_size for step in range(1, self.world_size))

    @property
    def global_rank(self) -> int:
        """This process's rank in the default group."""
        return self.to_global(self.rank)

    def to_global(self, rank: int) -> int:
        """Translate a group rank to a global rank."""
        return dist.get_global_rank(self.group, rank)

    def backend(self, device_type: str) -> str:
        """Name the backend that serves tensors of a device type, e.g. ``"gloo"``; ``""`` if none does."""
        by_device = {}
        for item in dist.get_backend_config(self.group).split(","):
            device, _, name = item.partition(":")
            by_device[device] = name
        if device_type in by_device:
            return by_device[device_type]
        # A group made for one backend by name answers with that name alone.
        named = str(dist.get_backend(self.group))
        return named if named == "fake" or not by_device else ""

    def moves_data(self) -> bool:
        """Tell whether collectives of this group really communicate; torch's ``fake`` backend does not."""
        return "fake" not in dist.get_backend_config(self.group) and str(dist.get_backend(self.group)) != "fake"

    def sends_tagged(self, device: torch.device) -> bool:
        """Tell whether tensors on ``device`` can be sent point to point with tags: gloo can, for CPU tensors."""
        return device.type == "cpu" and self.backend("cpu") == "gloo"
