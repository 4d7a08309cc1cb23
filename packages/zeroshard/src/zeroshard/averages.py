"""An average of the parameters over steps, such as an exponential moving one, of which every rank keeps 1/N."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress

import torch
from torch.optim.swa_utils import get_swa_multi_avg_fn
from zeroshard_comm import Coordinator, agreed

from zeroshard._torch_private import foreach_copy_
from zeroshard.local.extra_state import AVERAGE, COUNT, ExtraEntries, Loaded
from zeroshard.local.shard import LocalShard
from zeroshard.optimizer import ZeroRedundancyOptimizer
from zeroshard.plan.layout import with_settings

Averaging = Callable[[list[torch.Tensor], list[torch.Tensor], torch.Tensor], None]
"""Updates averages in place by the present values, given how many were averaged before; elementwise."""


class AveragedParameters:
    """Average the parameters over steps, as :class:`torch.optim.swa_utils.AveragedModel` does, each at its owner alone.

    A rank keeps 1/N of the average, among the optimizer's state: ``state_dict()`` lists it as ``"average_param"``, and
    checkpoints have it, at any number of ranks. Make this object before you load one. Where there are master weights,
    these are averaged.

    Buffers are not averaged, and neither are parameters that were never trainable.

    Args:
        optimizer: has the parameters.
        multi_avg_fn: updates averages, elementwise; ``torch.optim.swa_utils`` makes such functions, for example
            ``get_ema_multi_avg_fn(0.999)``. The average with equal weights if None.

    Constructing it is collective, :meth:`update` is not.

    Raises:
        ValueError: if the optimizer has averages already.

    Example::

        average = AveragedParameters(optimizer, get_ema_multi_avg_fn(0.999))
        for batch in batches:
            ...
            optimizer.step()
            average.update()
        with average.applied():
            evaluate(model)
    """

    def __init__(self, optimizer: ZeroRedundancyOptimizer, multi_avg_fn: Averaging | None = None) -> None:
        engine = optimizer._engine
        self._optimizer, self._average_by = optimizer, multi_avg_fn or get_swa_multi_avg_fn()
        self._averages = _Averages(engine.coordinator)
        with engine.collective(), agreed(engine.coordinator, "AveragedParameters()"):
            if AVERAGE in engine.local.extra.names:
                raise ValueError("this optimizer has averages of its parameters already: use those")
        engine.local.extra.add(self._averages)

    @property
    def n_averaged(self) -> int:
        """How many times :meth:`update` was called, before a load too."""
        return int(self._averages.count)

    def update(self) -> None:
        """Take the present values into the average: call it on every rank, after ``step()``. Not collective.

        Raises:
            RuntimeError: inside Join, where ranks without data make no such call, or in the block of :meth:`applied`.
        """
        engine, local = self._optimizer._engine, self._optimizer._engine.local
        if engine.join.context is not None:
            raise RuntimeError("averages cannot be updated inside Join: a rank without data would not update its part")
        engine.guard.check_allowed()
        # Parameters may have been written to, or their .data rebound, since the step.
        engine.current_layout()
        if self._averages.update(self._average_by):
            local.extra.list_entries(shard for shard in local.shards.values() if local.state_of(shard))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the parameters have the averages, on all ranks, while the block runs. Collective.

        Their own values stay on each rank, which takes as much memory as the parameters. Leaving the block restores
        them without communication, also after an exception on one rank. In the block ``step()``, :meth:`update`,
        ``load_state_dict()``, ``add_param_group()`` and another :meth:`applied` raise an error.

        Raises:
            DisagreementError, PeerLostError: if ranks differ in parameters or the number of updates, or one is gone.
            RuntimeError: if there was no :meth:`update` yet.
        """
        engine, originals = self._optimizer._engine, dict[torch.Tensor, torch.Tensor]()
        before, name = engine.guard.suspended, "AveragedParameters.applied()"
        try:
            with engine.collective(), torch.no_grad():
                with agreed(engine.coordinator, name) as proposal:
                    layout = engine.update_layout()
                    proposal.set(with_settings(layout, {"number of updates of the average": self.n_averaged}))
                    if not self.n_averaged:
                        raise RuntimeError("there is no average of the parameters yet: call update() after step()")
                engine.adopt(layout)
                with agreed(engine.coordinator, f"the memory for {name}"):
                    for param in compress(engine.params, engine.ever_trained()):
                        originals[param] = param.detach().clone()
                    self._averages.write()
                engine.broadcast_params()
                engine.coordinator.agree(f"the end of {name}")
            engine.guard.suspended = (
                "parameters have their averages: leave the block of AveragedParameters.applied() first"
            )
            yield
        finally:
            engine.guard.suspended = before
            with torch.no_grad():
                for param, original in originals.items():
                    param.copy_(original)


