"""Announces the calls of ranks with data in Join, and makes the same calls of an optimizer on ranks without data.

Inside a Join context, every rank announces each call before it communicates, or announces that it has no more data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from zeroshard_comm import Coordinator, DisagreementError, PeerLostError, agreed

from zeroshard.changes import Changes
from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.plan.groups import hyperparameters_of, set_hyperparameter
from zeroshard.state.serialization import receive_value, send_value, write_value

__all__ = ["Call", "JoinCall", "JoinRound", "JoinState", "exchange_calls", "fail", "receive_value", "send_value"]


class Call(IntEnum):
    """The call that a rank is about to make."""

    JOINED = 0
    """The rank has run out of data, and takes part in the calls of the others."""
    STEP = 1
    CONSOLIDATE = 2
    FORWARD = 3
    FORWARD_WITHOUT_GRADIENTS = 4
    BACKWARD = 5
    """The start of a backward that reduces gradients."""
    NOTIFY = 6
    """A call of a joinable that is neither a model in DistributedDataParallel nor a sharded optimizer."""
    REFUSED = 7
    """A call that a rank without data cannot take part in, such as loading a state."""
    FAILED = 8
    """The rank leaves the context with an error."""
    UNABLE = 9
    """The rank has run out of data, and cannot take part if others still have data."""
    CLIP = 10


@dataclass(frozen=True)
class JoinCall:
    """The announcement of one rank: its call, and if that is NOTIFY, the joinable's 1-based index in ``place``."""

    call: Call
    place: int = 0

    def __str__(self) -> str:
        """Return text such as ``"forward without gradients"`` or ``"call of joinable 1"``."""
        return f"call of joinable {self.place}" if self.place else self.call.name.lower().replace("_", " ")


@dataclass(frozen=True)
class JoinRound:
    """The call of the ranks with data (JOINED if there are none), and the ranks with and without data, ascending."""

    made: JoinCall
    running: tuple[int, ...]
    joined: tuple[int, ...] = ()


def exchange_calls(coordinator: Coordinator, mine: JoinCall, error: Exception | None = None) -> JoinRound:
    """Exchange the announcements of all ranks; ``error`` says why this rank is UNABLE. Collective.

    Every rank raises the error of a failed rank, or a DisagreementError if ranks with data announce different calls.
    """
    announced = _gather_calls(coordinator, mine)
    calls = [each.call for each in announced]
    joined = tuple([rank for rank, call in enumerate(calls) if call in (Call.JOINED, Call.UNABLE)])
    running = tuple([rank for rank in range(len(calls)) if rank not in joined])
    if Call.FAILED in calls or (Call.UNABLE in calls and running):
        coordinator.agree("the end of Join", error=error)
    made = announced[running[0]] if running else JoinCall(Call.JOINED)
    for rank in running:
        if announced[rank] != made:
            raise DisagreementError(
                f"inside Join, rank {running[0]} is about to make a {made}, and rank {rank} a {announced[rank]}: ranks "
                f"that still have data must make the same calls in the same order; decide about step() by batch index"
            )
    return JoinRound(made, running, joined)


def fail(coordinator: Coordinator, error: Exception) -> None:
    """Report an error to all ranks at their next announcement. Collective."""
    frames = error.__traceback__
    with suppress(PeerLostError):
        _gather_calls(coordinator, JoinCall(Call.FAILED))
        with suppress(Exception):
            coordinator.agree("the end of Join", error=error)
    error.__traceback__ = frames  # the frames of this call would keep the context alive


def _gather_calls(coordinator: Coordinator, mine: JoinCall) -> list[JoinCall]:
    coordinator.agree("a method inside Join")
    words = coordinator.gather_ints([mine.call | mine.place << 4], "a method inside Join")
    return [JoinCall(Call(word & 15), word >> 4) for [word] in words]


