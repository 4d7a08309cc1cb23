"""Master weights: float32 copies of half-precision parameters, at their owners; the local optimizer steps these.

Gradients are converted to float32 for the step, and parameters get the copies rounded to their own dtype, as in
`Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_. In checkpoints they are the entry ``"master_param"``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from zeroshard._torch_private import foreach_copy_, version_of

ENTRY = "master_param"
_HALF = (torch.float16, torch.bfloat16)
_State = MutableMapping[Any, Any]


class _Shard(Protocol):
    """One shard of this rank; it is a :class:`zeroshard.local_optimizer.LocalShard`."""

    @property
    def param(self) -> torch.Tensor: ...
    @property
    def tensor(self) -> torch.Tensor: ...
    @property
    def rounded(self) -> torch.Tensor | None: ...


def needs_master(param: torch.Tensor) -> bool:
    """Whether a parameter has less than single precision."""
    return param.dtype in _HALF and param.layout is torch.strided


class MasterWeights:
    """The master weights of this rank, which are the tensors of the local optimizer.

    A parameter always has its master's rounded values after a step. Where it has others before the next one, as after a
    model was loaded or averaged, the master takes these.
    """

    def __init__(self) -> None:
        self._shards: Sequence[_Shard] = ()
        self._versions: list[int] = []

    def follow(self, shards: Iterable[_Shard]) -> None:
        """Take over the shards of a plan, those without a master too."""
        self._shards = [shard for shard in shards if shard.rounded is not None]
        self._versions = []

    def refresh(self) -> None:
        """Take over what was written to parameters since :meth:`note`, but for writes through ``.data``."""
        versions = [version_of(shard.param) for shard in self._shards]
        if versions == self._versions:
            return
        with torch.no_grad():
            for shard in self._shards:
                master, values = shard.tensor, shard.rounded
                assert values is not None
                master.copy_(torch.where(master.to(values.dtype) == values, master, values))
        self._versions = versions

    def note(self) -> None:
        """Take note that parameters have the masters' values: a step has ended."""
        self._versions = [version_of(shard.param) for shard in self._shards]

    def round(self, shards: Iterable[_Shard] | None = None) -> None:
        """Write the masters of some shards, or of all, to their parameters."""
        pairs = [(each.rounded, each.tensor) for each in shards or self._shards if each.rounded is not None]
        if pairs:
            with torch.no_grad():
                foreach_copy_([values for values, _ in pairs], [master for _, master in pairs])

    @contextmanager
    def stepped(self, state: _State, shards: Sequence[_Shard] | None = None) -> Iterator[None]:
        """Around a step of the local optimizer: hide the entries from it, as it makes its own where there are none.

        Args:
            state: of the local optimizer.
            shards: which are stepped, all with masters; None for all.
        """
        shards = self._shards if shards is None else shards
        hidden = [state[each.tensor].pop(ENTRY, None) if each.tensor in state else None for each in shards]
        try:
            yield
        finally:
            for shard, entry in zip(shards, hidden, strict=True):
                if entry is not None or shard.tensor.grad is not None:
                    state[shard.tensor][ENTRY] = shard.tensor.detach() if entry is None else entry
                shard.tensor.grad = None
            if shards:
                self.round(shards)

    def list_in(self, state: _State) -> None:
        """Add entries for trainable parameters, before any step."""
        for shard in self._shards:
            if shard.param.requires_grad:
                state[shard.tensor][ENTRY] = shard.tensor.detach()

    def complete(self, state: _State) -> None:
        """Make entries that a loaded state lacks, from parameters."""
        for shard in self._shards:
            assert shard.rounded is not None
            if state.get(shard.tensor):
                state[shard.tensor].setdefault(ENTRY, shard.rounded.float())

    def load(self, state: _State) -> None:
        """Take over the values of a state that all ranks have loaded."""
        with torch.no_grad():
            for shard in self._shards:
                assert shard.rounded is not None
                entries = state.get(shard.tensor) or {}
                shard.tensor.copy_(entries.get(ENTRY, shard.rounded))
                if entries:
                    entries[ENTRY] = shard.tensor.detach()
        self._versions = []
