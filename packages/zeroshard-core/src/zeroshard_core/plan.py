"""The plan: an immutable value that says which rank owns which rows of which tensor. It needs no process group."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from zeroshard_core.plan_text import canonical_bytes, difference, ranks_to_text, read_json, write_json
from zeroshard_core.spec import ALIGNMENT, Shard, TensorSpec


@dataclass(frozen=True, repr=False)
class Plan:
    """Which rank owns which rows of which tensor.

    A tensor has one owner, or is cut between rows (see :class:`Shard`) into one part for each of several owners. Parts
    begin at the rows in ``starts``. If it is empty, they differ by at most :attr:`TensorSpec.cut_step` rows, and the
    first owners have the larger parts.

    >>> import torch
    >>> plan = Plan(2, (TensorSpec("weight", (3, 64), torch.float32),), ((1, 0),), (64.0, 128.0))
    >>> plan.of_rank(0)
    (Shard(tensor=0, rank=0, dim=0, start=2, stop=3, row_numel=64),)
    >>> plan
    Plan for 2 ranks: 1 tensor (1 cut), 192 elements, 768 bytes, imbalance 1.333
      rank       parts        elements           bytes  load / mean
         0           1              64             256        0.667
         1           1             128             512        1.333
      heaviest: weight of ranks 1, 0

    Attributes:
        world_size: number of ranks.
        tensors: the tensors that are owned; the index of a tensor is its position here.
        owners: for each tensor the ranks that own it, in the order of their rows.
        loads: cost per rank, as the partition counted it.
        heaviest: cost of the heaviest tensor that has one owner.
        starts: for each tensor the first row of each part, or ``()`` if it is cut evenly; ``()`` if all are.
        state_loads: bytes of optimizer state per rank; ``()`` if not known.
        weights: cost of each tensor; ``()`` if not known.
        classes: optimizer class of each param group, and whether its cost is only assumed; ``()`` if not known.

    Raises:
        ValueError: if a tensor cannot belong to its owners or be cut at its rows, a number is negative or not finite,
            or there are too few or too many values of one kind.
    """

    world_size: int
    tensors: tuple[TensorSpec, ...]
    owners: tuple[tuple[int, ...], ...]
    loads: tuple[float, ...]
    heaviest: float = 0.0
    starts: tuple[tuple[int, ...], ...] = ()
    state_loads: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"a plan needs at least one rank, but world_size is {self.world_size}")
        count = len(self.tensors)
        lengths = {"loads": self.world_size, "state_loads": self.world_size}
        for name, length in {**lengths, "owners": count, "starts": count, "weights": count}.items():
            found = len(getattr(self, name))
            if found != length and (found or name in ("loads", "owners")):
                text = f"a plan of {count} tensors for {self.world_size} ranks should have {length} {name}"
                raise ValueError(f"{text}, but has {found}")
        if not all(0 <= number < math.inf for number in (*self.loads, self.heaviest, *self.state_loads, *self.weights)):
            raise ValueError("the loads, weights and bytes of state of a plan should be finite and not negative")
        for index, (spec, ranks) in enumerate(zip(self.tensors, self.owners, strict=True)):
            check_owners(index, spec, ranks, self.world_size)
        if self.starts:
            uneven = tuple(map(_uneven, range(count), self.tensors, self.owners, self.starts))
            object.__setattr__(self, "starts", uneven if any(uneven) else ())

    @property
    def shards(self) -> tuple[Shard, ...]:
        """All shards, by tensor and row. Each access makes new ones, millions for a large model on many ranks."""
        return tuple([shard for tensor in range(len(self.tensors)) for shard in self.of_tensor(tensor)])

    def of_rank(self, rank: int) -> tuple[Shard, ...]:
        """Return the shards that a rank owns, by tensor index; raise IndexError if there is no such rank."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"there is no rank {rank}; the plan is for {self.world_size} ranks")
        mine = [(index, ranks.index(rank)) for index, ranks in enumerate(self.owners) if rank in ranks]
        return tuple([self._part(index, rank, *self._bounds(index)[place : place + 2]) for index, place in mine])

    def of_tensor(self, tensor: int) -> tuple[Shard, ...]:
        """Return the shards of a tensor, by row, at least one; raise IndexError if there is no such tensor."""
        owned = zip(self._owners_of(tensor), pairwise(self._bounds(tensor)), strict=True)
        return tuple([self._part(tensor, rank, *rows) for rank, rows in owned])

    def is_cut(self, tensor: int) -> bool:
        """Return True if a tensor has several owners; raise IndexError if there is no such tensor."""
        return len(self._owners_of(tensor)) > 1

    @cached_property
    def imbalance(self) -> float:
        """The largest load divided by the mean load; 1.0 if all loads are 0."""
        return _imbalance(self.loads)

    @property
    def imbalances(self) -> Mapping[str, float]:
        """The largest value divided by the mean, of ``"work"`` (the loads), ``"sent"``, and ``"state"`` if known."""
        known = {"work": self.loads, "state": self.state_loads, "sent": self.sent_loads}
        return {name: _imbalance(loads) for name, loads in known.items() if loads}

    @cached_property
    def sent_loads(self) -> tuple[int, ...]:
        """The bytes of trainable parameters that each rank owns. It sends their new values in every step."""
        loads = [0] * self.world_size
        for index, spec in enumerate(self.tensors):
            for shard in self.of_tensor(index) if spec.trainable else ():
                loads[shard.rank] += shard.numel * spec.dtype.itemsize
        return tuple(loads)

    @cached_property
    def lower_bound(self) -> float:
        """A lower bound of the largest load: the mean, or the load that uncut tensors force on one of the ranks."""
        whole = [weight for weight, ranks in zip(self.weights, self.owners, strict=False) if len(ranks) == 1]
        return max(math.fsum(self.loads) / self.world_size, self.heaviest, least_largest(whole, self.world_size))

    @property
    def heaviest_tensors(self) -> tuple[int, ...]:
        """Indices of the three heaviest tensors, the heaviest first; empty if ``weights`` are not known."""
        return tuple(sorted(range(len(self.weights)), key=self.weights.__getitem__, reverse=True)[:3])

    @property
    def useful_ranks(self) -> int | None:
        """The most ranks with which the heaviest uncut tensor costs at most the mean; None if it costs nothing."""
        return int(math.fsum(self.loads) / self.heaviest) if self.heaviest else None

    def fingerprint(self) -> str:
        """Return 64 hex digits (SHA-256) that are equal for plans of equal world size, tensors, owners and rows.

        Loads do not count. The value does not depend on the process, the hash seed or the Python version.
        """
        return self._fingerprint

    def difference(self, other: Plan) -> str | None:
        """Describe the first difference in world size, tensors, owners or rows; ``None`` if fingerprints are equal."""
        return difference(self, other)

    def to_json(self) -> str:
        """Return the plan as JSON text, from which :meth:`from_json` makes an equal plan."""
        return write_json(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Make a plan from the text of :meth:`to_json`; raise ValueError if it is damaged or of another version."""
        return read_json(text, Plan)

    def __repr__(self) -> str:
        """Return a table of at most ten lines: totals, ranks (the most and the least loaded), heaviest tensors."""
        count, cut = len(self.tensors), sum(len(ranks) > 1 for ranks in self.owners)
        elements, nbytes = sum(spec.numel for spec in self.tensors), sum(spec.nbytes for spec in self.tensors)
        lines = [
            f"Plan for {self.world_size} rank{'s' * (self.world_size > 1)}: {count} tensor{'s' * (count != 1)} "
            f"({cut} cut), {elements:,} elements, {nbytes:,} bytes, imbalance {self.imbalance:.3f}",
            f"  {'rank':>4}{'parts':>12}{'elements':>16}{'bytes':>16}{'load / mean':>13}",
        ]
        by_load = sorted(range(self.world_size), key=self.loads.__getitem__)
        shown = sorted({*by_load[:2], *by_load[-2:]})
        mean = math.fsum(self.loads) / self.world_size or 1.0
        for rank in shown:
            mine = self.of_rank(rank)
            numel = sum(shard.numel for shard in mine)
            size = sum(shard.numel * self.tensors[shard.tensor].dtype.itemsize for shard in mine)
            lines.append(f"  {rank:>4}{len(mine):>12,}{numel:>16,}{size:>16,}{self.loads[rank] / mean:>13.3f}")
        if len(shown) < self.world_size:
            lines.append(f"  ({self.world_size - len(shown)} ranks between these in load)")
        largest = self.heaviest_tensors or sorted(range(count), key=lambda index: -self.tensors[index].numel)[:3]
        if largest:
            named = [f"{self.tensors[index].name} of {ranks_to_text(self.owners[index])}" for index in largest]
            lines.append(f"  heaviest: {'; '.join(named)}"[:120])
        if self.classes:
            of_kinds = [f"{name} {value:.3f}" for name, value in self.imbalances.items() if name != "work"]
            at_bound = max(self.loads) / (self.lower_bound or 1.0)
            classes = ", ".join(dict.fromkeys(self.classes))
            lines.append(f"  {classes}; load / lower bound {at_bound:.3f}, imbalance of {', of '.join(of_kinds)}"[:120])
            if (self.useful_ranks or math.inf) < self.world_size:
                lines.append(f"  useful ranks: {self.useful_ranks}; a tensor that stays whole costs more than the mean")
        return "\n".join(lines)

    @cached_property
    def _fingerprint(self) -> str:
        return hashlib.sha256(canonical_bytes(self)).hexdigest()

    def _owners_of(self, tensor: int) -> tuple[int, ...]:
        if not 0 <= tensor < len(self.tensors):
            raise IndexError(f"there is no tensor {tensor}; the plan is for {len(self.tensors)} tensors")
        return self.owners[tensor]

    def _bounds(self, tensor: int) -> list[int]:
        return cuts(self.tensors[tensor], len(self.owners[tensor]), self.starts[tensor] if self.starts else ())

    def _part(self, tensor: int, rank: int, start: int, stop: int) -> Shard:
        return self.tensors[tensor].shard(tensor=tensor, rank=rank, start=start, stop=stop)


def _imbalance(loads: Sequence[float]) -> float:
    mean = math.fsum(loads) / len(loads)
    return max(loads) / mean if mean > 0 else 1.0


def least_largest(weights: Sequence[float], world_size: int) -> float:
    """Return a lower bound of the largest load: one of N ranks has at least k + 1 of the k N + 1 heaviest tensors."""
    sums = [0.0, *accumulate(sorted(weights, reverse=True))]
    shared = range((len(weights) - 1) // world_size + 1)
    return max((sums[k * world_size + 1] - sums[k * world_size - k] for k in shared), default=0.0)


def cuts(spec: TensorSpec, parts: int, starts: Sequence[int] = ()) -> list[int]:
    """Return the first row of each part, then the number of rows. Without ``starts``, the tensor is cut evenly.

    >>> import torch
    >>> cuts(TensorSpec("weight", (100, 64), torch.float32), 3), cuts(TensorSpec("bias", (200,), torch.float32), 3)
    ([0, 34, 67, 100], [0, 64, 128, 200])
    """
    if starts or parts == 1:
        return [*(starts or (0,)), spec.rows]
    step = spec.cut_step
    least, larger = divmod(spec.rows // step, parts)
    return [*[(place * least + min(place, larger)) * step for place in range(parts)], spec.rows]


def check_owners(index: int, spec: TensorSpec, ranks: tuple[int, ...], world_size: int) -> None:
    """Raise a ValueError that names the tensor if it cannot belong to these ranks."""
    if len(ranks) == 1 and 0 <= ranks[0] < world_size:
        # Return early for tensors with one owner: most have one, and a plan would take longer otherwise.
        return
    named = f"tensor {index} {spec.name!r}"
    if not ranks or len({*ranks}) < len(ranks) or not all(0 <= rank < world_size for rank in ranks):
        raise ValueError(f"{named} should have distinct owners among ranks 0 to {world_size - 1}, but has {[*ranks]}")
    possible = max(1, spec.rows // spec.cut_step if spec.numel else 1)
    if len(ranks) > possible:
        text = f"{named} of shape {spec.shape} has {len(ranks)} owners, but can be cut into {possible} parts only"
        raise ValueError(f"{text}, between rows, at multiples of {ALIGNMENT} elements")


def _uneven(index: int, spec: TensorSpec, ranks: tuple[int, ...], starts: tuple[int, ...]) -> tuple[int, ...]:
    """Check the first rows of the parts of a tensor, and return them; () if the parts are even."""
    if not starts:
        return ()
    named, step = f"tensor {index} {spec.name!r}", spec.cut_step
    if len(starts) != len(ranks):
        raise ValueError(f"{named} has {len(ranks)} owners, but `starts` has {len(starts)} parts")
    ascend = all(start < stop for start, stop in pairwise([*starts, max(1, spec.rows)]))
    if starts[0] != 0 or not ascend or any(start % step for start in starts):
        raise ValueError(f"{named} should be cut at ascending multiples of {step} from 0 to {spec.rows}, not {starts}")
    return () if [*starts, spec.rows] == cuts(spec, len(ranks)) else tuple(starts)
