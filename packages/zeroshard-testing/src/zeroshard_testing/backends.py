"""Finds the backends that this machine has, and the reason if one is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroshard_testing.spec import RanksSpec

NEED_NO_PROBE = ("gloo", "fake")
"""Backends that every torch has; the others depend on the machine."""

_NCCL_THAT_SHARES = (2, 30)


def machine() -> dict[str, Any]:
    """Return which backends torch has, and the number of CUDA devices. Initializes CUDA."""
    import torch
    import torch.distributed as dist

    has_cuda, has_distributed = torch.cuda.is_available(), dist.is_available()
    has_nccl = has_distributed and dist.is_nccl_available()
    backends = list(dist.Backend.backend_list) if has_distributed else []
    return {
        "devices": torch.cuda.device_count() if has_cuda else 0,
        "torch": torch.__version__,
        "gloo": has_distributed and dist.is_gloo_available(),
        "nccl": has_nccl,
        "backends": backends,
        "available": [name for name in backends if dist.is_backend_available(name)],
        "nccl_version": list(torch.cuda.nccl.version()) if has_cuda and has_nccl else [],
    }


def why_unavailable(spec: RanksSpec, found: Mapping[str, Any]) -> str | None:
    """Return why a test cannot run on a machine that `machine` describes; None if it can."""
    if spec.backend in NEED_NO_PROBE:
        return None
    if spec.backend not in ("nccl", "gloo-cuda"):
        # If torch does not know the name, a plugin on the ranks may register it; if none does, the test fails.
        known, there = spec.backend in found["backends"], spec.backend in found["available"]
        return f"torch {found['torch']} was built without {spec.backend}" if known and not there else None
    devices = found["devices"]
    if not devices:
        return f"backend {spec.backend} needs CUDA, which torch {found['torch']} does not find here"
    library = "nccl" if spec.backend == "nccl" else "gloo"
    if not found[library]:
        return f"torch {found['torch']} was built without {library}"
    version = found["nccl_version"]
    if spec.backend == "nccl" and devices < spec.world_size and tuple(version) < _NCCL_THAT_SHARES:
        there_are = "this machine has 1" if devices == 1 else f"this machine has {devices}"
        return (
            f"backend nccl needs a CUDA device for each of {spec.world_size} ranks, and {there_are} (NCCL shares one "
            f"from {'.'.join(map(str, _NCCL_THAT_SHARES))}, this is {'.'.join(map(str, version))})"
        )
    return None
