"""Runs one entered Join context on a rank: announces its calls, and makes other ranks' calls after its data ends."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard.join import Call, JoinCall, JoinRound, JoinState, exchange_calls, fail
from zeroshard_comm import Coordinator, DisagreementError, RankGroup, agreed

from zeroshard_integrations._torch_private import JoinConfig, has_comm_hook, join_config, set_join_config
from zeroshard_integrations.join.ddp_model import DDPModel

_TORCH_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"  # importing it warns


class JoinContext:
    """Holds the state of an entered context, for the thread that trains. Has :class:`Join`'s arguments and errors."""

    def __init__(self, joinables: Sequence[Joinable], *, throws: bool, arguments: Mapping[str, Any]) -> None:
        self._joinables, self._throws = joinables, throws
        self._hooks: dict[int, JoinHook] = {}
        self._model: DDPModel | None = None
        self._optimizer: JoinState | None = None
        ranks = check_joinables(joinables)
        self._coordinator = Coordinator(ranks)
        self.join_round = JoinRound(JoinCall(Call.NOTIFY), tuple(range(ranks.world_size)))
        self._has_run_out = self._is_reported = False
        settings = {"throw_on_early_termination": throws, **arguments}
        labels = ", ".join([f"{name}={_label(value)}" for name, value in sorted(settings.items())])
        entered = f"Join([{', '.join([type(joinable).__name__ for joinable in joinables])}], {labels})"
        explain = "rank {2} has entered {0}, and rank {3} {1}".format
        try:
            with agreed(self._coordinator, "the beginning of Join", explain) as proposal:
                proposal.digest, proposal.detail = zlib.crc32(entered.encode()), lambda: entered
                for place, joinable in enumerate(joinables, 1):
                    self._attach(place, joinable, arguments)
        except BaseException:
            self.reset()
            raise

    def _attach(self, place: int, joinable: Joinable, arguments: Mapping[str, Any]) -> None:
        """Let a joinable announce its calls in this context."""
        notify: Callable[[], object] = partial(self._announce, JoinCall(Call.NOTIFY, place))
        enable = True
        if isinstance(joinable, ZeroRedundancyOptimizer):
            notify, self._optimizer = lambda: None, joinable.join_state
            self._optimizer.context = lambda call: self._announce(JoinCall(call))
        else:
            self._hooks[place] = joinable.join_hook(**arguments)
        if isinstance(joinable, DistributedDataParallel):
            divides_by_running = not arguments.get("divide_by_initial_world_size", True)
            self._model = DDPModel(joinable, self._begin_backward, divides_by_running=divides_by_running)
            notify = partial(self._begin_forward, self._model)
            # DDP itself must know which ranks still have data only if it broadcasts module buffers.
            enable = len(joinable.modules_buffers) > 0
        config = JoinableConfig(enable=enable, throw_on_early_termination=False, is_first_joinable=False)
        config.notify = notify
        set_join_config(joinable, config)

    def reset(self) -> None:
        """Remove all joinables from the context, also after an error."""
        if self._model is not None:
            self._model.detach()
        if self._optimizer is not None:
            self._optimizer.context = None
        for joinable in self._joinables:
            set_join_config(joinable, None)
        self._model, self._optimizer, self._hooks = None, None, {}

    def report_error(self, error: Exception) -> None:
        """Report an error to the other ranks at their next call, unless they know it or wait inside a backward."""
        # All ranks raise a disagreement.
        is_known = self._is_reported or isinstance(error, DisagreementError)
        if not is_known and not (self._model is not None and self._model.in_backward):
            self._is_reported = True
            fail(self._coordinator, error)

    def _announce(self, mine: JoinCall, error: Exception | None = None) -> JoinRound:
        """Announce a call of this rank, or that it has run out of data; return the announcements of all ranks."""
        if self._is_reported:
            raise RuntimeError(
                "this Join block has ended with an error on every rank: leave it, and do not catch errors inside of it"
            )
        if self._has_run_out and mine.call not in (Call.JOINED, Call.UNABLE):
            return self.join_round
        # An error from here on is known to every rank.
        self._is_reported = True
        self.join_round = join_round = exchange_calls(self._coordinator, mine, error)
        if self._throws and join_round.joined and join_round.running:
            raise RuntimeError(
                f"rank {join_round.joined[0]} has run out of data, and throw_on_early_termination is set: every rank "
                f"raises this error. Catch it around the block to stop training, or leave the setting out to continue"
            )
        self._is_reported = False
        return join_round

    def _begin_forward(self, model: DDPModel) -> None:
        model.check_forward()
        with_grad = torch.is_grad_enabled()
        self._announce(JoinCall(Call.FORWARD if with_grad else Call.FORWARD_WITHOUT_GRADIENTS))
        if with_grad and not self._has_run_out:
            model.begin_forward()

    def _begin_backward(self, model: DDPModel) -> int:
        """Announce a backward, and return the number of ranks that still have data. Collective."""
        join_round = self._announce(JoinCall(Call.BACKWARD))
        if join_round.joined:
            self._is_reported = True
            model.exchange_gradients(self._coordinator, join_round.running, join_round.joined)
            self._is_reported = False
        return len(join_round.running)

    def shadow_others(self) -> None:
        """Make the other ranks' calls until all have left their loops; raise what they raise. Collective."""
        error = self._model.shadow_error() if self._model is not None else None
        mine = JoinCall(Call.JOINED if error is None else Call.UNABLE)
        before, self._has_run_out = self.join_round.joined, True
        while (join_round := self._announce(mine, error)).running:
            before = join_round.joined
            self._shadow_call(join_round)
        last = [rank for rank in join_round.joined if rank not in before]
        # From here on, every rank knows of an error, except one that a hook raises on this rank only.
        self._is_reported = True
        if before and self._model is not None:
            self._model.exchange_gradients(self._coordinator, last, before)
        for hook in self._hooks.values():
            hook.post_hook(self._coordinator.ranks.rank in last)

    def _shadow_call(self, join_round: JoinRound) -> None:
        made, model, optimizer = join_round.made, self._model, self._optimizer
        if made.call is Call.NOTIFY:
            self._hooks[made.place].main_hook()
        elif made.call in (Call.FORWARD, Call.FORWARD_WITHOUT_GRADIENTS):
            assert model is not None
            model.shadow_forward(with_grad=made.call is Call.FORWARD)
        elif made.call is Call.BACKWARD:
            assert model is not None
            # An error cannot be reported: all ranks know it, or the others are in their backward.
            self._is_reported = True
            model.exchange_gradients(self._coordinator, join_round.running, join_round.joined)
            model.shadow_backward()
            self._is_reported = False
        else:
            assert optimizer is not None
            optimizer.shadow_call(join_round)


