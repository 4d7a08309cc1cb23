"""Uneven inputs: train with DistributedDataParallel and a sharded optimizer until every rank has used all of its data.

A drop-in for ``torch.distributed.algorithms.join``, with its names and signatures. Ranks that run out of data take part
in what the others do, as if they contributed zero gradients; what they had accumulated counts. Parameters end where a
single process would have ended that sees the batches of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.join import Joinable, JoinHook
from zeroshard._torch_private import join_config

from zeroshard_integrations.join.block import ENDED, JoinBlock
from zeroshard_integrations.join.checks import common_group
from zeroshard_integrations.join.config import BlockConfig
from zeroshard_integrations.join.failure import early_leaving, fail
from zeroshard_integrations.join.shadow import Shadow

__all__ = ["Join", "JoinHook", "Joinable"]


class Join:
    """A block in which every rank trains on as many batches as it has.

    ``with Join([ddp, optimizer]) as join:`` around the training loop. Every joinable tells the block before it
    communicates (:meth:`notify_join_context`), and a rank that has left the loop calls the hook of that joinable, until
    all ranks have left. Backwards are followed as well. So what is shadowed is what the others
    do: backwards under ``ddp.no_sync()``, several before a step, steps that are left out, forwards without a backward,
    and gradients that are never set to zero, or changed, all end where one process would have.

    Entering is collective: all ranks enter a block with the same joinables and settings, in the same order. While all
    ranks have data, the forward of a model costs one word from each rank to each other, which is waited for when the
    forward has been computed; a joinable that is neither a model nor a sharded optimizer waits in front.

    Args:
        joinables: models in DistributedDataParallel, sharded optimizers, and any other
            :class:`Joinable`, of one process group; a model before the optimizer of its parameters.
        enable: False to do nothing, where inputs are known to be even.
        throw_on_early_termination: raise an error on every rank as soon as one has run out of data.
        **kwargs: handed to the ``join_hook`` of every joinable. ``divide_by_initial_world_size`` (True) tells whether
            gradients are averaged over all ranks, or over those that still have data.

    Raises:
        ValueError: if there are no joinables, one is there twice, they are of several process groups, an optimizer
            comes before its model or is torch's, or a communication hook's model or optimizer is missing.
        TypeError: if something is no joinable.
        RuntimeError: if a joinable is in a block already.

    Example:
        >>> import os, tempfile, torch
        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> from zeroshard import ZeroRedundancyOptimizer
        >>> from zeroshard_integrations.join import Join
        >>> store = dist.FileStore(tempfile.mkstemp()[1], 1)
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> ddp = DistributedDataParallel(torch.nn.Linear(4, 1))
        >>> optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3)
        >>> with Join([ddp, optimizer]) as join:
        ...     for batch in torch.ones(3, 2, 4):  # any number on any rank
        ...         optimizer.zero_grad()
        ...         ddp(batch).sum().backward()
        ...         optimizer.step()
        >>> join.running, join.shadowed_steps
        (0, 0)
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        joinables: Sequence[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,  # noqa: ANN401 - arguments of any joinable
    ) -> None:
        self._joinables = list(joinables)
        self._enable, self._throws, self._arguments = enable, throw_on_early_termination, kwargs
        self._group = common_group(self._joinables)
        self._block: JoinBlock | None = None
        self._shadow: Shadow | None = None
        self._is_inside = False

    # ------------------------------------------------------------------ what a training loop may ask

    @property
    def running(self) -> int:
        """How many ranks still have data, as of the last forward; 0 behind the block."""
        return self._block.running if self._block is not None else dist.get_world_size(self._group)

    @property
    def shadowed_steps(self) -> int:
        """How many steps of the others this rank has taken part in without data of its own.

        Of all sharded optimizers; of reductions of gradients, where no sharded optimizer steps by itself.
        """
        if self._block is None or self._shadow is None:
            return 0
        of_hooks = [hook.steps for hook in self._block.steps.values() if not hook.steps_in_backward]
        return sum(of_hooks) if of_hooks else self._shadow.reductions

    @staticmethod
    def notify_join_context(joinable: Joinable) -> dist.Work | None:
        """Tell the block that a joinable is in, if it is in one, that it is about to communicate.

        A joinable calls this, or torch's, before the collectives that its hook shadows, on every rank alike.

        Args:
            joinable: itself.

        Returns:
            None in a block of ours; in torch's, the operation under way that tells the other ranks, if there is one.

        Raises:
            DisagreementError: if the ranks that still have data are in different calls.
            PeerLostError: if a rank is gone.
            RuntimeError: if a rank has run out of data, with ``throw_on_early_termination``.
            Exception: what another rank has met inside the block.
        """
        config = join_config(joinable)
        if isinstance(config, BlockConfig):
            config.notify()
            return None
        work: dist.Work | None = TorchJoin.notify_join_context(joinable)
        return work

    # ------------------------------------------------------------------ entering and leaving

    def __enter__(self) -> Join:
        """Enter the block. Collective.

        Raises:
            DisagreementError: if ranks enter with other joinables or settings.
            RuntimeError: if a joinable is in a block already.
            Exception: what a joinable has raised when it was asked for its hook; on every rank.
            PeerLostError: if a rank is gone.
        """
        if self._enable:
            self._block, self._shadow = None, None
            self._block = JoinBlock(self._joinables, self._group, throws=self._throws, arguments=self._arguments)
            self._is_inside = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Shadow the others until all have left. Collective.

        Raises:
            RuntimeError: if this rank has left in the middle of an iteration; on every rank.
            DisagreementError: if ranks that still have data make different calls; on every rank.
            PeerLostError: if a rank is gone.
            Exception: what another rank has met inside the block.
        """
        if self._block is None or not self._is_inside:
            return
        try:
            if value is None:
                self._leave(self._block)
            elif not isinstance(value, Exception):
                # The process is to end at once. The others find the note when they have lost it.
                self._block.note.leave(value)
            elif not self._block.is_told:
                fail(self._block, value)
        finally:
            self._is_inside = False
            self._block.reset()

    def _leave(self, block: JoinBlock) -> None:
        try:
            if block.is_told:
                raise RuntimeError(ENDED)
            early = early_leaving(block)
            if early is not None:
                raise early
            block.answered()
            self._shadow = Shadow(block)
            is_last_joiner = self._shadow.follow()
            # What a hook raises from here on is its own matter.
            block.is_over = True
            for hook in block.hooks:
                hook.post_hook(is_last_joiner)
        except Exception as error:
            if block.is_over:
                block.note.leave(error)
            elif not block.is_told:
                fail(block, error)
            raise
        finally:
            block.running = 0
