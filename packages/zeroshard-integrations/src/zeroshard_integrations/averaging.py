"""Model averaging: subgroups of ranks train by themselves, and every few steps their parameters are averaged.

Names and arguments are as in ``torch.distributed.algorithms.model_averaging``. State is sharded within a subgroup,
whose gradients are reduced in every step. An averager works *between* subgroups: its process group has one rank of each
of them, those with the same position. So all ranks of a subgroup average the same values.

All trainable parameters are averaged, with and without gradients on this rank, and written in place: one all-reduce for
each dtype and device. Frozen parameters, buffers of modules and optimizer state are not averaged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from zeroshard_comm import Coordinator, RankGroup, ShardingConfig, agreed, choose_private_group, peer_lost
from zeroshard_core import TensorSpec, partition

from zeroshard_integrations._torch_private import groups_here

__all__ = ["HierarchicalModelAverager", "PeriodicModelAverager", "PostLocalSGDOptimizer"]

_Bucket = tuple[torch.Tensor | None, list[torch.Tensor]]
"""A flat buffer and the parameters in it; or None, and parameters that are packed for the all-reduce."""

Params = Iterable[torch.Tensor] | Iterable[Mapping[str, Any]]
_AVERAGE = "average_parameters()"


class HierarchicalModelAverager(ModelAverager):
    """Average parameters over groups of several sizes, each every few steps, after a warm-up.

    As torch's class of that name, except that periods begin after the warm-up, as in :class:`PeriodicModelAverager`;
    torch's begin at step 0. All ranks of the process group must construct it. The algorithm is
    `hierarchical SGD <https://arxiv.org/abs/2010.12998>`_.

    Args:
        period_group_size_dict: for each period, the number of ranks that average then: consecutive ranks of the process
            group, each of another subgroup. A longer period has a larger group, which consists of the smaller ones;
            the longest has the whole process group. If several are due, only the largest group averages.
        warmup_steps: as for :class:`PeriodicModelAverager`.
        process_group: the ranks that average, over all levels: one of each subgroup. The default group if None.

    Attributes:
        step: how many steps were counted. It may be set when training is resumed.

    Raises:
        TypeError: if a number is no integer.
        ValueError: if the periods and sizes are no such hierarchy, or the number of warm-up steps is negative.
        DisagreementError, PeerLostError: if ranks pass different arguments, or one is gone.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        ranks = RankGroup.of(process_group)
        super().__init__(ranks.group)
        self.warmup_steps = warmup_steps
        self._coordinator = Coordinator(ranks)
        with agreed(self._coordinator, f"{type(self).__name__}()") as proposal:
            levels = _checked(period_group_size_dict, warmup_steps, ranks.world_size)
            settings: dict[str, str | int] = {"periods and group sizes": str(levels), "warmup_steps": warmup_steps}
            if len(levels) > 1:
                settings["number of process groups made so far"] = groups_here()
            proposal.set(ShardingConfig(partition([], 1), settings))
        self._levels = [(period, Coordinator(ranks.subgroup(size))) for period, size in reversed(levels.items())]

    def average_parameters(self, params: Params) -> None:
        """Average parameters between subgroups if that is due, and count the step. Collective if it is due.

        Call it once after every step of the optimizer. Averaging is due at step ``warmup_steps``, counted from 0, and
        after each further period.

        Args:
            params: the parameters of a model, or param groups of an optimizer; in the same order on every rank.

        Raises:
            TypeError, ValueError: if something is no parameter, or a sparse one.
            DisagreementError, PeerLostError: if ranks pass different parameters, or have made different numbers of
                steps, or one is gone. No parameter is changed and the step is not counted, unless one is gone.
        """
        self._average(params, ())

    def _average(self, params: Params, buffers: Sequence[torch.Tensor]) -> None:
        since = self.step - self.warmup_steps
        due = (coordinator for period, coordinator in self._levels if since >= 0 and since % period == 0)
        if (coordinator := next(due, None)) is not None:
            _average_over(coordinator, params, buffers, self.step)
        self.step += 1


