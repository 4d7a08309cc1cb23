"""What torch, communication hooks and other projects ask of the optimizer, besides what users call."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook
from torch.optim import Optimizer
from zeroshard_core import Plan

from zeroshard._torch_private import disable_dynamo
from zeroshard.joining import OptimizerJoinHook
from zeroshard.local_optimizer import sync_groups
from zeroshard.overlap.backward import BackwardFollower
from zeroshard.overlap.scheduler import StepMode
from zeroshard.sharded_optimizer import ShardedOptimizer


class OptimizerInterface:
    """What is asked of the optimizer besides what users call; private names are those of torch's class."""

    if TYPE_CHECKING:
        param_groups: list[dict[str, Any]]
        process_group: dist.ProcessGroup
        _sharded: ShardedOptimizer

        @property
        def plan(self) -> Plan:
            """Who owns what."""

    @staticmethod
    def profile_hook_step(func: Any) -> Any:  # noqa: ANN401 - as torch's
        """Wrap :meth:`step` as torch does, such that torch.compile calls it as it is."""
        return disable_dynamo(Optimizer.profile_hook_step(func))

    def join_hook(self, **kwargs: Any) -> JoinHook:  # noqa: ANN401 - shared by all joinables
        """Return the hook by which ``Join`` lets a rank without data take part in the others' steps.

        Training goes on as if such a rank contributed zero gradients; hyperparameters that the others change are
        brought along. With gradients that DistributedDataParallel reduces, its model comes first:
        ``Join([ddp, optimizer])``.

        Args:
            **kwargs: arguments for all joinables of the context. ``divide_by_initial_world_size=False`` averages
                gradients over the ranks that still have data, also with the hooks of ``zeroshard_integrations.ddp``.

        Raises:
            RuntimeError: if the optimizer is in a context of ``zeroshard_integrations.join`` already.
        """
        divide_by_running = not kwargs.get("divide_by_initial_world_size", True)
        return OptimizerJoinHook(weakref.ref(self), divide_by_running=divide_by_running)

    @property
    def join_device(self) -> torch.device:
        """The device on which ``Join`` counts the ranks that still run: that of the first parameter."""
        return self._sharded.sharding.params[0].device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The process group of this optimizer."""
        return self.process_group

    @property
    def takes_buckets(self) -> bool:
        """Whether gradients come bucket by bucket, from a communication hook."""
        return self._sharded.follower is not None

    @disable_dynamo
    def follow_backward(self, mode: StepMode) -> BackwardFollower:
        """Take gradients bucket by bucket from now on: for communication hooks. Collective, the first time.

        Args:
            mode: when shards are stepped.

        Raises:
            ValueError: if gradients are taken in another way already, or parameters cannot be exchanged in buckets.
        """
        return self._sharded.follow_backward(mode)

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
