"""What ``TORCH_DISTRIBUTED_DEBUG`` adds to a step: a log of what the optimizer is, or checks of every step.

At the level DETAIL every rank raises the same error if ranks differ. Edits of the state, which are the owner's alone,
raise on the rank that has made them.
"""

from __future__ import annotations

import ctypes
import logging
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from zeroshard_comm import DisagreementError

from zeroshard.debug.describe import describe
from zeroshard.plan.layout import label_in
from zeroshard.state.placeholder import leaves

if TYPE_CHECKING:
    from zeroshard.engine import Engine

_logger = logging.getLogger("zeroshard.debugging")


class StepLog:
    """Logs plan, buckets and traffic after the first step, and after steps that have changed plan or buckets."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._logged: object = None

    def before_update(self) -> None:
        """Do nothing: there are no checks at this level."""

    def after_step(self) -> None:
        """Log what has changed."""
        engine = self._engine
        buckets = engine.exchange.buckets.by_index.items() if engine.exchange is not None else ()
        present = engine.layout.plan, [(index, bucket.tensors) for index, bucket in buckets]
        if present != self._logged:
            self._logged = present
            _logger.info("%s\n%s", describe(engine).to_text(), engine.layout.plan)

    def edited_state(self) -> str:
        """Name no tensor: the state is not looked at, at this level."""
        return ""


def step_debugging(engine: Engine) -> StepLog | None:
    """Return what the level asks for that was set when the optimizer was built; None for ``OFF``."""
    level = engine.policy.debug_level
    return None if level == "OFF" else InvariantChecks(engine) if level == "DETAIL" else StepLog(engine)


class InvariantChecks(StepLog):
    """Checks the steps of one optimizer, and logs as :class:`StepLog`. Constructing it is collective."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._state: dict[int, list[object]] = {}
        # Others have rank 0's values, or get them when DistributedDataParallel is built.
        ignored = [param if getattr(param, "_ddp_ignored", False) else None for param in engine.params]
        self._compare("parameter, ignored by DistributedDataParallel,", ignored, "ZeroRedundancyOptimizer()")

    def before_update(self) -> None:
        """Compare the gradients, if no hook reduces them. Collective."""
        engine = self._engine
        # A rank without data gets only what it needs for a step.
        if engine.exchange is None and engine.join.context is None:
            self._compare("gradient of", [param.grad for param in engine.params], "step(), before the update")

    def after_step(self) -> None:
        """Compare the parameters after a step. Collective."""
        engine = self._engine
        active = zip(engine.params, engine.layout.active, strict=True)
        changed = [param if is_active else None for param, is_active in active]
        self._compare("parameter", changed, "step(), after parameters were broadcast", by_owner=True)
        self._state = self._digests_of_state() if engine.early_steps is not None else {}
        super().after_step()

    def edited_state(self) -> str:
        """Name a tensor of which this rank's state was edited since the last step; return "" if there is none."""
        now = self._digests_of_state()
        edited = [index for index, digests in self._state.items() if now.get(index) != digests]
        return label_in(self._engine.layout.plan, edited[0]) if edited else ""

    def _digests_of_state(self) -> dict[int, list[object]]:
        local = self._engine.local
        return {
            index: [digest_of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves(entries)]
            for index, shard in local.shards.items()
            for entries in [local.optim.state.get(shard.tensor)]
        }

    def _compare(
        self, what: str, tensors: Sequence[torch.Tensor | None], operation: str, *, by_owner: bool = False
    ) -> None:
        """Compare tensors of all ranks; with ``by_owner`` the values of a tensor's only owner are right. Collective."""
        plan = self._engine.layout.plan
        gathered = self._engine.coordinator.gather_ints([*map(digest_of, tensors)], operation)
        by_tensor = list(zip(*gathered, strict=True))
        found = [index for index, of_ranks in enumerate(by_tensor) if len(set(of_ranks)) > 1]
        for index in found[:1]:
            of_ranks, owners = by_tensor[index], plan.owners[index]
            is_sent = by_owner and len(owners) == 1
            expected = of_ranks[owners[0]] if is_sent else expected_digest(of_ranks, owners[0])
            odd = [str(rank) for rank, digest in enumerate(of_ranks) if digest != expected]
            others = f" So do {len(found) - 1} other tensors." if len(found) > 1 else ""
            raise DisagreementError(
                f"{operation}: the {what} {label_in(plan, index)} differs between ranks: rank{'s' * (len(odd) > 1)} "
                f"{', '.join(odd)} changed it, or did not get what the other ranks have; it belongs to rank "
                f"{', '.join(map(str, owners))}.{others} Change the model alike on every rank"
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


def expected_digest(of_ranks: Sequence[int], owner: int) -> int:
    """Return the digest that is taken for right: what most ranks have, or what the owner has."""
    counts = Counter(of_ranks)
    most = max(counts.values())
    return of_ranks[owner] if counts[of_ranks[owner]] == most else counts.most_common(1)[0][0]
