"""Which backends this machine has, and the reason when one is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroshard_testing.spec import RanksSpec

NEEDS_PROBE = ("nccl", "gloo-cuda")
"""Backends that depend on the machine; the others come with torch."""


def why_unavailable(spec: RanksSpec, machine: Mapping[str, Any]) -> str | None:
    """Say why a test cannot run here.

    Args:
        spec: What the test asks for.
        machine: What `zeroshard_testing.pool.Pool.probe` found.

    Returns:
        The reason, or None if the test can run.

    Example:
        >>> from zeroshard_testing.spec import RanksSpec
        >>> why_unavailable(RanksSpec(2, "nccl"), {"devices": 1, "nccl": True, "torch": "2.13.0"})
        'backend nccl needs a CUDA device for each of 2 ranks, and there is 1'
    """
    if spec.backend not in NEEDS_PROBE:
        return None
    devices = machine["devices"]
    if not devices:
        return f"backend {spec.backend} needs CUDA, which torch {machine['torch']} does not find here"
    library = "nccl" if spec.backend == "nccl" else "gloo"
    if not machine[library]:
        return f"torch {machine['torch']} was built without {library}"
    if spec.backend == "nccl" and devices < spec.world_size:
        found = "there is 1" if devices == 1 else f"there are {devices}"
        return f"backend nccl needs a CUDA device for each of {spec.world_size} ranks, and {found}"
    return None
