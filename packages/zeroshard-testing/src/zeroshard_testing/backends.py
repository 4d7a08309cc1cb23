"""Which backends this machine has, and the reason when one is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroshard_testing.spec import RanksSpec

NEED_NO_PROBE = ("gloo", "fake")
"""Backends that come with torch; the others depend on the machine."""

_NCCL_THAT_SHARES = (2, 30)


def why_unavailable(spec: RanksSpec, machine: Mapping[str, Any]) -> str | None:
    """Say why a test cannot run here.

    Args:
        spec: What the test asks for.
        machine: What `zeroshard_testing.pool.Pool.probe` found.

    Returns:
        The reason, or None if the test can run.

    Example:
        >>> from zeroshard_testing.spec import RanksSpec
        >>> machine = {"devices": 1, "nccl": True, "nccl_version": [2, 29, 3], "torch": "2.13.0"}
        >>> print(why_unavailable(RanksSpec(2, "nccl"), machine))
        backend nccl needs a CUDA device for each of 2 ranks, and there is 1 (NCCL shares one from 2.30, this is 2.29.3)
    """
    if spec.backend in NEED_NO_PROBE:
        return None
    if spec.backend not in ("nccl", "gloo-cuda"):
        # Of a name that torch does not know, a plugin may tell it on the ranks; if none does, the test fails.
        known, there = spec.backend in machine["backends"], spec.backend in machine["available"]
        return f"torch {machine['torch']} was built without {spec.backend}" if known and not there else None
    devices = machine["devices"]
    if not devices:
        return f"backend {spec.backend} needs CUDA, which torch {machine['torch']} does not find here"
    library = "nccl" if spec.backend == "nccl" else "gloo"
    if not machine[library]:
        return f"torch {machine['torch']} was built without {library}"
    version = machine["nccl_version"]
    if spec.backend == "nccl" and devices < spec.world_size and tuple(version) < _NCCL_THAT_SHARES:
        found = "there is 1" if devices == 1 else f"there are {devices}"
        return (
            f"backend nccl needs a CUDA device for each of {spec.world_size} ranks, and {found} (NCCL shares one from "
            f"{'.'.join(map(str, _NCCL_THAT_SHARES))}, this is {'.'.join(map(str, version))})"
        )
    return None
