"""Whether ranks were handed parameters without names in the same order: seen by their values, where they are alike.

A plan matches such parameters by position, so two of one shape that have changed places on a rank look right. Ranks may
hold other values, until DistributedDataParallel brings them the first rank's; so values that differ prove nothing. The
same values in another order do.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from zeroshard_comm import Control
from zeroshard_core import TensorSpec

from zeroshard.fingerprint import checksums


@dataclass(frozen=True)
class HandedOrder:
    """The values of parameters without names, in the order in which this rank was handed them.

    Only of those that are alike in shape, dtype and all else that the plan compares: others cannot be mistaken.

    Attributes:
        places: per parameter, where it stands, in words.
        kinds: per parameter, what tells it from others in the plan, but for its place.
        sums: per parameter, a number for its values.
    """

    places: tuple[str, ...]
    kinds: tuple[str, ...]
    sums: tuple[int, ...]

    @classmethod
    def of(cls, specs: Sequence[TensorSpec], params: Sequence[torch.Tensor]) -> HandedOrder:
        """Look at the values, once.

        Args:
            specs: of all parameters; those named by their position have no names.
            params: all parameters.
        """
        kinds = [repr((s.group, s.shape, s.stride, str(s.dtype), s.device, s.trainable)) for s in specs]
        unnamed = [index for index, spec in enumerate(specs) if spec.name == f"param.{index}"]
        # One without its like cannot have changed places.
        count = Counter(kinds[index] for index in unnamed)
        unnamed = [index for index in unnamed if count[kinds[index]] > 1]
        return cls(
            tuple([f"tensor {index} {specs[index].name!r} of shape {specs[index].shape}" for index in unnamed]),
            tuple([kinds[index] for index in unnamed]),
            tuple(checksums([params[index] for index in unnamed])),
        )

    def compare(self, control: Control, operation: str) -> None:
        """Raise if all ranks hold the same values, but not in the same order. Collective, after they agree on the plan.

        Args:
            control: the channel of the group.
            operation: what the ranks are about to do.

        Raises:
            DisagreementError: on every rank, naming two places and the ranks that differ.
            PeerLostError: if a rank is gone.
        """
        if control.alone or not self.sums:
            return
        ordered = _digest(list(self.sums))
        words = control.all_gather_ints([_digest(sorted(zip(self.kinds, self.sums, strict=True))), ordered], operation)
        values, orders = ({row[column] for row in words} for column in (0, 1))
        if len(values) == 1 and len(orders) > 1:
            control.check_consistent(operation, ordered, detail=lambda: json.dumps(self.sums), explain=self._explain)

    def _explain(self, reference: str, other: str, reference_rank: int, other_rank: int) -> str:
        here, there = json.loads(reference), json.loads(other)
        moved = [place for place, (one, two) in enumerate(zip(here, there, strict=True)) if one != two]
        first = moved[0]
        now = next(p for p in moved if there[p] == here[first] and self.kinds[p] == self.kinds[first])
        return (
            f"what is {self.places[first]} on rank {reference_rank} is {self.places[now]} on rank {other_rank}. "
            f"Parameters without names are matched by their order: hand them over in the same one, or by "
            f"named_parameters()"
        )


def _digest(values: object) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps(values).encode()).digest()[:8], "big") >> 1
