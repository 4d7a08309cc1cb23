"""Adds the logs of ``TORCH_DISTRIBUTED_DEBUG`` to a step and, at the level DETAIL, checks of every step.

Every rank raises the same error if ranks differ. An edit of the state raises only on its owner, which has the values.
"""

from __future__ import annotations

import ctypes
import logging
import zlib
from collections.abc import Callable, Sequence

import torch
from zeroshard_comm import Coordinator, DisagreementError

from zeroshard._torch_private import is_ignored_by_ddp
from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.plan.layout import label_in
from zeroshard.state.placeholder import leaves

_logger = logging.getLogger("zeroshard.debugging")


class StepChecks:
    """Logs the plan, buckets and traffic after the first step and after changes. At DETAIL, checks every step."""

    def __init__(self, coordinator: Coordinator, local: LocalOptimizer, *, compares: bool) -> None:
        """If ``compares``, compare the parameters that DistributedDataParallel ignores. Collective in that case."""
        self._coordinator, self._local, self._compares = coordinator, local, compares
        self._logged: object = None
        self._state: dict[int, list[object]] = {}
        # Other parameters have rank 0's values, or get them from DistributedDataParallel's constructor.
        ignored = [param if is_ignored_by_ddp(param) else None for param in local.params]
        self._compare("parameter, ignored by DistributedDataParallel,", ignored, "ZeroRedundancyOptimizer()")

    def compare_gradients(self) -> None:
        """Compare the gradients, which must be equal on all ranks. Call it if no source reduces them. Collective."""
        self._compare("gradient of", [param.grad for param in self._local.params], "step(), before the update")

    def compare_params(self, active: Sequence[bool], *, keeps_state: bool) -> None:
        """Compare the ``active`` parameters, which a step may have changed. Collective.

        ``keeps_state`` keeps digests of the state for :meth:`edited_state`; pass it if the step ran during backward.
        """
        changed = [param if is_active else None for param, is_active in zip(self._local.params, active, strict=True)]
        self._compare("parameter", changed, "step(), after parameters were broadcast")
        self._state = self._digests_of_state() if keeps_state and self._compares else {}

    def log(self, buckets: Sequence[Sequence[int]], description: Callable[[], str]) -> None:
        """Log a description if the plan, or the tensors of the buckets, have changed since the last log."""
        if self._logged != (self._local.plan, buckets):
            self._logged = self._local.plan, buckets
            _logger.info("%s\n%s", description(), self._local.plan)

    def edited_state(self) -> str:
        """Return the label of a tensor whose state was edited on this rank since a backward stepped; "" if none was."""
        now = self._digests_of_state() if self._state else {}
        edited = [index for index, digests in self._state.items() if now.get(index) != digests]
        return label_in(self._local.plan, edited[0]) if edited else ""

    def _digests_of_state(self) -> dict[int, list[object]]:
        found: dict[int, list[object]] = {}
        for index, shard in self._local.shards.items():
            entries = leaves(self._local.own_state(shard))
            found[index] = [digest_of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in entries]
        return found

    def _compare(self, what: str, tensors: Sequence[torch.Tensor | None], operation: str) -> None:
        if not self._compares:
            return
        plan = self._local.plan
        gathered = self._coordinator.gather_ints([*map(digest_of, tensors)], operation)
        by_tensor = list(zip(*gathered, strict=True))
        found = [index for index, of_ranks in enumerate(by_tensor) if len(set(of_ranks)) > 1]
        if not found:
            return
        index = found[0]
        owner, *_ = plan.owners[index]
        odd = [str(rank) for rank, digest in enumerate(by_tensor[index]) if digest != by_tensor[index][owner]]
        s = "s" if len(odd) > 1 else ""
        others = f" So do {len(found) - 1} other tensors." if len(found) > 1 else ""
        raise DisagreementError(
            f"{operation}: the {what} {label_in(plan, index)} differs between ranks: on rank{s} {', '.join(odd)} it is "
            f"not equal to the copy on its owner, rank {owner}.{others} Change the model in the same way on every rank"
        )


def digest_of(tensor: torch.Tensor | None) -> int:
    """Return the CRC-32 of a tensor's values; -1 for None. Waits for the device."""
    if tensor is None:
        return -1
    if tensor.layout is not torch.strided:
        whole = tensor.detach().coalesce()
        return zlib.crc32(repr((digest_of(whole.indices()), digest_of(whole.values()))).encode())
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32((ctypes.c_char * flat.numel()).from_address(flat.data_ptr()) if flat.numel() else b"")