class PeriodicModelAverager(HierarchicalModelAverager):
    """Average parameters over a process group every few steps, after a warm-up: a hierarchy of one level.

    As torch's class of that name. All ranks of the process group must construct it.

    Args:
        period: the number of steps from one average to the next.
        warmup_steps: steps before the first one after which parameters are averaged. Gradients should be reduced over
            all ranks meanwhile, as torch's ``post_localSGD_hook`` does until ``start_localSGD_iter``: the same number.
        process_group: the ranks that average: one of each subgroup. The default group if None.

    Raises:
        TypeError: if a number is no integer.
        ValueError: if the period is not positive, or the number of warm-up steps is negative.
        DisagreementError, PeerLostError: if ranks pass different arguments, or one is gone.
    """

    def __init__(self, period: int, warmup_steps: int = 0, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__({period: RankGroup.of(process_group).world_size}, warmup_steps, process_group)
        self.period = period


class PostLocalSGDOptimizer(Optimizer):
    """Step an optimizer, and average the parameters afterwards: `post-local SGD <https://arxiv.org/abs/1808.07217>`_.

    As torch's class of that name, for sharded and plain optimizers. Whatever is not listed here is the wrapped
    optimizer's, for example ``consolidate_state_dict``. All ranks of the averager's process group must construct it.

    Args:
        optim: a :class:`zeroshard.ZeroRedundancyOptimizer` over this rank's subgroup, or any other optimizer. If its
            parameters lie in flat buffers, these are averaged without a copy.
        averager: one of this module. Its process group has one rank of each subgroup.

    Attributes:
        optim, averager: as given.

    Raises:
        TypeError: if the averager is not one of this module.
        ValueError: if two ranks of the averager's process group share the state of one optimizer.
    """

    def __init__(self, optim: Optimizer, averager: HierarchicalModelAverager) -> None:
        if not isinstance(averager, HierarchicalModelAverager):
            raise TypeError(
                f"PostLocalSGDOptimizer takes an averager of zeroshard_integrations.averaging, and not a "
                f"{type(averager).__module__}.{type(averager).__name__}"
            )
        sharing = getattr(optim, "process_group", None)
        with agreed(averager._coordinator, "PostLocalSGDOptimizer()"):
            members = dist.get_process_group_ranks(sharing) if isinstance(sharing, dist.ProcessGroup) else ()
            averaging = dist.get_process_group_ranks(averager.process_group)
            both = [rank for rank in averaging if rank in members]
            if len(both) > 1:
                raise ValueError(
                    f"the averager works on the global ranks {averaging}, of which {both} share the state of one "
                    f"optimizer, so that their parameters are equal already: give the averager a process group with "
                    f"one rank of each optimizer, and the optimizer a subgroup, for example of the two "
                    f"dimensions of a torch.distributed.DeviceMesh"
                )
        self.optim, self.averager = optim, averager

    def step(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the wrapped optimizer's
        """Step the optimizer, and average the parameters if that is due. Collective, on all ranks of all subgroups.

        Args:
            *args: passed to the optimizer's step, for example a closure.
            **kwargs: the same.

        Returns:
            What the optimizer's step returned.

        Raises:
            Exception: what the optimizer's step, or :meth:`HierarchicalModelAverager.average_parameters`, raises.
        """
        result = self.optim.step(*args, **kwargs)
        self.averager._average(self.param_groups, getattr(self.optim, "buffers", ()))
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, and the averager's step as ``"step"``.

        Subgroups differ in parameters and state: consolidate and save these for each of them.
        """
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` of this class or of torch's has returned. Collective within a subgroup.

        Args:
            state_dict: of this subgroup, on every rank; not modified.

        Raises:
            ValueError: if there is no step in it.
            Exception: what the optimizer's ``load_state_dict`` raises. In every case nothing is loaded.
        """
        step = self.averager.step

        def take_step(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            nonlocal step
            step = given.get("step", -1)
            if not isinstance(step, int) or isinstance(step, bool) or step < 0:
                raise ValueError(
                    "the state dict has no 'step' of an averager, so PostLocalSGDOptimizer has not saved it: load it "
                    "into .optim, and set .averager.step if training is beyond the warm-up"
                )
            return {key: value for key, value in given.items() if key != "step"}

        # As a hook: a sharded optimizer raises its error on every rank.
        handle = self.optim.register_load_state_dict_pre_hook(take_step)
        try:
            self.optim.load_state_dict(state_dict)
        finally:
            handle.remove()
        self.averager.step = step

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register a hook of the wrapped optimizer, see its method."""
        return self.optim.register_step_pre_hook(hook)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the wrapped optimizer, see its method."""
        self.optim.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer, see its method."""
        self.optim.add_param_group(param_group)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups of the wrapped optimizer."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optim.param_groups = value

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.optim!r}"

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of the optimizer
        if name == "optim":
            # Its constructor has raised.
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a PostLocalSGDOptimizer cannot be pickled or copied: it holds process groups. Save its state_dict()"
        )


def _checked(sizes: Mapping[int, int] | None, warmup_steps: int, ranks: int) -> dict[int, int]:
    """Return the group size of each period, in rising order, if they are a hierarchy of groups."""
    for number in (warmup_steps, *(sizes or {}), *(sizes or {}).values()):
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"periods, group sizes and warmup_steps should be integers, but one is {number!r}")
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps should not be negative, but is {warmup_steps}")
    levels = dict(sorted((sizes or {}).items()))
    if not levels or min(levels) < 1:
        raise ValueError(f"a period should be 1 step or more, but there are {list(levels) or 'no periods'}")
    found = list(levels.values())
    if found[0] < 1 or found[-1] != ranks or any(small >= large or large % small for small, large in pairwise(found)):
        raise ValueError(
            f"by rising period the group sizes are {found}: each should be a multiple of the one before, and the last "
            f"one {ranks}, the number of ranks in the averager's process group"
        )
    return levels


def _average_over(coordinator: Coordinator, params: Params, buffers: Sequence[torch.Tensor], step: int) -> None:
    ranks = coordinator.ranks
    with agreed(coordinator, _AVERAGE) as proposal:
        found = _parameters(params)
        buckets = _buckets(found, buffers)
        # Plans of two subgroups may lay out buffers differently.
        places = [
            [len(members)] if flat is None else [(param.storage_offset(), param.stride()) for param in members]
            for flat, members in buckets
        ]
        settings = {"the averager's step": step, "the layout of its buckets": crc32(str(places).encode())}
        averaged = [TensorSpec("", tuple(p.shape), p.dtype, p.device.type) for p in found if p.requires_grad]
        proposal.set(ShardingConfig(partition(averaged, 1), settings))
    for flat, members in [] if coordinator.is_single_rank else buckets:
        with torch.no_grad():
            mean = flat if flat is not None else torch.cat([param.reshape(-1) for param in members])
            # Before the sum, which float16 may not hold.
            mean /= ranks.world_size
            try:
                dist.all_reduce(mean, group=choose_private_group(ranks, mean.device).group)
            except RuntimeError as failure:
                error = peer_lost(failure, None, ranks.rank, _AVERAGE)
                ranks.close(error)
                raise error from failure
            if flat is not None:
                # Autograd does not see what is written through a buffer.
                torch.autograd.graph.increment_version(members)
                continue
            for piece, param in zip(mean.split([param.numel() for param in members]), members, strict=True):
                param.copy_(piece.view(param.shape))


def _parameters(params: Params) -> list[torch.Tensor]:
    """The parameters of a model, or of param groups, each once."""
    if isinstance(params, (torch.Tensor, Mapping)):
        raise TypeError(f"{_AVERAGE} takes several parameters or param groups, and not one {type(params).__name__}")
    found: dict[torch.Tensor, None] = {}
    for item in params:
        for param in item["params"] if isinstance(item, Mapping) else [item]:
            if not isinstance(param, torch.Tensor):
                raise TypeError(f"{_AVERAGE} takes parameters or param groups, and not a {type(param).__name__}")
            if param.requires_grad and param.layout is not torch.strided:
                raise ValueError(f"a {param.layout} parameter of shape {tuple(param.shape)} cannot be averaged")
            found[param] = None
    return list(found)


def _buckets(params: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> list[_Bucket]:
    """What is averaged together: a flat buffer if all parameters in it are trainable; else a dtype and device."""
    by_storage: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for param in params if buffers else ():
        if param.layout is torch.strided:
            by_storage[param.untyped_storage().data_ptr()].append(param)
    found: list[_Bucket] = []
    for buffer in buffers:
        members = by_storage[buffer.untyped_storage().data_ptr()]
        if members and all(param.requires_grad for param in members):
            found.append((buffer, members))
    in_buffers = {param for _, members in found for param in members}
    packed: defaultdict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
    for param in params:
        if param.requires_grad and param not in in_buffers:
            packed[param.dtype, param.device].append(param)
    return [*found, *[(None, members) for members in packed.values()]]
