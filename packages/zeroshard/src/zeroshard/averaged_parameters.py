"""An average of the parameters over steps, such as an exponential moving one, of which every rank keeps its share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch.optim.swa_utils import get_swa_multi_avg_fn
from zeroshard_comm import agreed

from zeroshard._torch_private import foreach_copy_
from zeroshard.added_state import AVERAGE, COUNT, State
from zeroshard.local_shard import LocalShard
from zeroshard.optimizer import ZeroRedundancyOptimizer
from zeroshard.sharding import Sharding

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
        multi_avg_fn: updates averages, elementwise: one of those that ``torch.optim.swa_utils`` makes, such as
            ``get_ema_multi_avg_fn(0.999)``; the average with equal weights if None.

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
        self._optimizer, self._average_by = optimizer, multi_avg_fn or get_swa_multi_avg_fn()
        added = self._sharding.local.added
        if AVERAGE in added.names:
            raise ValueError("this optimizer has averages of its parameters already: use those")
        self._averages = _Averages()
        added.add(self._averages)

    @property
    def _sharding(self) -> Sharding:
        return self._optimizer._sharded.sharding

    @property
    def n_averaged(self) -> int:
        """How many times :meth:`update` was called, before a load too."""
        return int(self._averages.count)

    def update(self) -> None:
        """Take the present values into the average: call it on every rank, after ``step()``. Not collective.

        Raises:
            RuntimeError: inside Join, where ranks without data make no such call, or in the block of :meth:`applied`.
        """
        if self._optimizer._sharded.joining.exchange is not None:
            raise RuntimeError("averages cannot be updated inside Join: a rank without data would not update its part")
        if self._sharding.refusal:
            raise RuntimeError(self._sharding.refusal)
        self._averages.update(self._average_by)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the parameters have the averages, on all ranks, while the block runs. Collective.

        Their own values stay on each rank, which takes as much memory as the parameters. Leaving the block brings them
        back without communication, also after an exception on one rank. In the block ``step()``, ``load_state_dict()``
        and another :meth:`applied` raise on every rank.

        Raises:
            DisagreementError, PeerLostError: if ranks differ in their parameters, or one is gone.
        """
        originals = self._exchanged()
        self._sharding.refusal = "parameters have their averages: leave the block of AveragedParameters.applied() first"
        try:
            yield
        finally:
            self._sharding.refusal = ""
            _restore(originals)

    def _exchanged(self) -> dict[torch.Tensor, torch.Tensor]:
        """Write averages to parameters on all ranks, and return the values that these had."""
        sharding, name = self._sharding, "AveragedParameters.applied()"
        originals: dict[torch.Tensor, torch.Tensor] = {}
        with self._optimizer._sharded.collective(), torch.no_grad():
            layout = sharding.layout
            with agreed(sharding.control, name) as declared:
                layout = sharding.update_layout(sharding.groups)
                declared.set(layout.declaration)
            if layout is not sharding.layout:
                sharding.adopt(layout, sharding.groups)
            try:
                with agreed(sharding.control, f"the memory for {name}"):
                    for index in sorted(layout.settled):
                        originals[sharding.params[index]] = sharding.params[index].detach().clone()
                self._averages.write()
                sharding.share_now()
                sharding.control.check_consistent(f"the end of {name}")
            except BaseException:
                _restore(originals)
                raise
        return originals


def _restore(originals: Mapping[torch.Tensor, torch.Tensor]) -> None:
    with torch.no_grad():
        for param, original in originals.items():
            param.copy_(original)


class _Averages:
    """The averages of what this rank owns, and how many values are in them.

    Attributes:
        count: int64, 0-dim, on the CPU.
    """

    names = (AVERAGE, COUNT)

    def __init__(self) -> None:
        self.count = torch.zeros((), dtype=torch.int64, device="cpu")
        self._averages: dict[int, torch.Tensor] = {}
        self._shards: list[LocalShard] = []
        self._alike: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []

    def follow(self, shards: Sequence[LocalShard]) -> None:
        """Take over shards; trainable ones that are new begin with their present values."""
        known, self._averages, self._shards = self._averages, {}, []
        alike: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for shard in shards:
            values, average = shard.tensor, known.get(shard.index)
            if values.layout is not torch.strided or not (average is not None or shard.param.requires_grad):
                continue
            if average is None or average.shape != values.shape:
                average = values.detach().clone()
            average = average.to(values.device, values.dtype)
            self._averages[shard.index] = average
            self._shards.append(shard)
            averages, present = alike.setdefault((values.device, values.dtype), ([], []))
            averages.append(average)
            present.append(values)
        self._alike = [*alike.values()]

    def entries(self, shard: LocalShard) -> Mapping[str, torch.Tensor]:
        """Return the average of a shard, and the count, if it has one."""
        average = self._averages.get(shard.index)
        return {} if average is None else {AVERAGE: average, COUNT: self.count}

    def update(self, average_by: Averaging) -> None:
        """Take the present values into the averages; the first ones are the averages."""
        with torch.no_grad():
            for averages, present in self._alike:
                if self.count == 0:
                    foreach_copy_(averages, present)
                else:
                    average_by(averages, present, self.count)
        self.count += 1

    def write(self) -> None:
        """Write the averages to this rank's parts of the parameters."""
        for shard in self._shards:
            shard.rows.copy_(self._averages[shard.index])

    def load(self, state: State) -> None:
        """Take over averages from a state that was loaded, or where it has none, the present values."""
        loaded = {shard.index: state.get(shard.tensor) or {} for shard in self._shards}
        with torch.no_grad():
            for shard in self._shards:
                self._averages[shard.index].copy_(loaded[shard.index].get(AVERAGE, shard.tensor))
        self.count.fill_(max((int(entries[COUNT]) for entries in loaded.values() if COUNT in entries), default=0))
