"""Attributes and methods of the optimizer that users, torch, communication hooks and other projects read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from zeroshard_comm import Traffic
from zeroshard_core import Plan

from zeroshard._torch_private import disable_dynamo
from zeroshard.debug.describe import OptimizerDescription
from zeroshard.grads.exchange import BackwardFollower
from zeroshard.grads.scheduler import StepMode
from zeroshard.local.optimizer import sync_groups
from zeroshard.sharded_optimizer import ShardedOptimizer


class OptimizerInterface:
    """Attributes of the optimizer and methods for other projects; private names are those of torch's class."""

    if TYPE_CHECKING:
        process_group: dist.ProcessGroup
        _sharded: ShardedOptimizer

    @property
    def optim(self) -> Optimizer:
        """The local optimizer, over this rank's shards."""
        return self._sharded.sharding.local.optim

    @property
    def plan(self) -> Plan:
        """Who owns what."""
        return self._sharded.sharding.layout.plan

    @property
    def traffic(self) -> Traffic:
        """Bytes, calls and waiting so far."""
        return self._sharded.traffic

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """The flat buffers that parameters are views of, 1-D; elements between them are padding."""
        return self._sharded.sharding.sync.buffers

    def describe(self) -> OptimizerDescription:
        """Return who owns what, the buckets of a communication hook, and what was sent so far. Not collective.

        ``print()`` it, or ``rich.print()`` it as tables; ``dataclasses.asdict()`` makes a dict of it.
        """
        return self._sharded.describe()

    @property
    def state(self) -> MutableMapping[Any, Any]:
        """The state of all parameters that have some.

        For this rank's shards these are the local optimizer's own dicts, not copies; a part has the shape of its rows.
        For the rest they are placeholders, which have a shape; reading them raises an error.
        """
        # There is none yet while torch's constructor runs.
        return self._sharded.state if hasattr(self, "_sharded") else defaultdict(dict)

    @state.setter
    def state(self, value: MutableMapping[Any, Any]) -> None:
        if hasattr(self, "_sharded"):
            self._sharded.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups. Stored in ``_sharded``, because wrappers copy this object's attributes."""
        # It does not exist yet while torch's constructor runs.
        found: list[dict[str, Any]] = (
            self._sharded.sharding.groups if hasattr(self, "_sharded") else vars(self)["param_groups"]
        )
        return found

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        if hasattr(self, "_sharded"):
            self._sharded.sharding.groups = value
        else:
            vars(self)["param_groups"] = value

    @staticmethod
    def profile_hook_step(func: Any) -> Any:  # noqa: ANN401 - as torch's
        """Wrap :meth:`step` as torch does, so that torch.compile does not trace it."""
        return disable_dynamo(Optimizer.profile_hook_step(func))

    def join_hook(self, **kwargs: Any) -> NoReturn:  # noqa: ANN401, ARG002 - shared by all joinables
        """Refuse torch's ``Join``; the one of ``zeroshard_integrations.join`` does not call this.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "torch's Join does not support zeroshard's optimizer: use zeroshard_integrations.join.Join, which takes "
            "the same arguments"
        )

    @property
    def join_device(self) -> torch.device:
        """The device on which ``Join`` counts the ranks that still run: that of the first parameter."""
        return self._sharded.sharding.params[0].device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The process group of this optimizer."""
        return self.process_group

    @property
    def train(self) -> Callable[[], Any]:
        """Call the local optimizer's ``train()``, which schedule-free optimizers have. Collective.

        Parameters that it changes are sent to all ranks. A second call in a row sends none, unless it has changed
        parameters or param groups again; changes that a second call makes only through ``.data`` are not noticed.

        Raises:
            AttributeError: when looked up, if the local optimizer's class has no such method.
            DisagreementError, PeerLostError: if ranks call different methods, or one is gone.
            Exception: what any rank's optimizer raises, on every rank; replicas are equal then.
        """
        return self._sharded.train_or_eval("train")

    @property
    def eval(self) -> Callable[[], Any]:
        """Call the local optimizer's ``eval()``; see :attr:`train`. Collective."""
        return self._sharded.train_or_eval("eval")

    @property
    def takes_buckets(self) -> bool:
        """Whether gradients come bucket by bucket, from a communication hook."""
        return self._sharded.follower is not None

    @disable_dynamo
    def follow_backward(
        self,
        mode: StepMode,
        names: Mapping[torch.Tensor, str] = MappingProxyType({}),
        *,
        norms: bool | Sequence[float] = True,
    ) -> BackwardFollower:
        """Take gradients bucket by bucket from now on: for communication hooks. Collective, the first time.

        Args:
            mode: when shards are stepped.
            names: the model's names, for errors about parameters without names; the same on all ranks.
            norms: which norms of all gradients every rank learns at the end of each backward, so that torch's
                functions for clipping work: True for order 2, False for none, or a tuple of 2, ``math.inf`` or both.
                The first call decides; there are none if shards are stepped during it.

        Raises:
            ValueError: if gradients are taken in another way already, parameters cannot be exchanged in buckets, or
                norms of other orders are asked for.
        """
        return self._sharded.follow_backward(mode, names, norms=norms)

    @property
    def _param_to_rank(self) -> dict[torch.Tensor, int]:
        """Each parameter's owner; a cut parameter is listed with the owner of its first element."""
        return {param: self.plan.of_tensor(index)[0].rank for index, param in enumerate(self._all_params())}

    def _partition_parameters(self) -> list[list[dict[str, Any]]]:
        """Per rank, the public param groups with only the parameters of which it owns something."""
        owners = {p: {shard.rank for shard in self.plan.of_tensor(i)} for i, p in enumerate(self._all_params())}
        return [
            [{**group, "params": [p for p in group["params"] if rank in owners[p]]} for group in self.param_groups]
            for rank in range(self.plan.world_size)
        ]

    @staticmethod
    def _sync_param_groups(
        src_param_groups: Sequence[Mapping[str, Any]], dst_param_groups: list[dict[str, Any]]
    ) -> None:
        """Copy every attribute except the members from one list of groups to another."""
        sync_groups(src_param_groups, dst_param_groups)

    def _clear_cache(self) -> None:
        """Do nothing: nothing is cached that could be stale."""

    def __repr__(self) -> str:
        if not hasattr(self, "_sharded"):
            # Its constructor has raised.
            return object.__repr__(self)
        return f"{type(self).__name__} of {self._sharded.describe().summary}"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # noqa: ANN401 - as in object
        """Refuse pickling and deep copies: a process group cannot be copied.

        Raises:
            TypeError: always.
        """
        advice = (
            ". Copying a DistributedDataParallel model copies the state of its communication hook, this optimizer: "
            "copy the module instead, as in AveragedModel(ddp.module)"
        )
        raise TypeError(
            "a ZeroRedundancyOptimizer cannot be pickled or deep-copied: it holds a process group and only this rank's "
            "share of the state. Save its state with consolidate_state_dict() and state_dict(), and load that into a "
            "new one" + (advice if self.takes_buckets else "")
        )

    def _all_params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]