class _Averages(ExtraEntries):
    """The averages of what this rank owns, and how many values are in them."""

    names = (AVERAGE, COUNT)

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.count = torch.zeros((), dtype=torch.int64, device="cpu")
        self._averages: dict[int, torch.Tensor] = {}
        """By tensor; made from present values when it is first asked for."""
        self._shards: Sequence[LocalShard] = ()
        self._alike: list[tuple[list[torch.Tensor], list[torch.Tensor]]] | None = None
        """Averages and what they are of, by device and dtype; None if they have to be looked up."""

    def rebuild(self, shards: Sequence[LocalShard]) -> None:
        """Take over shards."""
        self._alike = None
        known, self._averages, self._shards = self._averages, {}, shards
        for shard in shards:
            average = known.get(shard.index)
            if average is not None and average.shape == shard.tensor.shape:
                self._averages[shard.index] = average.to(shard.tensor.device, shard.tensor.dtype)
            elif self.count:
                # What is trainable from now on has been what it is in all updates.
                self.entries(shard)

    def entries(self, shard: LocalShard) -> Mapping[str, torch.Tensor]:
        """Return the average of a shard, and the count; nothing if it was never trainable."""
        if shard.index not in self._averages:
            if not shard.param.requires_grad:
                return {}
            self._averages[shard.index], self._alike = shard.tensor.detach().clone(), None
        return {AVERAGE: self._averages[shard.index], COUNT: self.count}

    def update(self, average_by: Averaging) -> bool:
        """Take the present values into the averages, and return whether there are others than before."""
        is_new = self._alike is None
        alike = self._alike = self._alike or self._by_kind()
        with torch.no_grad():
            for averages, present in alike:
                if self.count == 0:
                    # The first values are the averages.
                    foreach_copy_(averages, present)
                else:
                    average_by(averages, present, self.count)
        self.count += 1
        return is_new

    def _by_kind(self) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        alike = defaultdict[object, tuple[list[torch.Tensor], list[torch.Tensor]]](lambda: ([], []))
        for shard in self._shards:
            if entries := self.entries(shard):
                averages, present = alike[shard.tensor.device, shard.tensor.dtype]
                averages.append(entries[AVERAGE])
                present.append(shard.tensor)
        return [*alike.values()]

    def write(self) -> None:
        """Write the averages to this rank's parts of the parameters."""
        for shard in self._shards:
            if shard.index in self._averages:
                shard.local_view.copy_(self._averages[shard.index])

    def load(self, loaded: Loaded) -> None:
        """Take over averages that were loaded; others begin with the present values, once they are asked for."""
        self._averages = {index: entries[AVERAGE] for index, entries in loaded.items() if AVERAGE in entries}
        self.count.zero_()
        self.rebuild(self._shards)
        mine = max((int(entries[COUNT]) for entries in loaded.values() if COUNT in entries), default=0)
        # Some ranks own nothing that was averaged.
        counts = self._coordinator.gather_ints([mine], "load_state_dict() of averages")
        self.count.fill_(max(count for [count] in counts))
