"""Which process groups this rank has begun to make, and which it is making now.

The function in which ranks meet to make a group is wrapped, in worker processes only. Beginnings are counted, since
ranks leave it one after the other, and one that has left it may have ended its test.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import distributed_c10d

from zeroshard_testing._torch_private import GROUP_CONSTRUCTOR, group_constructor
from zeroshard_testing.rank_state import Awaited, group_key


class GroupsBegun:
    """The process groups that this rank makes in a test. There is one of it in a worker; `record_groups` makes it."""

    def __init__(self) -> None:
        self.begun: Counter[str] = Counter()
        """How often each place in each group was taken here, as `RankState.begun`."""
        self.current: dict[int, Awaited] = {}
        """What each thread that is making a group waits for, by `threading.get_ident`."""
        self._made: Counter[str] = Counter()

    def forget(self) -> None:
        """Begin again, for another test. What a thread is still making counts for the last one."""
        self.begun = Counter()
        self._made = Counter()

    def make(self, call: Callable[[], Any], name: str, members: Sequence[int], place: int | None) -> Any:  # noqa: ANN401 - what torch returns
        """Make a group, on record from before it begins; a rank that is no member has no place in it."""
        __tracebackhide__ = True
        key = group_key(name, members)
        made = self._made
        self.begun[f"{key} {place}"] += 1
        self.current[threading.get_ident()] = Awaited("group", key, number=made[key])
        try:
            group = call()
        finally:
            del self.current[threading.get_ident()]
        # An attempt that has failed may have met nobody, so it does not count.
        made[key] += 1
        return group


def record_groups() -> GroupsBegun:
    """Wrap the function that makes groups, once in a process, and return the record that the wrapper keeps."""
    groups = GroupsBegun()
    try:
        make = group_constructor()
    except LookupError:
        # The probe has said so in the header of the run.
        return groups
    signature = inspect.signature(make)

    @functools.wraps(make)
    def make_on_record(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the wrapped function
        __tracebackhide__ = True
        given = signature.bind(*args, **kwargs).arguments
        # The default group's members are not named.
        members = given["global_ranks_in_group"] or range(given["group_size"])
        return groups.make(lambda: make(*args, **kwargs), given["group_name"], members, given["group_rank"])

    setattr(distributed_c10d, GROUP_CONSTRUCTOR, make_on_record)
    return groups
