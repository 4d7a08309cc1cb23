"""One Join context that was entered, on one rank: what it announces, and what it does when it has run out of data."""

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
from zeroshard.join import Call, JoinCall, JoinRound, JoinState, exchange_calls, fail, receive_value, send_value
from zeroshard_comm import Coordinator, DisagreementError, RankGroup, agreed

from zeroshard_integrations._torch_private import JoinConfig, divide_by, join_config, set_join_config
from zeroshard_integrations.ddp import optimizers_of_hooks
from zeroshard_integrations.join.ddp_model import DDPModel

_TORCH_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"  # importing it warns


class JoinContext:
    """The state of a context that is entered, for the thread that trains; arguments and errors as :class:`Join`'s."""

    def __init__(self, joinables: Sequence[Joinable], *, throws: bool, arguments: Mapping[str, Any]) -> None:
        self._joinables, self._throws, self._arguments = joinables, throws, arguments
        self._divides_by_running = not arguments.get("divide_by_initial_world_size", True)
        self._hooks: dict[int, JoinHook] = {}
        self._models: dict[int, DDPModel] = {}
        self._optimizers: dict[int, JoinState] = {}
        ranks = check_joinables(joinables)
        self._rank, self._coordinator = ranks.rank, Coordinator(ranks)
        self.join_round = JoinRound(JoinCall(Call.NOTIFY), tuple(range(ranks.world_size)), ())
        self._has_run_out = self._is_reported = False
        settings = {"throw_on_early_termination": throws, **arguments}
        labels = ", ".join([f"{name}={_label(value)}" for name, value in sorted(settings.items())])
        entered = f"Join([{', '.join([type(joinable).__name__ for joinable in joinables])}], {labels})"
        explain = "rank {2} has entered {0}, and rank {3} {1}".format
        try:
            with agreed(self._coordinator, "entering Join", explain) as proposal:
                proposal.digest, proposal.detail = zlib.crc32(entered.encode()), lambda: entered
                for place, joinable in enumerate(joinables, 1):
                    self._take_in(place, joinable)
        except BaseException:
            self.reset()
            raise

    def _take_in(self, place: int, joinable: Joinable) -> None:
        notify: Callable[[], object] = partial(self._call, JoinCall(Call.NOTIFY, place))
        enable = True
        if isinstance(joinable, ZeroRedundancyOptimizer):
            joining, notify = joinable.join_state, lambda: None
            self._optimizers[place] = joining
            joining.context = partial(self._optimizer_calls, place)
        else:
            self._hooks[place] = joinable.join_hook(**self._arguments)
        if isinstance(joinable, DistributedDataParallel):
            hooked = optimizers_of_hooks(joinable)
            if len(hooked) > 1:
                raise ValueError(
                    "Join does not follow one hook for several optimizers, which may step at different times: give the "
                    "parameters to one optimizer, or train without a communication hook"
                )
            divides = self._divides_by_running and not hooked
            model = DDPModel(joinable, takes_buckets=bool(hooked), divides_by_running=divides)
            self._models[place], notify = model, partial(self._forward_begins, place, model)
            model.begins = partial(self._backward_begins, place)
            # Only to send module buffers around must DDP itself know who still has data.
            enable = len(joinable.modules_buffers) > 0
        config = JoinableConfig(enable=enable, throw_on_early_termination=False, is_first_joinable=False)
        config.notify = notify
        set_join_config(joinable, config)

    def reset(self) -> None:
        """Take all joinables out of the context; also after an error."""
        for model in self._models.values():
            model.leave()
        for optimizer in self._optimizers.values():
            optimizer.leave()
        for joinable in self._joinables:
            set_join_config(joinable, None)
        self._models, self._optimizers, self._hooks = {}, {}, {}

    def report_error(self, error: Exception) -> None:
        """Tell the others of an error at their next call, unless they know it or wait inside a backward."""
        # All ranks raise a disagreement.
        is_known = self._is_reported or isinstance(error, DisagreementError)
        if not is_known and not any(model.in_backward for model in self._models.values()):
            self._is_reported = True
            fail(self._coordinator, error)

    def _call(self, mine: JoinCall, error: Exception | None = None) -> JoinRound:
        """Announce a call of this rank, or that it has run out; and hear of the others'."""
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
                f"rank {join_round.joined[0]} has run out of data, and throw_on_early_termination is set: an error on "
                f"every rank. Catch it around the block to stop training here, or leave the setting out to go on"
            )
        self._is_reported = False
        return join_round

    def _optimizer_calls(self, place: int, call: Call) -> JoinRound | None:
        """A sharded optimizer is about to communicate."""
        if call in (Call.BACKWARD, Call.JOINED):
            # This was announced for its model, and all values were sent.
            return None
        for model in self._models.values() if call is Call.END else ():
            model.in_backward = False
        check_has_model(self._joinables, self._optimizers[place])
        return self._call(JoinCall(call, place))

    def _forward_begins(self, place: int, model: DDPModel) -> None:
        call = Call.FORWARD if model.ddp.require_backward_grad_sync else Call.FORWARD_UNDER_NO_SYNC
        call = call if torch.is_grad_enabled() else Call.FORWARD_WITHOUT_GRADIENTS
        join_round = self._call(JoinCall(call, place))
        if call is not Call.FORWARD_WITHOUT_GRADIENTS and not self._has_run_out:
            model.watches_all = bool(join_round.joined) and len(self._models) > 1
            model.forward(reduces=call is Call.FORWARD)

    def _backward_begins(self, place: int, model: DDPModel) -> None:
        if self.join_round.joined and any(not other.has_all for other in self._models.values() if other is not model):
            error = RuntimeError(
                "gradients of two models of the Join block come in turns in one backward, and a rank has run out of "
                "data, which does not know in which order: put both models into one DistributedDataParallel"
            )
            self._is_reported = True
            fail(self._coordinator, error)
            raise error
        join_round = self._call(JoinCall(Call.BACKWARD, place))
        if model.divides_by_running:
            divide_by(model.ddp, len(join_round.running))
        if join_round.joined:
            model.look(is_local=False)
            self._prepare_backward(model, join_round)

    def _prepare_backward(self, model: DDPModel, join_round: JoinRound) -> None:
        """Send ranks without data the values that they need for a backward of a model. Collective."""
        self._is_reported = True
        self._send_gradients(model, join_round.running, join_round.joined)
        for optimizer in optimizers_of_hooks(model.ddp):
            optimizer.counted = len(join_round.running) if self._divides_by_running else None
            if optimizer.steps_early:
                optimizer.exchange_args(join_round, {})
        self._is_reported = False

    def _send_gradients(self, model: DDPModel, running: Sequence[int], joined: Sequence[int]) -> None:
        """Send ranks without data the gradients to which the others add, or which they keep at the end."""
        is_joined = self._rank in joined
        mine = [not is_joined and not model.is_known, not is_joined and model.in_window]
        is_unknown, in_window = self._coordinator.any_of(mine, "a backward inside Join")
        if is_unknown:
            raise RuntimeError(
                "gradients that were reduced and others of no_sync() were added, or gradients were kept from before "
                "the block, and a rank has run out of data, whose part of them no rank knows: call zero_grad() before "
                "a window"
            )
        if in_window:
            # To zeros, at its begin.
            if is_joined:
                model.ddp.zero_grad()
        elif is_joined:
            model.set_gradients(receive_value(self._coordinator, running[0]))
        elif self._rank == running[0]:
            for peer in joined:
                send_value(self._coordinator, peer, model.gradients_to_send())

    def shadow_others(self) -> None:
        """Take part in what the others do until all have left their loops; raise what they raise. Collective."""
        error = next(filter(None, [model.error() for model in self._models.values()]), None)
        mine = JoinCall(Call.JOINED if error is None else Call.UNABLE)
        before, self._has_run_out = self.join_round.joined, True
        while (join_round := self._call(mine, error)).running:
            before = join_round.joined
            self._do(join_round)
        last = [rank for rank in join_round.joined if rank not in before]
        if before:
            for model in self._models.values():
                if self._rank in last:
                    model.look(is_local=False)
                self._send_gradients(model, last, before)
        # Errors of hooks from here on are raised only on this rank.
        self._is_reported = True
        for hook in self._hooks.values():
            hook.post_hook(self._rank in last)

    def _do(self, join_round: JoinRound) -> None:
        made = join_round.made
        for model in self._models.values():
            model.end_backward()
        if made.call is Call.BACKWARD:
            model = self._models[made.place]
            self._prepare_backward(model, join_round)
            # Other ranks cannot be told of an error from here on: they are in their backward.
            self._is_reported = True
            model.shadow_backward()
            self._is_reported = False
        elif made.place in self._models:
            with_grad = made.call is not Call.FORWARD_WITHOUT_GRADIENTS
            self._models[made.place].shadow_forward(reduces=made.call is Call.FORWARD, with_grad=with_grad)
        elif made.place in self._optimizers:
            self._optimizers[made.place].take_part(join_round)
        else:
            self._hooks[made.place].main_hook()


