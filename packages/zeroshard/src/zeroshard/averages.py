"""Averages the parameters over steps, for example by an exponential moving average. Each rank keeps 1/N of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress

import torch
from torch.optim.swa_utils import get_swa_avg_fn, get_swa_multi_avg_fn
from zeroshard_comm import Coordinator, agreed

from zeroshard._torch_private import foreach_copy_, foreach_devices
from zeroshard.local.extra_state import AVERAGE, COUNT, ExtraEntries, Loaded
from zeroshard.local.shard import LocalShard
from zeroshard.optimizer import ZeroRedundancyOptimizer
from zeroshard.param_buffers import broadcast_params
from zeroshard.plan.layout import with_settings

Averaging = Callable[[list[torch.Tensor], list[torch.Tensor], torch.Tensor], None]
"""Updates averages in place and elementwise, given the averages, the current values and the number averaged before."""


class AveragedParameters:
    """Average the parameters over steps, as :class:`torch.optim.swa_utils.AveragedModel` does, only on their owners.

    Each rank keeps 1/N of the average in the optimizer's state. ``state_dict()`` lists it as ``"average_param"``, and
    checkpoints contain it, for any number of ranks. Construct this object before you load a checkpoint. With master
    weights, it averages the master weights.

    Buffers, and parameters that were never trainable, are not averaged.

    Args:
        optimizer: the optimizer of the parameters.
        multi_avg_fn: updates averages elementwise; ``torch.optim.swa_utils`` makes such functions, for example
            ``get_ema_multi_avg_fn(0.999)``. If None, all steps have equal weights.

    The constructor is collective, but :meth:`update` is not.

    Raises:
        ValueError: if the optimizer already has averages.

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
        self._optimizer, self._average_by = optimizer, multi_avg_fn or _average_equally
        self._averages = _Averages(engine.coordinator)
        with engine.collective(), agreed(engine.coordinator, "AveragedParameters()"):
            if AVERAGE in engine.local.extra.names:
                raise ValueError("this optimizer already has averages of its parameters: use its AveragedParameters")
        engine.local.extra.add(self._averages)

    @property
    def n_averaged(self) -> int:
        """The number of calls of :meth:`update`, including calls before a load."""
        return int(self._averages.count)

    def update(self) -> None:
        """Add the current values to the average. Call it on every rank, after ``step()``. Not collective.

        Raises:
            RuntimeError: inside Join, where ranks without data make no such call, or in the block of :meth:`applied`.
        """
        engine, local = self._optimizer._engine, self._optimizer._engine.local
        if engine.join.context is not None:
            raise RuntimeError("averages cannot be updated inside Join: a rank without data would not update its part")
        engine.guard.check_allowed()
        # Parameters may have been written to, or their .data rebound, since the step.
        engine.layouts.follow_params()
        if self._averages.update(self._average_by):
            local.extra.list_entries(shard for shard in local.shards.values() if local.state_of(shard))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Set the parameters to their averages on all ranks while the block runs. Collective.

        Each rank keeps a copy of their values, which takes as much memory as the parameters. Leaving the block restores
        them without communication, even after an exception on one rank. In the block, ``step()``, :meth:`update`,
        ``load_state_dict()``, ``add_param_group()`` and another :meth:`applied` raise.

        Raises:
            DisagreementError, PeerLostError: if ranks differ in parameters or the number of updates, or one is gone.
            RuntimeError: before the first :meth:`update`.
        """
        engine, originals = self._optimizer._engine, dict[torch.Tensor, torch.Tensor]()
        before, name = engine.guard.suspended, "AveragedParameters.applied()"
        try:
            with engine.collective(), torch.no_grad():
                with agreed(engine.coordinator, name) as proposal:
                    layout = engine.layouts.update()
                    proposal.set(with_settings(layout, {"number of updates of the average": self.n_averaged}))
                    if not self.n_averaged:
                        raise RuntimeError("there is no average of the parameters yet: call update() after step()")
                engine.layouts.adopt(layout)
                with agreed(engine.coordinator, f"the memory for {name}"):
                    trained = engine.metadata.ever_trained()
                    for param in compress(engine.local.params, trained):
                        originals[param] = param.detach().clone()
                    self._averages.write()
                broadcast_params(engine.coordinator, engine.local.params, engine.local.plan, trained)
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


def _average_equally(averages: list[torch.Tensor], present: list[torch.Tensor], count: torch.Tensor) -> None:
    """Give all steps equal weights, by the same operations as AveragedModel, which differ between devices."""
    if averages[0].device.type in foreach_devices():
        get_swa_multi_avg_fn()(averages, present, count)
        return
    average_by = get_swa_avg_fn()
    for average, value in zip(averages, present, strict=True):
        average.copy_(average_by(average, value, count))


class _Averages(ExtraEntries):
    """Holds the averages of this rank's shards, and the number of steps in them."""

    names = (AVERAGE, COUNT)

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.count = torch.zeros((), dtype=torch.int64, device="cpu")
        self._averages: dict[int, torch.Tensor] = {}
        """The averages by tensor; each begins with the current values when it is first read."""
        self._shards: Sequence[LocalShard] = ()
        self._alike: list[tuple[list[torch.Tensor], list[torch.Tensor]]] | None = None
        """The averages and the averaged tensors, by device and dtype; None if shards have changed."""

    def rebuild(self, shards: Sequence[LocalShard]) -> None:
        """Adopt this rank's shards."""
        self._alike = None
        known, self._averages, self._shards = self._averages, {}, shards
        for shard in shards:
            average = known.get(shard.index)
            if average is not None and average.shape == shard.tensor.shape:
                self._averages[shard.index] = average.to(shard.tensor.device, shard.tensor.dtype)
            elif self.count:
                # A parameter that has become trainable had its current values in all updates.
                self.entries(shard)

    def entries(self, shard: LocalShard) -> Mapping[str, torch.Tensor]:
        """Return the average of a shard, and the count; empty if it was never trainable."""
        if shard.index not in self._averages:
            if not shard.param.requires_grad:
                return {}
            self._averages[shard.index], self._alike = shard.tensor.detach().clone(), None
        return {AVERAGE: self._averages[shard.index], COUNT: self.count}

    def update(self, average_by: Averaging) -> bool:
        """Add the current values to the averages. Return True if shards may have new averages."""
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
        """Adopt loaded averages. Other averages begin with the current values when they are first read."""
        self._averages = {index: entries[AVERAGE] for index, entries in loaded.items() if AVERAGE in entries}
        self.count.zero_()
        self.rebuild(self._shards)
        mine = max((int(entries[COUNT]) for entries in loaded.values() if COUNT in entries), default=0)
        # Some ranks own nothing that was averaged.
        counts = self._coordinator.gather_ints([mine], "load_state_dict() of averages")
        self.count.fill_(max(count for [count] in counts))
