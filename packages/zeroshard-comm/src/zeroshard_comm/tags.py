"""Tags of one's own: messages of one tag and pair of ranks match in order, so who has an order of its own needs tags.

All tags of this project are ``0x5A530...``; the last two digits tell what a message is, the one before them whether it
is an answer. Whoever sends while others do adds an offset of its own to its tags.
"""

from __future__ import annotations

import weakref

import torch.distributed as dist

from zeroshard_comm.ranks import RankGroup

_SHIFT, _NUMBERS = 12, 1 << 16

_claimed: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def claim_tags(ranks: RankGroup) -> int:
    """Return an offset to tags that nobody else has been given on this group, in 65,535 calls.

    All ranks claim in the same order, and should compare what they were given before they use it.

    Args:
        ranks: the group.
    """
    number = _claimed[ranks.group] = _claimed.get(ranks.group, 0) % (_NUMBERS - 1) + 1
    return number << _SHIFT