class JoinableConfig(JoinConfig):
    """The ``_join_config`` of a joinable inside a context of ours, which torch asks before each call."""

    notify: Callable[[], object]

    @property
    def is_first_joinable(self) -> bool:
        """Tell the context of a call, since only ``notify_join_context`` asks."""
        self.notify()
        return False

    def __reduce__(self) -> tuple[Callable[[], JoinConfig], tuple[()]]:
        """Copy and pickle as the config of a joinable outside of any context, which a copied model is."""
        return JoinConfig.construct_disabled_join_config, ()


def _label(value: object) -> str:
    """A text for a setting that is the same on all ranks."""
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def check_joinables(joinables: Sequence[Joinable]) -> RankGroup:
    """Check the joinables of a context, with the errors of :class:`Join`, and return the process group of all."""
    if not joinables:
        raise ValueError("Join needs at least one joinable, such as a model in DistributedDataParallel")
    own: set[torch.Tensor] = set()
    for place, joinable in enumerate(joinables):
        name = type(joinable).__name__
        if not isinstance(joinable, Joinable):
            raise TypeError(f"Join takes joinables, and {name} is none")
        if any(kind.__module__ == _TORCH_ZERO for kind in type(joinable).__mro__):
            raise ValueError(
                "torch's ZeroRedundancyOptimizer steps with old gradients where a rank has run out of data: use "
                "zeroshard.ZeroRedundancyOptimizer"
            )
        if any(joinable is other for other in joinables[:place]):
            raise ValueError(f"the joinable {name} is twice in the list that Join was given")
        if isinstance(join_config(joinable), JoinableConfig):
            raise RuntimeError(
                f"this {name} is in a Join block already, and blocks cannot be nested: leave the outer one first, or "
                f"put all joinables in one block"
            )
        if joinable.join_process_group != joinables[0].join_process_group:
            groups = [dist.get_process_group_ranks(each.join_process_group) for each in (joinables[0], joinable)]
            raise ValueError(
                f"{type(joinables[0]).__name__} works on the ranks {groups[0]} in one process group, and {name} on "
                f"{groups[1]} in another: give all joinables of a Join block the same process group, or enter a block "
                f"for each group"
            )
        if isinstance(joinable, ZeroRedundancyOptimizer):
            own.update(param for group in joinable.param_groups for param in group["params"])
            check_has_model(joinables, joinable.join_state)
        if isinstance(joinable, DistributedDataParallel):
            if not own.isdisjoint(joinable.parameters()):
                raise ValueError(
                    "the optimizer comes before its model in Join, so a rank without data would step before it has "
                    "gradients: write Join([ddp, optimizer])"
                )
            known = [getattr(other, "join_state", None) for other in joinables]
            if any(optimizer not in known for optimizer in optimizers_of_hooks(joinable)):
                raise ValueError(
                    "a communication hook of this model hands gradients to an optimizer that is not in the Join "
                    "block: write Join([ddp, optimizer])"
                )
    return RankGroup.of(joinables[0].join_process_group)


def check_has_model(joinables: Sequence[Joinable], optimizer: JoinState) -> None:
    """Raise a ValueError if an optimizer takes buckets of a model that is not in the context: its hook may be new."""
    models = [other for other in joinables if isinstance(other, DistributedDataParallel)]
    if optimizer.exchange is not None and all(optimizer not in optimizers_of_hooks(model) for model in models):
        raise ValueError(
            "a communication hook hands gradients to this optimizer of a model that is not in the Join block: write "
            "Join([ddp, optimizer])"
        )
