"""Bits as numbers that a 64-bit signed integer can hold: 63 in each."""

from __future__ import annotations

from collections.abc import Sequence


def pack_bits(bits: Sequence[bool]) -> list[int]:
    """Pack bits into numbers.

    >>> pack_bits([True, False, True])
    [5]
    """
    return [
        sum(1 << place for place, bit in enumerate(bits[start : start + 63]) if bit)
        for start in range(0, len(bits), 63)
    ]


def unpack_bits(words: Sequence[int], count: int) -> tuple[bool, ...]:
    """Return the first ``count`` bits of what :func:`pack_bits` has packed.

    >>> unpack_bits([5], 4)
    (True, False, True, False)
    """
    return tuple([bool(words[place // 63] >> place % 63 & 1) for place in range(count)])
