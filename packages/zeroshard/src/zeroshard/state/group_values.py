"""Sends the values that a step writes into a param group to ranks that own no shard of the group.

Many optimizer classes count steps in param groups, but skip groups without parameters.
"""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import suppress

import torch
from zeroshard_comm import Coordinator, all_gather_text
from zeroshard_core import StateMapError

from zeroshard.changes import Changes
from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.plan.groups import ParamGroup, set_hyperparameter
from zeroshard.plan.layout import owners_of_groups
from zeroshard.state.serialization import read_value, write_value


class GroupValues:
    """Sets the groups of which this rank owns no shard to the values of the lowest rank that owns one.

    Attributes:
        plan: the plan of the last :meth:`follow_plan`.
        are_needed: whether any rank owns no shard of some group; equal on all ranks.
    """

    def __init__(self, coordinator: Coordinator, local: LocalOptimizer, changes: Changes) -> None:
        self._coordinator, self._local, self._changes = coordinator, local, changes
        self._before: dict[int, ParamGroup] = {}
        self._written: list[tuple[int, str]] = []
        self.follow_plan()

    def follow_plan(self) -> None:
        """Find the groups whose values this rank sends and receives. Call it after all ranks have adopted a plan."""
        self.plan, rank = self._local.plan, self._coordinator.ranks.rank
        owners = {} if self._coordinator.is_single_rank else owners_of_groups(self.plan)
        scarce = {number: ranks for number, ranks in owners.items() if len(ranks) < self.plan.world_size}
        self._sent = [number for number, ranks in scarce.items() if min(ranks) == rank]
        self._received = [number for number, ranks in scarce.items() if rank not in ranks]
        self.are_needed = bool(scarce)

    def begin_step(self) -> None:
        """Record the groups of which this rank owns no shard, before a step."""
        self._before = {number: dict(self._local.groups[number]) for number in self._received}

    def have_changed(self) -> bool:
        """Return True if a step wrote values that this rank has to send."""
        self._written = self._changes.written_in(self._sent)
        return bool(self._written)

    def end_step(self, *, is_shared: bool, has_new_state: bool) -> bool:
        """Set the groups of which this rank owns no shard. Return True if any rank has new state.

        Collective if ``is_shared``, which means that at least one rank has new state or values to send.
        """
        texts = [json.dumps([has_new_state, [(*where, self._describe(*where)) for where in self._written]])]
        if is_shared:
            texts = all_gather_text(self._coordinator, texts[0], "the values of param groups after step()")
        states, values = zip(*map(json.loads, texts), strict=True)
        arrived = defaultdict[int, dict[str, str | None]](dict)
        for number, key, text in [item for of_rank in values for item in of_rank]:
            arrived[number][key] = text
        written, self._before = self._before, {}
        for number, before in written.items():
            group, new = self._local.groups[number], arrived[number]
            # If a value cannot be sent, this rank keeps the value that its own class wrote.
            kept = {key: group[key] for key, text in new.items() if text == "" and key in group}
            group.clear()
            group.update({**before, **kept})
            for key, text in new.items():
                if text is None:
                    group.pop(key, None)
                elif text:
                    set_hyperparameter(group, key, _read(text, self._local.params[0].device))
        return any(states)

    def _describe(self, number: int, key: str) -> str | None:
        """Return a value, tensors included, as JSON; ``""`` if it cannot be sent, None if it was removed."""
        tensors: list[torch.Tensor] = []
        if key not in self._local.groups[number]:
            return None
        value = self._local.groups[number][key]
        if hasattr(value, "tolist") and not isinstance(value, torch.Tensor):
            # NumPy's scalars and arrays become numbers and lists.
            value = value.tolist()
        with suppress(StateMapError, TypeError):
            described = write_value(value, tensors, key)
            return json.dumps([described, [tensor.tolist() for tensor in tensors]])
        return ""


def _read(text: str, device: torch.device) -> object:
    described, numbers = json.loads(text)
    rest = iter(numbers)
    return read_value(
        described,
        lambda dtype, shape, _, kind: torch.tensor(
            next(rest), dtype=dtype, device=device if kind == device.type else "cpu"
        ).view(tuple(shape)),
    )
