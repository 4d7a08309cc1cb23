"""Names of torch's ``ZeroRedundancyOptimizer`` that are private there, and that other projects use all the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from zeroshard_core import Plan

from zeroshard.local_optimizer import sync_groups


class TorchNames:
    """What torch's class has besides its public names, for a class with ``plan`` and ``param_groups``."""

    if TYPE_CHECKING:
        param_groups: list[dict[str, Any]]

        @property
        def plan(self) -> Plan:
            """Who owns what."""

    @property
    def _param_to_rank(self) -> dict[torch.Tensor, int]:
        """Each parameter's owner; a cut parameter is listed with the owner of its first element."""
        return {param: self.plan.of_tensor(index)[0].rank for index, param in enumerate(self._all_params())}

    def _partition_parameters(self) -> list[list[dict[str, Any]]]:
        """Per rank, the public param groups narrowed to the parameters of which it owns something."""
        owners = {p: {shard.rank for shard in self.plan.of_tensor(i)} for i, p in enumerate(self._all_params())}
        return [
            [{**group, "params": [p for p in group["params"] if rank in owners[p]]} for group in self.param_groups]
            for rank in range(self.plan.world_size)
        ]

    @staticmethod
    def _sync_param_groups(
        src_param_groups: Sequence[Mapping[str, Any]], dst_param_groups: list[dict[str, Any]]
    ) -> None:
        """Copy every attribute but the members from one list of groups to another."""
        sync_groups(src_param_groups, dst_param_groups)

    def _clear_cache(self) -> None:
        """Do nothing: nothing is cached that could be stale."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # noqa: ANN401 - as in object
        """Refuse pickling and deep copies: a process group cannot be copied.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a ZeroRedundancyOptimizer cannot be pickled or deep-copied: it holds a process group and only this rank's "
            "share of the state. Save its state with consolidate_state_dict() and state_dict(), and load that into a "
            "new one"
        )

    def _all_params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]
