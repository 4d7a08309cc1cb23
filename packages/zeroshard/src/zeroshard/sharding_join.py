"""Trains a model with sharded gradients on uneven inputs, until every rank has used all its data.

Every rank announces each forward that broadcasts buffers, each backward, and each call of the optimizer. A rank without
data makes the same call: it sends zero gradients, and repeats the operations of the others' loops on gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from zeroshard_comm import Coordinator, DisagreementError, agreed

from zeroshard._torch_private import amp_unscale_
from zeroshard.grads.model_hooks import ModelHooks
from zeroshard.grads.placeholder import GradPlaceholder, Reduced
from zeroshard.grads.sharded import ShardedGradients
from zeroshard.join import Call, JoinCall, JoinRound, JoinState, exchange_calls, fail, receive_value, send_value


class ShardingJoin:
    """Holds the state of a ``join()`` block on one rank, for the thread that trains."""

    def __init__(self, coordinator: Coordinator, source: ShardedGradients, hooks: ModelHooks, state: JoinState) -> None:
        self._coordinator, self._source, self._hooks, self._state = coordinator, source, hooks, state
        self._round = JoinRound(JoinCall(Call.NOTIFY), tuple(range(coordinator.ranks.world_size)))
        self._throws = self._has_run_out = self._is_reported = False

    @contextmanager
    def block(self, *, divides_by_running: bool, throws: bool) -> Iterator[None]:
        """Let ranks announce their calls in the block, and at its end make the calls of ranks that still have data."""
        self._enter(divides_by_running=divides_by_running, throws=throws)
        try:
            yield
            self._shadow_others()
        except Exception as error:
            # In a backward, the other ranks wait for this rank's buckets; elsewhere they wait for an announcement.
            if not (self._is_reported or self._source.in_backward or isinstance(error, DisagreementError)):
                fail(self._coordinator, error)
            raise
        finally:
            self._source.announce_forward = self._source.announce_backward = self._state.context = None
            self._source.table.norms.log = None
            self._state.sends_gradients = True

    def _enter(self, *, divides_by_running: bool, throws: bool) -> None:
        settings = f"divide_by_initial_world_size={not divides_by_running}, throw_on_early_termination={throws}"
        explain = "rank {2} has entered it with {0}, and rank {3} with {1}".format
        with agreed(self._coordinator, "join()", explain) as proposal:
            proposal.digest, proposal.detail = 2 * divides_by_running + throws, lambda: settings
            if self._state.context is not None:
                raise RuntimeError("the optimizer is already in a join() block: leave that block first")
        size = self._coordinator.ranks.world_size
        self._throws, source, state = throws, self._source, self._state
        source.table.norms.log = []
        state.sends_gradients = False
        state.context = self._announce
        source.announce_forward = lambda: self._announce(Call.FORWARD).running[0]

        def announce_backward() -> float:
            running = len(self._announce(Call.BACKWARD).running)
            return size / running if divides_by_running else 1.0

        source.announce_backward = announce_backward

    def _announce(self, call: Call, error: Exception | None = None) -> JoinRound:
        """Announce a call of this rank, or that it has run out of data. Collective."""
        if self._has_run_out and call not in (Call.JOINED, Call.UNABLE):
            return self._round
        if not self._has_run_out:
            self._source.close_interrupted()
        self._is_reported = True
        before, self._round = self._round.joined, exchange_calls(self._coordinator, JoinCall(call), error)
        running, joined = self._round.running, self._round.joined
        if self._throws and joined and running:
            raise RuntimeError(
                f"rank {joined[0]} has run out of data, and throw_on_early_termination is set, so every rank raises"
            )
        if joined and (running or before):
            last = [rank for rank in joined if rank not in before]
            self._exchange_gradients(running or last, joined if running else before)
        self._is_reported = False
        return self._round

    def _exchange_gradients(self, sources: Sequence[int], receivers: Sequence[int]) -> None:
        """Repeat on ranks without data the operations of the others' loops on gradients. Collective."""
        rank, table, params = self._coordinator.ranks.rank, self._source.table, self._source.params
        if rank == sources[0]:
            reduced = [tensor for tensor, param in enumerate(params) if type(param.grad) is GradPlaceholder]
            absent = [*{*range(len(params))}.difference(reduced)]
            zero = [tensor for tensor in reduced if table.reduced(tensor) is Reduced.ZERO]
            for receiver in receivers:
                send_value(self._coordinator, receiver, [absent, zero, table.norms.log])
        elif rank in receivers:
            absent, zero, log = receive_value(self._coordinator, sources[0])
            assert table.norms.log is not None
            for name, tensor, *arguments in log[len(table.norms.log) :]:
                device = params[tensor].device
                moved = [each.to(device) if isinstance(each, torch.Tensor) else each for each in arguments]
                _REPEAT[name](params[tensor].grad, *moved)
            for tensor in zero:
                torch.Tensor.zero_(params[tensor].grad)
            for tensor in absent:
                params[tensor].grad = None

    def _shadow_others(self) -> None:
        """Make the calls of ranks that still have data until none has; raise what they raise. Collective."""
        self._source.close_interrupted()
        error = None
        if any(self._source.table.local(tensor) is not None for tensor in range(len(self._source.params))):
            error = RuntimeError(
                "this rank has run out of data with gradients that no backward has reduced: leave the loop after a "
                "backward outside of no_sync()"
            )
        call = Call.JOINED if error is None else Call.UNABLE
        before, self._has_run_out = self._round.joined, True
        while self._announce(call, error).running:
            before = self._round.joined
            made = self._round.made.call
            if made is Call.FORWARD:
                self._hooks.broadcast_buffers(self._round.running[0])
            elif made is Call.BACKWARD:
                self._source.send_zeros()
            else:
                self._state.shadow_call(self._round)
        if before:
            self._hooks.broadcast_all(next(rank for rank in self._round.joined if rank not in before))


def _unscale(gradient: torch.Tensor, inverse: float | torch.Tensor) -> None:
    factor = torch.as_tensor(inverse, dtype=torch.float32, device=gradient.device)
    amp_unscale_([gradient], torch.zeros_like(factor), factor)


_REPEAT: dict[str, Callable[..., object]] = {
    "mul_": torch.Tensor.mul_,
    "div_": torch.Tensor.div_,
    "clamp_": torch.Tensor.clamp_,
    "unscale": _unscale,
}
