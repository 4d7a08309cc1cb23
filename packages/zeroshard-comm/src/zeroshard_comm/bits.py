"""Bits as numbers that a 64-bit signed integer can hold: 63 in each."""

from __future__ import annotations

from functools import lru_cache


@lru_cache
def pack_bits(bits: tuple[bool, ...]) -> tuple[int, ...]:
    """Pack bits into numbers. Cached, since in most steps they are unchanged.

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
