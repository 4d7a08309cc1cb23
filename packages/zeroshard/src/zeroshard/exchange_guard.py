"""Tracks whether communication is still possible, or an earlier exchange was left incomplete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zeroshard_comm import Control, PeerLostError


class ExchangeGuard:
    """Remembers which error has ended the exchanges of one optimizer on this rank.

    An error in the middle of an exchange leaves messages under way, and so does an interruption (a `BaseException` that
    is no `Exception`, such as `KeyboardInterrupt`); a later message could be mistaken for one of them. If nothing is
    under way, an interruption is reported to all ranks as an error.

    Args:
        control: the channel of the ranks.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._interrupted_by = ""
        self._broken: BaseException | None = None
        self._misuse = ""
        self._told: BaseException | None = None

    @property
    def is_broken(self) -> bool:
        """Whether an exchange has failed and cannot be completed any more."""
        return self._broken is not None

    def check(self) -> None:
        """Raise if an exchange was left incomplete on this rank.

        Raises:
            PeerLostError: if a rank was lost.
            RuntimeError: if it was something else.
        """
        rank = self._control.ranks.rank
        if self._interrupted_by:
            raise RuntimeError(
                f"rank {rank} was interrupted by {self._interrupted_by} while it exchanged with the others, who may "
                f"have gone on or not: messages on their way cannot be taken back. End all ranks, and start again from "
                f"a checkpoint"
            )
        if self._broken is not None:
            kind = PeerLostError if isinstance(self._broken, PeerLostError) else RuntimeError
            raise kind(
                f"rank {rank}: an earlier backward or step could not be finished, and messages of it may still be on "
                f"their way; start again from a checkpoint. It was: {self._broken}"
            )

    def check_loop(self) -> None:
        """Raise if the training loop was refused, until a state is loaded.

        Raises:
            RuntimeError: with what to do.
        """
        if self._misuse:
            raise RuntimeError(self._misuse)

    def refuse_loop(self, message: str) -> None:
        """Let :meth:`check_loop` raise from now on, until :meth:`accept_loop` is called."""
        self._misuse = message

    def accept_loop(self) -> None:
        """Begin anew: a state has been loaded."""
        self._misuse = ""

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Raise if an earlier exchange was left incomplete, and remember if this one is.

        An interruption that was reported to the others as an error is raised here as itself.
        """
        self.check()
        try:
            yield
        except Exception as error:
            if isinstance(error, PeerLostError):
                self._control.cut_off()
            told, self._told = self._told, None
            if told is not None:
                raise told from error
            raise
        except BaseException as interruption:
            if not self._control.alone:
                self._interrupted_by = type(interruption).__name__
                # The others wait for messages that will not come.
                self._control.cut_off()
                self.break_off(interruption)
            raise
        finally:
            self._told = None

    def break_off(self, error: BaseException) -> None:
        """Remember that the exchange under way cannot be completed any more."""
        if isinstance(error, PeerLostError):
            self._control.cut_off()
        if self._broken is None:
            self._broken = error if isinstance(error, Exception) else RuntimeError(type(error).__name__)

    def as_error(self, error: BaseException) -> Exception:
        """Return what is reported to the other ranks: an error itself, or a RuntimeError for an interruption."""
        if isinstance(error, Exception):
            return error
        self._told = error
        return RuntimeError(
            f"step() was interrupted by {type(error).__name__}: parameters are equal on all ranks, but some may have "
            f"been stepped; go on with the next step, or load a checkpoint"
        )
