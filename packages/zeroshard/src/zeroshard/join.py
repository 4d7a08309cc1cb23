"""Uneven inputs: what ranks with data announce, and what a rank without data does for its optimizer.

Inside a Join context every rank announces every call before it communicates, or that it has run out of data. The
first rank that has data sends such ranks the values that the call needs, and they do their part.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.join import Joinable
from zeroshard_comm import Coordinator, DisagreementError, PeerLostError, agreed

from zeroshard._torch_private import join_config
from zeroshard.grads.placeholder import GradPlaceholder
from zeroshard.plan.groups import hyperparameters_of
from zeroshard.state.serialization import receive_value, send_value, write_value

if TYPE_CHECKING:
    from zeroshard.engine import Engine
    from zeroshard.grads.exchange import GradExchange

__all__ = ["Call", "JoinCall", "JoinRound", "JoinState", "exchange_calls", "fail", "receive_value", "send_value"]


class Call(IntEnum):
    """What a rank is about to do."""

    JOINED = 0
    """It has run out of data, and takes part in what the others do."""
    STEP = 1
    CLIP = 2
    CONSOLIDATE = 3
    BACKWARD = 4
    """The begin of a backward that reduces; announced for its model, and by an optimizer that steps during it."""
    END = 5
    """The end of a backward with a hook; a rank without data then ends its part of it."""
    FORWARD = 6
    """A forward whose backward reduces."""
    FORWARD_UNDER_NO_SYNC = 7
    FORWARD_WITHOUT_GRADIENTS = 8
    NOTIFY = 9
    """A call of another joinable."""
    REFUSED = 10
    """A call that a rank without data cannot take part in, such as loading a state."""
    FAILED = 11
    """It leaves the context with an error."""
    UNABLE = 12
    """It has run out of data, and cannot take part if others have not."""


@dataclass(frozen=True)
class JoinCall:
    """What a rank says before a call.

    Attributes:
        call: what it is about to do.
        place: 1-based index of the caller: joinable or optimizer; 0 for any.
    """

    call: Call
    place: int = 0

    def __str__(self) -> str:
        """Return text such as ``"forward under no_sync of joinable 1"``."""
        words = self.call.name.lower().replace("_", " ").replace("no sync", "no_sync")
        return f"{words} of joinable {self.place}"


@dataclass(frozen=True)
class JoinRound:
    """What all ranks have announced.

    Attributes:
        made: the call of the ranks that still have data; JOINED if there are none.
        running, joined: those ranks, and the others, ascending.
    """

    made: JoinCall
    running: tuple[int, ...]
    joined: tuple[int, ...] = ()


def exchange_calls(coordinator: Coordinator, mine: JoinCall, error: Exception | None = None) -> JoinRound:
    """Tell all ranks what this one is about to do, and hear it from them. Collective.

    Raises:
        DisagreementError: if ranks that still have data are about to do different things.
        PeerLostError: if a rank is gone.
        Exception: the error of a rank that has failed, or is unable, on every rank.
    """
    coordinator.agree("a method inside Join")
    words = coordinator.gather_ints([mine.call | mine.place << 4], "a method inside Join")
    answers = [JoinCall(Call(word & 15), word >> 4) for [word] in words]
    if mine.call is Call.FAILED:
        frames = error.__traceback__ if error is not None else None
        with suppress(Exception):
            coordinator.agree("leaving Join", error=error)
        if error is not None:
            # Else the frames of this call would keep the context.
            error.__traceback__ = frames
        return JoinRound(mine, ())
    joined = tuple([rank for rank, answer in enumerate(answers) if answer.call in (Call.JOINED, Call.UNABLE)])
    running = tuple([rank for rank in range(len(answers)) if rank not in joined])
    calls = [answer.call for answer in answers]
    if Call.FAILED in calls or (Call.UNABLE in calls and running):
        coordinator.agree("leaving Join", error=error)
    made = answers[running[0]] if running else JoinCall(Call.JOINED)
    for rank in running:
        if answers[rank] != made:
            raise DisagreementError(
                f"inside Join, rank {running[0]} is about to make a {made}, and rank {rank} a {answers[rank]}: ranks "
                f"that still have data must make the same calls in the same order, and decide about no_sync() and "
                f"step() by batch index"
            )
    return JoinRound(made, running, joined)


def fail(coordinator: Coordinator, error: Exception) -> None:
    """Tell all ranks of an error at their next announcement. Collective."""
    with suppress(PeerLostError):
        exchange_calls(coordinator, JoinCall(Call.FAILED), error)


class JoinState:
    """Announces the calls of one optimizer, and sends ranks without data the values that they need.

    Attributes:
        context: announces a call in the Join context that the optimizer is in; None outside. Contexts change these.
        counted: the number of ranks over which a hook of zeroshard averages gradients; None for all.
        models: those that a communication hook was registered with.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.models: weakref.WeakSet[Joinable] = weakref.WeakSet()
        self.leave()

    def leave(self) -> None:
        """Leave a context."""
        self.context: Callable[[Call], JoinRound | None] | None = None
        self.counted: int | None = None

    def announce(self, call: Call, **arguments: Any) -> None:  # noqa: ANN401 - of any call
        """Announce a call, and send its values to ranks that have run out of data. Collective; a no-op outside.

        Raises:
            RuntimeError: if a model is in a Join context, and the optimizer is not.
        """
        if self.context is None and any(join_config(model).enable for model in self.models):
            raise self.left_out()
        if self.context is None or self._engine.coordinator.is_single_rank:
            return
        join_round = self.context(call)
        if join_round is not None and join_round.joined and join_round.running and call is not Call.END:
            self.exchange_args(join_round, arguments)

    @staticmethod
    def left_out() -> RuntimeError:
        """Return the error for a model that is in a Join context without its optimizer."""
        return RuntimeError(
            "the model is in a Join block, and the optimizer of its communication hook is not, so ranks without data "
            "take no part in step(): use zeroshard_integrations.join.Join([ddp, optimizer])"
        )

    def exchange_args(self, join_round: JoinRound, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send ranks without data what a call needs, or receive and set it there; return its arguments. Collective."""
        coordinator, source, call = self._engine.coordinator, join_round.running[0], join_round.made.call
        rank, written = coordinator.ranks.rank, dict[int, Any]()
        with agreed(coordinator, "a method inside Join"):
            if call is Call.REFUSED:
                what = "add_param_group(), load_state_dict(), train(), eval() and step(closure)"
                raise RuntimeError(f"{what} need all ranks, and one has run out of data: call them outside of Join")
            if rank == source:
                common = self._describe(call, arguments)
                written = {peer: {**common, **self._tensors_for(peer, call)} for peer in join_round.joined}
        with agreed(coordinator, "a method inside Join"):
            for peer, values in written.items():
                send_value(coordinator, peer, values)
            if rank in join_round.joined:
                given = receive_value(coordinator, source)
                arguments = given["arguments"]
                self._take(call, given)
        return arguments

    def _describe(self, call: Call, arguments: Mapping[str, Any]) -> dict[str, Any]:
        groups = [hyperparameters_of(group) for group in self._engine.groups]
        self._engine.hyperparameters.update(self._engine.groups)
        named = [(f"the hyperparameter {key!r}", value) for group in groups for key, value in group.items()]
        named += [(f"the argument {key!r} of {call.name.lower()}()", value) for key, value in arguments.items()]
        for name, value in named:
            # Raises.
            write_value(value, [], f"a rank has run out of data in Join, and cannot be told {name}: it")
        return {"groups": groups, "agreed": dict(self._engine.hyperparameters.agreed), "arguments": dict(arguments)}

    def _tensors_for(self, peer: int, call: Call) -> dict[str, Any]:
        """The parameters that another rank updates, since the loop may have changed them; and their gradients."""
        params = self._engine.params
        grads = [param.grad for param in params]
        takes_buckets, updates = self._engine.exchange is not None, call in (Call.STEP, Call.BACKWARD)
        return {
            "parameters": self._of_rank(peer, params) if updates else {},
            "gradients": self._of_rank(peer, grads) if updates and not takes_buckets else {},
            "done": {} if self._engine.exchange is None else dict(self._engine.exchange.operations.to_text),
            "held": [None if g is None else not (isinstance(g, GradPlaceholder) and g.is_zero()) for g in grads],
        }

    def _of_rank(self, peer: int, values: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
        """A rank's parts of parameters, or of their gradients, by tensor."""
        plan, found = self._engine.layout.plan, dict[int, torch.Tensor]()
        for shard in plan.of_rank(peer):
            value = values[shard.tensor]
            if value is not None:
                found[shard.tensor] = shard.narrow(value.detach()) if plan.is_cut(shard.tensor) else value.detach()
        return found

    def _take(self, call: Call, given: Mapping[str, Any]) -> None:
        groups, params, shards = self._engine.groups, self._engine.params, self._engine.local.shards
        for from_group, to_group in zip(given["groups"], groups, strict=True):
            for key, value in from_group.items():
                present = to_group.get(key)
                if isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor):
                    value = present.copy_(value)
                to_group[key] = value
        self._engine.hyperparameters.agreed = given["agreed"]
        self._engine.hyperparameters.record_written(groups)
        for tensor, values in given["parameters"].items():
            shards[tensor].local_view.copy_(values)
        if call is Call.BACKWARD:
            return
        for param, held in zip(params, given["held"], strict=True):
            param.grad = None if held is None else param.grad
            if held is False and param.grad is not None:
                param.grad.zero_()
        mine = {} if self._engine.exchange is None else self._engine.exchange.operations.to_text
        if call is Call.STEP and (other := dict(given["done"].items() - mine.items())):
            what, done = min(other.items())
            raise RuntimeError(
                f"this rank has run out of data in Join, and cannot repeat {what}: {done}. Gradients that were reduced "
                f"may be zeroed or clipped there before the next backward, and not changed otherwise"
            )
        for tensor, values in given["gradients"].items():
            shard = shards[tensor]
            shard.param.grad = torch.zeros_like(shard.param) if shard.is_cut else values.to(shard.param.device)
            if shard.is_cut:
                # This rank's part of it; the rest is not looked at.
                shard.shard.narrow(shard.param.grad).copy_(values)

    # ------------------------------------------------------------------ a rank without data

    @property
    def exchange(self) -> GradExchange | None:
        """What a communication hook hands gradients to; None without one."""
        return self._engine.exchange

    @property
    def steps_early(self) -> bool:
        """Whether that hook steps during backward."""
        return self._engine.early_steps is not None

    def take_part(self, join_round: JoinRound) -> None:
        """Do what the ranks that still have data do with the optimizer; raise what they raise. Collective."""
        engine, exchange, call = self._engine, self.exchange, join_round.made.call
        arguments = self.exchange_args(join_round, {}) if call is not Call.END else {}
        if call is Call.END:
            assert exchange is not None
            exchange.end()
        elif call is Call.CLIP:
            engine.apply_clipping(**arguments)
        elif call is Call.CONSOLIDATE:
            engine.apply_consolidation(**arguments)
        else:
            engine.apply_step(arguments)
            for param in engine.params if exchange is None else ():
                param.grad = None
