"""Headers: what ranks tell each other with a bucket of gradients, a few numbers and one bit for each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from zeroshard_comm.agreement import Coordinator


@dataclass(frozen=True, slots=True)
class BucketHeader:
    """The information that a rank sends to the others with a bucket.

    Attributes:
        backward: number of the backward, from 1.
        bucket: number of the bucket in it, from 0.
        present: per tensor of the bucket, whether this rank has a gradient for it.
        may_step: whether this rank may step during this backward.
        is_own: whether this rank has computed the bucket, and not only taken part in the others' reduction.
    """

    backward: int
    bucket: int
    present: tuple[bool, ...]
    may_step: bool = False
    is_own: bool = True

    def to_words(self) -> list[int]:
        """Return it as 64-bit integers; their number depends only on the number of tensors."""
        return [self.backward, self.bucket, *pack_bits((self.may_step, self.is_own, *self.present))]

    @classmethod
    def from_words(cls, words: Sequence[int], tensors: int) -> BucketHeader:
        """Read :meth:`to_words` of a bucket with this number of tensors."""
        may_step, is_own, *present = unpack_bits(tuple(words[2:]), 2 + tensors)
        return cls(words[0], words[1], tuple(present), may_step, is_own)


@lru_cache
def pack_bits(bits: tuple[bool, ...]) -> tuple[int, ...]:
    """Pack bits into 64-bit signed integers, 63 in each. Cached, since in most steps they are unchanged.

    >>> pack_bits((True, False, True))
    (5,)
    """
    return tuple(
        [
            sum([1 << place for place, bit in enumerate(bits[start : start + 63]) if bit])
            for start in range(0, len(bits), 63)
        ]
    )


@lru_cache
def unpack_bits(words: tuple[int, ...], count: int) -> tuple[bool, ...]:
    """Return the first ``count`` bits of what :func:`pack_bits` has packed.

    >>> unpack_bits((5,), 4)
    (True, False, True, False)
    """
    return tuple([bool(words[place // 63] >> place % 63 & 1) for place in range(count)])


class HeaderExchange:
    """Exchanges the headers of one bucket, and its addresses: ranks agree whether any has changed before they send."""

    def __init__(self, coordinator: Coordinator, tensors: int) -> None:
        self._coordinator, self._tensors = coordinator, tensors
        self._own: list[int] = []
        self._headers: list[BucketHeader] = []
        self._addresses: list[int] = []

    def exchange(self, header: BucketHeader, address: int = 0) -> tuple[list[BucketHeader], list[int]]:
        """Agree on the bucket, and return all headers and addresses, in rank order. Collective.

        Raises:
            DisagreementError: if ranks are in different buckets.
            PeerLostError: if a rank is gone.
        """
        own = [address, *replace(header, backward=0).to_words()]
        if self._coordinator.agree(f"bucket {header.bucket} of backward {header.backward}", flag=own != self._own):
            rows = self._coordinator.gather_ints(own, "backward()")
            self._headers = [BucketHeader.from_words(words, self._tensors) for _, *words in rows]
            self._addresses, self._own = [row[0] for row in rows], own
        return [replace(found, backward=header.backward) for found in self._headers], self._addresses
