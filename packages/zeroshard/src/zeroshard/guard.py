"""Holds the errors of an optimizer that persist after a call: an exchange is incomplete, or a loop misuses a hook."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from zeroshard_comm import Coordinator, PeerLostError
from zeroshard_core import Plan


class Guard:
    """Holds the errors of one optimizer that persist after a call. Use it as a context around every exchange.

    Attributes:
        broken: the error that every further call raises; None if all exchanges were completed.
        refused: why steps are refused until a state is loaded, because the loop misused a hook; empty if they are not.
        suspended: why ``step()`` and ``load_state_dict()`` are refused; empty if they are not.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.broken: RuntimeError | None = None
        self.refused = self.suspended = ""

    def __enter__(self) -> None:
        """Raise if an earlier exchange is incomplete."""
        self.check_broken()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Mark the optimizer as broken if this exchange is incomplete."""
        if error is not None and (isinstance(error, PeerLostError) or not isinstance(error, Exception)):
            self.mark_broken(error)

    @contextmanager
    def breaking(self) -> Iterator[None]:
        """Mark the optimizer as broken after any error in the block."""
        try:
            yield
        except BaseException as error:
            self.mark_broken(error)
            raise

    def check_broken(self) -> None:
        """Raise if an exchange of this rank is incomplete: a PeerLostError if a rank was lost, else a RuntimeError."""
        if self.broken is not None:
            raise type(self.broken)(*self.broken.args)

    def check_allowed(self) -> None:
        """Raise a RuntimeError if parameters may not be stepped, loaded or added now."""
        if self.suspended:
            raise RuntimeError(self.suspended)

    def check_capture(self, params: Sequence[torch.Tensor], plan: Plan) -> None:
        """Raise a RuntimeError if a CUDA graph is being captured whose replay would leave out communication."""
        ranks = self._coordinator.ranks
        if not is_captured(params) or ranks.world_size == 1:
            return
        if ranks.backend("cuda") != "nccl" or any(len(owners) > 1 for owners in plan.owners):
            raise RuntimeError(
                "step() of a sharded optimizer can be captured in a CUDA graph only with the backend 'nccl' and if no "
                "tensor is cut: other backends send tensors through the host, which a replay leaves out, and cut "
                "tensors use buffers that other steps use too. Use nccl and partition='whole', or capture only forward "
                "and backward, for example with torch.cuda.make_graphed_callables"
            )

    def mark_broken(self, error: BaseException) -> None:
        """Make :meth:`check_broken` raise from now on: a later message could be mistaken for one still in flight.

        If a rank was lost, or this one was interrupted (by a `BaseException` that is not an `Exception`), close the
        connections, so that no rank waits for this one. In a group of one rank an interruption breaks nothing.
        """
        is_interruption, ranks = not isinstance(error, Exception), self._coordinator.ranks
        if is_interruption and self._coordinator.is_single_rank:
            return
        if is_interruption or isinstance(error, PeerLostError):
            ranks.close(error)
        if self.broken is None:
            kind = PeerLostError if isinstance(error, PeerLostError) else RuntimeError
            self.broken = kind(
                f"rank {ranks.rank}: an earlier call did not finish, and its messages may still be in flight: load a "
                f"checkpoint, and build the optimizer again on a new process group. The call was ended by: "
                f"{type(error).__name__ if is_interruption else error}"
            )


def is_captured(params: Sequence[torch.Tensor]) -> bool:
    """Return True if a CUDA graph captures the current operations on these parameters."""
    return bool(params) and params[0].is_cuda and torch.cuda.is_current_stream_capturing()
