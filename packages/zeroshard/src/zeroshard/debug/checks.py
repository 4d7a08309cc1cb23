"""What ``TORCH_DISTRIBUTED_DEBUG`` adds to a step: a log of what the optimizer is, or checks of every step.

The checks of the level DETAIL are collective, or part of a collective block, so that every rank raises the same error.
Ranks compare one word; only after a difference they compare the digests of all tensors, to name the tensor and rank.
"""

from __future__ import annotations

import ctypes
import logging
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from zeroshard_comm import DisagreementError, agreed
from zeroshard_core import Plan

from zeroshard.debug.describe import describe
from zeroshard.plan.layout import label_in

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
            _logger.info("%s\n%s", describe(engine), engine.layout.plan)


def step_debugging(engine: Engine) -> StepLog | None:
    """Return what the level asks for that was set when the optimizer was built; None for ``OFF``."""
    level = engine.policy.debug_level
    return None if level == "OFF" else InvariantChecks(engine) if level == "DETAIL" else StepLog(engine)


_BEFORE, _AFTER = "step(), before the update", "step(), after parameters were broadcast"


class InvariantChecks(StepLog):
    """Checks the steps of one optimizer, and logs as :class:`StepLog`."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._left: list[int] = []
        """Digests of the parameters, equal on all ranks, as the last step has left them."""

    def before_update(self) -> None:
        """Compare what the loop may have changed since the last step: parameters, gradients, settings. Collective."""
        engine, plan = self._engine, self._engine.layout.plan
        if engine.join.context is not None:
            # A rank without data gets only what it needs for a step.
            return
        with agreed(engine.coordinator, _BEFORE) as proposal:
            proposal.digest = engine.hyperparameters.update(engine.groups)
            proposal.detail = self._hyperparameters
        self._compare("parameter", plan, [digest_of(param) for param in engine.params], _BEFORE, self._left)
        if engine.exchange is None:
            self._compare("gradient of", plan, [digest_of(param.grad) for param in engine.params], _BEFORE)

    def after_step(self) -> None:
        """Compare the parameters after a step. Collective."""
        engine, plan = self._engine, self._engine.layout.plan
        digests = [digest_of(param) for param in engine.params]
        active = zip(digests, engine.layout.active, strict=True)
        self._compare("parameter", plan, [digest if is_active else 0 for digest, is_active in active], _AFTER)
        self._left = digests
        super().after_step()

    def _hyperparameters(self) -> str:
        """Return them as text that ranks compare, each with the first tensor of its group."""
        config, settings = self._engine.layout.config, {}
        first = list(accumulate((len(group["params"]) for group in self._engine.groups), initial=0))
        for name, value in self._engine.hyperparameters.agreed.items():
            # The last group may be empty.
            index = min(first[int(name.rpartition(" ")[2])], first[-1] - 1)
            settings[f"for {label_in(config.plan, index)} and the rest of its group, {name}"] = value
        return replace(config, settings=settings).to_json()

    def _compare(self, what: str, plan: Plan, digests: Sequence[int], operation: str, left: Sequence[int] = ()) -> None:
        gathered = self._engine.coordinator.gather_ints(digests, operation)
        by_tensor = list(zip(*gathered, strict=True))
        found = [index for index, of_ranks in enumerate(by_tensor) if len(set(of_ranks)) > 1]
        for index in found[:1]:
            of_ranks, owners = by_tensor[index], plan.owners[index]
            before = left[index] if index < len(left) else None
            is_sent = operation == _AFTER and len(owners) == 1
            expected = of_ranks[owners[0]] if is_sent else expected_digest(of_ranks, owners[0], before)
            odd = [str(rank) for rank, digest in enumerate(of_ranks) if digest != expected]
            since = " since the last step" if expected == before else ""
            others = f" So do {len(found) - 1} other tensors." if len(found) > 1 else ""
            raise DisagreementError(
                f"{operation}: the {what} {label_in(plan, index)} differs between ranks: rank{'s' * (len(odd) > 1)} "
                f"{', '.join(odd)} changed it{since}, or did not get what the other ranks have; it belongs to rank "
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


def expected_digest(of_ranks: Sequence[int], owner: int, before: int | None = None) -> int:
    """Return the digest that is taken for right: the one before, or what most ranks have, or what the owner has."""
    if before is not None and before in of_ranks:
        return before
    counts = Counter(of_ranks)
    most = max(counts.values())
    return of_ranks[owner] if counts[of_ranks[owner]] == most else counts.most_common(1)[0][0]
