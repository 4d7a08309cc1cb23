"""Checks of every step at the level ``TORCH_DISTRIBUTED_DEBUG=DETAIL``: what must hold before an update and after it.

Each check is collective, or part of a collective block, so that every rank raises the same error. Ranks compare one
word; only after a difference they compare the digests of all tensors, to name the tensor and the rank.
"""

from __future__ import annotations

import ctypes
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from zeroshard_comm import DisagreementError, agreed
from zeroshard_core import Plan

from zeroshard.description import backward_bytes, shared_tensors, step_bytes
from zeroshard.layout import Layout
from zeroshard.local_shard import rows_of
from zeroshard.sharding import Sharding
from zeroshard.state.metadata import StateMetadata

_BEFORE, _AFTER = "step(), before the update", "step(), after parameters were shared"
_PADDING = 64 * 16
"""The most bytes that one tensor adds to a flat buffer: 64 elements of complex128."""


class InvariantChecks:
    """Checks the steps of one optimizer.

    Args:
        sharding: the plan at work.
        metadata: what state the ranks have told each other of.
        is_in_join: whether the optimizer is in a Join context, the same on all ranks. A rank without data gets only
            what it needs for a step, so that gradients and parameters are not compared before one.
    """

    def __init__(self, sharding: Sharding, metadata: StateMetadata, is_in_join: Callable[[], bool]) -> None:
        self._sharding, self._metadata, self._is_in_join = sharding, metadata, is_in_join
        self._left: list[int] = []
        """Digests of the parameters, equal on all ranks, as the last step has left them."""
        self._begun: tuple[Layout, int] | None = None
        self._ended: tuple[Layout, int] | None = None
        """The layout, and the bytes that had been sent: before the update, and at the end of the last step."""

    def before_update(self) -> None:
        """Check what the loop may have changed since the last step. Collective.

        Raises:
            DisagreementError: if parameters, gradients (unless a hook takes them in buckets), hyperparameters, or the
                numbers in the state of a cut tensor's parts differ between ranks; it names tensor and rank.
            RuntimeError: if a rank has state of what it does not own, or of other shapes or dtypes than it has told, or
                the local optimizer holds other memory than the model.
            PeerLostError: if a rank is gone.
        """
        sharding, plan = self._sharding, self._sharding.layout.plan
        control, compares = sharding.control, not self._is_in_join()
        with agreed(control, _BEFORE) as declared:
            if compares:
                declared.digest = sharding.hyperparameters.follow(sharding.groups)
                declared.detail = self._hyperparameters
            self._check_state()
            self._check_places()
        self._compare_parts(plan)
        if compares:
            self._compare("parameter", plan, [digest_of(param) for param in sharding.params], _BEFORE, self._left)
            if sharding.buckets is None:
                grads = [digest_of(param.grad) for param in sharding.params]
                self._compare("gradient of", plan, grads, _BEFORE)
        self._begun = sharding.layout, control.traffic.of("share").bytes_sent

    def after_step(self) -> None:
        """Check what a step has done. Collective.

        Raises:
            DisagreementError: if a parameter differs between ranks; it names tensor and rank.
            RuntimeError: if a rank has sent more or less than the plan predicts.
            PeerLostError: if a rank is gone.
        """
        sharding, plan = self._sharding, self._sharding.layout.plan
        with agreed(sharding.control, _AFTER):
            self._check_traffic(plan)
        digests = [digest_of(param) for param in sharding.params]
        active = zip(digests, sharding.layout.active, strict=True)
        self._compare("parameter", plan, [digest if is_active else 0 for digest, is_active in active], _AFTER)
        self._left = digests

    # ------------------------------------------------------------------ on this rank

    def _hyperparameters(self) -> str:
        """Return them as text that ranks compare, each with the first tensor of its group."""
        groups, declaration, first = self._sharding.groups, self._sharding.layout.declaration, [0]
        for group in groups:
            first.append(first[-1] + len(group["params"]))
        settings = {}
        for name, value in self._sharding.hyperparameters.agreed.items():
            # The last group may be empty.
            index = min(first[int(name.rpartition(" ")[2])], first[-1] - 1)
            settings[f"for {_title(declaration.plan, index)} and the rest of its group, {name}"] = value
        return replace(declaration, settings=settings).to_json()

    def _check_state(self) -> None:
        sharding = self._sharding
        local, tensors = sharding.local, sharding.layout.plan.tensors
        owned = {shard.tensor for shard in local.shards.values()}
        foreign = [key for key in local.optim.state if isinstance(key, torch.Tensor) and key not in owned]
        for index, param in enumerate(sharding.params):
            if any(key is param for key in foreign):
                owners = ", ".join(map(str, sharding.layout.plan.owners[index]))
                raise RuntimeError(
                    f"the local optimizer has state of tensor {index} {tensors[index].name!r}, which belongs to "
                    f"rank {owners}: do not add state by hand, but load it with load_state_dict()"
                )
        if foreign:
            raise RuntimeError(
                f"the local optimizer has state of a tensor of shape {tuple(foreign[0].shape)} that is none of its "
                f"parameters: do not add state by hand, but load it with load_state_dict()"
            )
        difference = self._metadata.difference()
        if difference is not None:
            raise RuntimeError(f"{difference}: change the state with load_state_dict() only")

    def _check_places(self) -> None:
        """Raise if the local optimizer would step other memory than the model's parameters."""
        if self._sharding.sync.moved():
            # They are laid out again when all ranks have agreed.
            return
        for index, shard in self._sharding.local.shards.items():
            expected = rows_of(shard.shard, shard.param)
            if expected.layout is torch.strided and expected.data_ptr() != shard.rows.data_ptr():
                raise RuntimeError(
                    f"the local optimizer's tensor for {_title(self._sharding.layout.plan, index)} is no view of the "
                    f"parameter any more: its .data was rebound. Rebind only the .data of the model's parameters"
                )

    def _check_traffic(self, plan: Plan) -> None:
        sharding, rank, traffic = self._sharding, self._sharding.control.ranks.rank, self._sharding.control.traffic
        (begun, self._begun), ended = (self._begun, None), self._ended
        buckets = sharding.buckets.by_index.values() if sharding.buckets is not None else ()
        bucketed = [index for bucket in buckets for index in bucket.tensors]
        self._ended = sharding.layout, traffic.of("reduce").bytes_sent
        each = backward_bytes(plan, rank, bucketed)
        if ended is not None and ended[0] is sharding.layout and each and (self._ended[1] - ended[1]) % each:
            raise RuntimeError(
                f"{self._ended[1] - ended[1]} bytes of gradients were sent since the last step, which is no multiple "
                f"of the {each} bytes that the plan predicts for each backward"
            )
        if begun is None or begun[0] is not sharding.layout:
            # A plan that has changed in this step has moved gradients to other owners, too.
            return
        sent, active = traffic.of("share").bytes_sent - begun[1], shared_tensors(sharding)
        least = step_bytes(plan, rank, active)
        most = step_bytes(plan, rank, [*active, *bucketed])
        if sharding.sync.buffers:
            most += _PADDING * len(plan.tensors) * (plan.world_size - 1)
        if not (least <= sent <= most or sharding.sync.shares_sparse):
            raise RuntimeError(
                f"{sent} bytes of parameters were sent in this step, but the plan predicts {least}: tensors "
                f"{', '.join(_title(plan, s.tensor) for s in plan.of_rank(rank)[:3])}, ..., to each other rank"
            )

    # ------------------------------------------------------------------ over ranks

    def _compare(self, what: str, plan: Plan, digests: Sequence[int], operation: str, left: Sequence[int] = ()) -> None:
        control = self._sharding.control
        if control.is_unanimous(operation, zlib.crc32(repr(digests).encode())):
            return
        rows = control.all_gather_ints(digests, operation)
        found = [index for index, of_tensor in enumerate(zip(*rows, strict=True)) if len(set(of_tensor)) > 1]
        for index in found[:1]:
            of_ranks, owners = [row[index] for row in rows], plan.owners[index]
            before = left[index] if index < len(left) else None
            is_sent = operation == _AFTER and len(owners) == 1
            expected = of_ranks[owners[0]] if is_sent else expected_digest(of_ranks, owners[0], before)
            odd = [str(rank) for rank, digest in enumerate(of_ranks) if digest != expected]
            since = " since the last step" if expected == before else ""
            others = f" So do {len(found) - 1} other tensors." if len(found) > 1 else ""
            raise DisagreementError(
                f"{operation}: the {what} {_title(plan, index)} differs between ranks: rank{'s' * (len(odd) > 1)} "
                f"{', '.join(odd)} changed it{since}, or did not get what the other ranks have; it belongs to rank "
                f"{', '.join(map(str, owners))}.{others} Change the model alike on every rank"
            )

    def _compare_parts(self, plan: Plan) -> None:
        """Raise if owners of parts of one tensor differ in entries, or in values that are one for the whole tensor."""
        shards, state = self._sharding.local.shards, self._sharding.local.optim.state
        cut = [index for index in range(len(plan.tensors)) if plan.is_cut(index)]
        if not cut or self._sharding.control.alone:
            return
        mine = [_numbers(state.get(shards[index].tensor, {})) if index in shards else -1 for index in cut]
        rows = self._sharding.control.all_gather_ints(mine, _BEFORE)
        for place, index in enumerate(cut):
            of_owners = [rows[rank][place] for rank in plan.owners[index]]
            if len(set(of_owners)) > 1:
                usual = expected_digest(of_owners, 0)
                odd = [str(rank) for rank, number in zip(plan.owners[index], of_owners, strict=True) if number != usual]
                raise DisagreementError(
                    f"{_BEFORE}: the state of the parts of {_title(plan, index)} has other entries, or other numbers "
                    f"such as 'step', on rank {', '.join(odd)} than on the other owners: change the state with "
                    f"load_state_dict() only"
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
    """Return the digest that is taken for right: that of before, or that of most ranks, or that of the owner."""
    if before is not None and before in of_ranks:
        return before
    counts = Counter(of_ranks)
    most = max(counts.values())
    return of_ranks[owner] if counts[of_ranks[owner]] == most else counts.most_common(1)[0][0]


def _numbers(entries: Any) -> int:  # noqa: ANN401 - state may be anything
    """Return a digest of the keys of a state, and of the entries that have one value for the whole tensor."""
    if not isinstance(entries, dict):
        return 0
    single = {key: entry for key, entry in entries.items() if not (isinstance(entry, torch.Tensor) and entry.dim())}
    values = [(k, e.item() if isinstance(e, torch.Tensor) else e) for k, e in single.items()]
    return zlib.crc32(repr((sorted(map(str, entries)), sorted(values, key=str))).encode())


def _title(plan: Plan, index: int) -> str:
    return f"tensor {index} {plan.tensors[index].name!r}"
