"""Trains with DistributedDataParallel and a sharded optimizer on uneven inputs, until every rank has used all its data.

A drop-in replacement for ``torch.distributed.algorithms.join``. Every rank announces each call, and a rank without data
makes the same call, as if its gradients were zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.join import Joinable, JoinHook

from zeroshard_integrations.join.context import JoinContext, check_joinables

__all__ = ["Join", "JoinHook", "Joinable"]


class Join:
    """A context in which every rank trains on as many batches as it has.

    Put ``with Join([ddp, optimizer]) as join:`` around the training loop. Entering is collective: all ranks enter with
    the same joinables and settings, in the same order. Inside, ranks announce each forward of a model, each backward,
    and each call of a sharded optimizer: each costs an agreement and one word per rank. Gradients of several
    backwards before one step add up; ``no_sync()`` raises.

    Args:
        joinables: a model in DistributedDataParallel without a communication hook, a sharded optimizer, at most one of
            each and in this order, and any other :class:`Joinable`; all of one process group.
        enable: if False, the context does nothing; pass False if inputs are even.
        throw_on_early_termination: raise an error on every rank as soon as one has run out of data.
        **kwargs: passed to the ``join_hook`` of every joinable. ``divide_by_initial_world_size`` (True) says whether
            gradients are averaged over all ranks, or over the ranks that still have data.

    Raises:
        ValueError: if joinables are missing, repeated, of several groups, in the wrong order, or torch's optimizer, if
            there are several models or sharded optimizers, or if one has a communication hook.
        TypeError, RuntimeError: if an object is not a joinable, or is already in a context.

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
        >>> join.running
        0
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        joinables: Sequence[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,  # noqa: ANN401 - arguments of any joinable
    ) -> None:
        self._joinables, self._enable = list(joinables), enable
        self._throws, self._arguments = throw_on_early_termination, kwargs
        self._ranks = check_joinables(self._joinables)
        self._context: JoinContext | None = None

    @property
    def running(self) -> int:
        """The number of ranks that still have data, as of the last announced call; 0 after the block."""
        if self._context is None:
            return self._ranks.world_size
        return len(self._context.join_round.running)

    notify_join_context = staticmethod(TorchJoin.notify_join_context)
    """Call it in a joinable before the collectives that its hook shadows, on every rank; torch's works too."""

    def __enter__(self) -> Join:
        """Enter the context. Collective.

        Raises:
            DisagreementError: if joinables or settings differ between ranks.
            PeerLostError: if a rank is gone.
            Exception: an error of a joinable's ``join_hook``, on every rank.
        """
        if self._enable:
            self._context = JoinContext(self._joinables, throws=self._throws, arguments=self._arguments)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Make the other ranks' calls, without data, until all ranks have left. Collective.

        Raises:
            DisagreementError: if ranks that still have data make different calls; on every rank.
            PeerLostError: if a rank is gone.
            Exception: an error of another rank inside the context.
        """
        context = self._context
        if context is None:
            return
        try:
            if value is None:
                context.shadow_others()
            elif isinstance(value, Exception):
                context.report_error(value)
            elif isinstance(value, GeneratorExit):
                context.report_error(RuntimeError("the generator that has the Join block was closed"))
        except Exception as error:
            context.report_error(error)
            raise
        finally:
            context.reset()