class JoinState:
    """Announces the calls of one optimizer, and sends ranks without data the values that they need."""

    def __init__(
        self,
        coordinator: Coordinator,
        local: LocalOptimizer,
        changes: Changes,
        step: Callable[[Mapping[str, Any]], object],
        consolidate: Callable[[int], object],
        clip: Callable[..., object],
    ) -> None:
        self._coordinator, self._local, self._changes = coordinator, local, changes
        self._step, self._consolidate, self._clip = step, consolidate, clip
        self.sends_gradients = True
        """Whether ranks without data get gradients from another rank; if not, they have them. Set by the context."""
        self.context: Callable[[Call], JoinRound] | None = None
        """Announces a call in the Join context that the optimizer is in; None outside. Set by the context."""

    def announce(self, call: Call, **arguments: Any) -> None:  # noqa: ANN401 - of any call
        """Announce a call, and send its values to ranks without data. Collective; no-op outside of Join."""
        if self.context is None:
            return
        join_round = self.context(call)
        if join_round.joined and join_round.running:
            self._exchange_values(join_round, arguments)

    def shadow_call(self, join_round: JoinRound) -> None:
        """Make the same call of the optimizer as the ranks with data, and raise what they raise. Collective."""
        arguments = self._exchange_values(join_round, {})
        if join_round.made.call is Call.CONSOLIDATE:
            self._consolidate(arguments["target"])
            return
        if join_round.made.call is Call.CLIP:
            self._clip(**arguments)
            return
        self._step(arguments)
        for param in self._local.params if self.sends_gradients else ():
            param.grad = None

    def _exchange_values(self, join_round: JoinRound, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send the values of a call to ranks without data, which adopt them. Return its arguments. Collective."""
        coordinator, source, call = self._coordinator, join_round.running[0], join_round.made.call
        rank, sent = coordinator.ranks.rank, dict[int, Any]()
        with agreed(coordinator, "a method inside Join"):
            if call is Call.REFUSED:
                what = "add_param_group(), load_state_dict(), train(), eval() and step(closure)"
                raise RuntimeError(f"{what} need all ranks, but a rank has run out of data: call them outside of Join")
            if rank == source:
                values = self._values_of(call, arguments)
                for peer in join_round.joined:
                    sent[peer] = {**values, "parts": self._parts_of(peer) if call is Call.STEP else None}
        with agreed(coordinator, "a method inside Join"):
            for peer, values in sent.items():
                send_value(coordinator, peer, values)
            if rank in join_round.joined:
                received = receive_value(coordinator, source)
                self._set_values(received)
                arguments = received["arguments"]
        return arguments

    def _values_of(self, call: Call, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the hyperparameters and arguments of a call; raise a StateMapError if one cannot be sent."""
        groups = [hyperparameters_of(group) for group in self._local.groups]
        self._changes.read_hyperparameters()
        named = [(f"the hyperparameter {key!r}", value) for group in groups for key, value in group.items()]
        named += [(f"the argument {key!r} of {call.name.lower()}()", value) for key, value in arguments.items()]
        for name, value in named:
            write_value(value, [], f"a rank has run out of data in Join, and cannot receive {name}: it")
        return {"groups": groups, "agreed": self._changes.agreed, "arguments": dict(arguments)}

    def _parts_of(self, peer: int) -> dict[int, tuple[torch.Tensor, torch.Tensor | None]]:
        """Return the parts that a peer owns, and their gradients, because the loop may have changed both."""
        plan, parts = self._local.plan, dict[int, tuple[torch.Tensor, torch.Tensor | None]]()
        for shard in plan.of_rank(peer):
            param = self._local.params[shard.tensor].detach()
            grad = self._local.params[shard.tensor].grad if self.sends_gradients else None
            if plan.is_cut(shard.tensor):
                param, grad = shard.narrow(param), None if grad is None else shard.narrow(grad)
            parts[shard.tensor] = param, grad
        return parts

    def _set_values(self, received: Mapping[str, Any]) -> None:
        """Set hyperparameters; for a step also this rank's parts and their gradients, and remove other gradients."""
        for from_group, to_group in zip(received["groups"], self._local.groups, strict=True):
            for key, value in from_group.items():
                set_hyperparameter(to_group, key, value)
        self._changes.set_agreed(received["agreed"])
        self._changes.record_hyperparameters()
        if received["parts"] is None:
            return
        for param in self._local.params if self.sends_gradients else ():
            param.grad = None
        for tensor, (values, grad) in received["parts"].items():
            shard = self._local.shards[tensor]
            shard.local_view.copy_(values)
            if grad is not None and shard.is_cut:
                # The optimizer reads only this rank's part.
                shard.param.grad = torch.zeros_like(shard.param)
                shard.shard.narrow(shard.param.grad).copy_(grad)
            elif grad is not None:
                shard.param.grad = grad.to(shard.param.device)
