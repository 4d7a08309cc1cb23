"""Prints why this machine cannot run the rank tests of a backend on two ranks; nothing if it can.

Run as ``python tools/backend_here.py nccl``; the nox session ``ranks`` runs it before any test.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from zeroshard_testing.backends import why_unavailable
from zeroshard_testing.emulated import build
from zeroshard_testing.spec import BACKENDS, RanksSpec


def why_not_here(backend_name: str) -> str | None:
    """Return why two ranks of a backend, such as ``"gloo-cpu"``, cannot run on this machine; None if they can."""
    if backend_name == "emulated":
        return build.why_unavailable()
    for backend, name in BACKENDS.items():
        if name == backend_name:
            return why_unavailable(RanksSpec(2, backend), machine())
    raise ValueError(f"unknown backend {backend_name!r}; choose from {', '.join(BACKENDS.values())}")


def machine() -> dict[str, object]:
    """Return what `zeroshard_testing.backends.why_unavailable` reads about this machine."""
    return {
        "devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "nccl_version": torch.cuda.nccl.version() if torch.cuda.is_available() and dist.is_nccl_available() else (),
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    print(why_not_here(sys.argv[1]) or "")