class JoinableConfig(JoinConfig):
    """The ``_join_config`` of a joinable inside a zeroshard context. torch reads it before each call."""

    notify: Callable[[], object]

    @property
    def is_first_joinable(self) -> bool:
        """Notify the context of a call, because only ``notify_join_context`` reads this."""
        self.notify()
        return False

    def __reduce__(self) -> tuple[Callable[[], JoinConfig], tuple[()]]:
        """Copy and pickle as the config outside of any context, because a copied model is in none."""
        return JoinConfig.construct_disabled_join_config, ()


def _label(value: object) -> str:
    """Return text for a setting that is equal on all ranks."""
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def check_joinables(joinables: Sequence[Joinable]) -> RankGroup:
    """Return the ranks of a context's joinables; raise the errors of :class:`Join` if joinables are invalid."""
    if not joinables:
        raise ValueError("Join needs at least one joinable, such as a model in DistributedDataParallel")
    for place, joinable in enumerate(joinables):
        _check_joinable(joinable)
        name = type(joinable).__name__
        if any(joinable is other for other in joinables[:place]):
            raise ValueError(f"Join expects different joinables, but got the same {name} twice")
        if joinable.join_process_group != joinables[0].join_process_group:
            groups = [dist.get_process_group_ranks(each.join_process_group) for each in (joinables[0], joinable)]
            raise ValueError(
                f"{type(joinables[0]).__name__} has a process group of the ranks {groups[0]}, but {name} has one of "
                f"{groups[1]}: all joinables of a Join block must have the same process group"
            )
    models = [each for each in joinables if isinstance(each, DistributedDataParallel)]
    optimizers = [each for each in joinables if isinstance(each, ZeroRedundancyOptimizer)]
    if len(models) > 1 or len(optimizers) > 1:
        raise ValueError(
            f"Join expects one model in DistributedDataParallel and one sharded optimizer, but got {len(models)} and "
            f"{len(optimizers)}: put several models into one module, and use one optimizer with a class per param group"
        )
    if any(map(has_comm_hook, models)) or any(optimizer.takes_buckets for optimizer in optimizers):
        raise ValueError(
            "the model or the optimizer has a communication hook, which ranks without data cannot run in Join. With "
            "uneven data leave the hook out"
        )
    if models and optimizers and list(joinables).index(optimizers[0]) < list(joinables).index(models[0]):
        own = {param for group in optimizers[0].param_groups for param in group["params"]}
        if not own.isdisjoint(models[0].parameters()):
            raise ValueError("the optimizer comes before its model in Join: write Join([ddp, optimizer])")
    return RankGroup.of(joinables[0].join_process_group)


def _check_joinable(joinable: Joinable) -> None:
    name = type(joinable).__name__
    if not isinstance(joinable, Joinable):
        raise TypeError(f"Join expects Joinable objects, but got {name}")
    if any(kind.__module__ == _TORCH_ZERO for kind in type(joinable).__mro__):
        raise ValueError(
            "torch's ZeroRedundancyOptimizer steps with old gradients on a rank that has run out of data: use "
            "zeroshard.ZeroRedundancyOptimizer"
        )
    if isinstance(join_config(joinable), JoinableConfig):
        raise RuntimeError(
            f"this {name} is already in a Join block, and blocks cannot be nested: put all joinables in one block"
        )
