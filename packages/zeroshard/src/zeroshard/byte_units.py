"""Reads and writes amounts of memory as text: a GB is 10^9 bytes, a GiB is 2^30 bytes."""

from __future__ import annotations

import re

_UNITS = {"bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_bytes(text: str) -> int:
    """Return an amount of memory in bytes; raise a ValueError if the text has no number or no unit.

    >>> parse_bytes("80GiB"), parse_bytes("1.5 GB")
    (85899345920, 1500000000)
    """
    found = re.fullmatch(rf"\s*(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})\s*", text)
    if found is None:
        raise ValueError(
            f"{text!r} is not an amount of memory: write a number and one of {', '.join(_UNITS)}, such as 80GiB"
        )
    return int(float(found[1]) * _UNITS[found[2]])


def format_bytes(nbytes: float) -> str:
    """Format bytes in decimal units, with four significant digits.

    >>> format_bytes(12.3456e9), format_bytes(-2.5e6), format_bytes(0)
    ('12.35 GB', '-2.5 MB', '0 bytes')
    """
    unit = next((unit for unit in ("TB", "GB", "MB", "kB") if abs(nbytes) >= _UNITS[unit]), "bytes")
    return f"{nbytes / _UNITS[unit]:.4g} {unit}"
