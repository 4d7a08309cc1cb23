"""Process groups of our own beside the user's: same ranks, same timeout, one for each purpose.

Two issuers on one group mix data in silence, so what must not meet the user's collectives has a group of its own.
"""

from __future__ import annotations

import weakref

import torch.distributed as dist

from zeroshard_comm._torch_private import timeout_of
from zeroshard_comm.ranks import RankGroup

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, str], RankGroup]] = weakref.WeakKeyDictionary()


def own_group(ranks: RankGroup, backend: str, purpose: str) -> RankGroup:
    """Return a group of the same ranks, made once per process group and purpose. Collective among these ranks alone.

    Args:
        ranks: the group whose ranks are to be in it.
        backend: of the new group, such as ``"nccl"``.
        purpose: what it is for; groups for different purposes never meet.

    Raises:
        ValueError: if torch would need ranks outside of the group for it.
    """
    made = _made.setdefault(ranks.group, {})
    if (backend, purpose) not in made:
        members = dist.get_process_group_ranks(ranks.group)
        _refuse_split(members, backend)
        group = dist.new_group(
            members, timeout=timeout_of(ranks.group), backend=backend, use_local_synchronization=True
        )
        made[backend, purpose] = RankGroup.of(group)
    return made[backend, purpose]


def _refuse_split(members: list[int], backend: str) -> None:
    """Raise where NCCL would split the default group, in which all its ranks must take part."""
    default = dist.group.WORLD
    if backend == "nccl" and default is not None and default.bound_device_id and len(members) < default.size():
        raise ValueError(
            f"a group of its own beside that of the ranks {members} cannot be made while the default process group is "
            f"bound to a device: leave out device_id in init_process_group(), or use the default group"
        )
