"""How a joinable's call of ``Join.notify_join_context``, torch's or ours, reaches the block that the joinable is in."""

from __future__ import annotations

from collections.abc import Callable
from typing import SupportsIndex

from zeroshard._torch_private import JoinConfig


class BlockConfig(JoinConfig):
    """The ``_join_config`` of a joinable inside a block of ours.

    torch's ``notify_join_context`` asks whether the joinable is the first of its context, which then communicates, and
    does nothing if not. It is told that it is not, and the block is told of the call.
    """

    _notify: Callable[[], None]
    _enabled: Callable[[], bool]

    @classmethod
    def make(
        cls, notify: Callable[[], None], enabled: Callable[[], bool], *, throw_on_early_termination: bool
    ) -> BlockConfig:
        """Make the config of one joinable.

        Args:
            notify: tells the block that the joinable is about to communicate.
            enabled: whether the joinable is to communicate with ranks that have run out, as far as it does so itself.
            throw_on_early_termination: as for the block.
        """
        made = cls(enable=True, throw_on_early_termination=throw_on_early_termination, is_first_joinable=False)
        made._notify, made._enabled = notify, enabled
        return made

    @property
    def is_first_joinable(self) -> bool:
        """Tell the block of a call, since only ``notify_join_context`` asks."""
        self._notify()
        return False

    @property
    def enable(self) -> bool:
        """Whether the joinable itself communicates with ranks that have run out."""
        return self._enabled()

    def notify(self) -> None:
        """Tell the block of a call."""
        self._notify()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Callable[[], JoinConfig], tuple[()]]:
        """Copy and pickle as the config of a joinable outside of any block, which a copied model is."""
        return JoinConfig.construct_disabled_join_config, ()
