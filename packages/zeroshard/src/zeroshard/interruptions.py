"""Ctrl-C in a step: told to all ranks where nothing is on its way, and the end of the optimizer where something is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from zeroshard_comm import Control, PeerLostError


class Interruptions:
    """What has interrupted this rank's calls: a `BaseException` that is no `Exception`, such as `KeyboardInterrupt`.

    Args:
        control: the channel of the ranks.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._ended_by = ""
        self._told: BaseException | None = None

    def refuse(self) -> None:
        """Raise if an exchange was interrupted on this rank: its messages would be taken for those of the next one.

        Raises:
            RuntimeError: with what to do.
        """
        if self._ended_by:
            raise RuntimeError(
                f"rank {self._control.ranks.rank} was interrupted by {self._ended_by} while it exchanged with the "
                f"others, who may have gone on or not: what is on its way cannot be called back. End all ranks, and "
                f"start again from a checkpoint"
            )

    @contextmanager
    def exchange(self, break_off: Callable[[BaseException], None] | None) -> Iterator[None]:
        """Refuse if an exchange before was interrupted, and take note if this one is.

        What was told to the others as an error is raised here, where it interrupted, as what it was.

        Args:
            break_off: called with the interruption, if given.
        """
        self.refuse()
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
                self._ended_by = type(interruption).__name__
                # What the others wait for does not come.
                self._control.cut_off()
                if break_off is not None:
                    break_off(interruption)
            raise
        finally:
            self._told = None

    def as_error(self, error: BaseException) -> Exception:
        """Return what the other ranks are told: an error itself, and an interruption in words."""
        if isinstance(error, Exception):
            return error
        self._told = error
        return RuntimeError(
            f"step() was interrupted by {type(error).__name__}: parameters are equal on all ranks, but some may have "
            f"been stepped; go on with the next step, or load a checkpoint"
        )
