"""Remembers whether an exchange was left incomplete, and whether the training loop was refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zeroshard_comm import Control, PeerLostError


class ExchangeGuard:
    """Remembers which error has ended the exchanges of one optimizer on this rank.

    An error in the middle of an exchange leaves messages under way, and so does an interruption: a `BaseException` that
    is no `Exception`, such as `KeyboardInterrupt`. A later message could be mistaken for one of them.

    Args:
        control: the channel of the ranks.

    Attributes:
        broken: the error that every further call raises; None if all exchanges were completed.
        refused: why the training loop was refused, until a state is loaded; else empty.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self.broken: RuntimeError | None = None
        self.refused = ""

    def check(self) -> None:
        """Raise if an exchange was left incomplete on this rank.

        Raises:
            PeerLostError: if a rank was lost.
            RuntimeError: if it was something else.
        """
        if self.broken is not None:
            raise type(self.broken)(*self.broken.args)

    def mark_broken(self, error: BaseException) -> None:
        """Let :meth:`check` raise from now on, since the exchange under way cannot be completed any more.

        If a rank was lost, or this one was interrupted, no other rank waits for this one any more. An interruption of a
        single rank breaks nothing.
        """
        is_interruption = not isinstance(error, Exception)
        if is_interruption and self._control.is_single_rank:
            return
        if is_interruption or isinstance(error, PeerLostError):
            self._control.ranks.context.close(error)
        if self.broken is None:
            kind = PeerLostError if isinstance(error, PeerLostError) else RuntimeError
            self.broken = kind(
                f"rank {self._control.ranks.rank}: an earlier call was not finished, and messages of it may still be "
                f"on their way: load a checkpoint and build the optimizer again, on a new process group. It was ended "
                f"by: {type(error).__name__ if is_interruption else error}"
            )

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Raise if an earlier exchange was left incomplete, and remember if this one is."""
        self.check()
        try:
            yield
        except BaseException as error:
            if isinstance(error, PeerLostError) or not isinstance(error, Exception):
                self.mark_broken(error)
            raise

    def check_loop(self) -> None:
        """Raise a RuntimeError if the training loop was refused."""
        if self.refused:
            raise RuntimeError(self.refused)
