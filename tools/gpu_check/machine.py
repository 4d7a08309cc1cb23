"""Prints GPU, driver and versions as one line of JSON: ``python -m gpu_check.machine``."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping

import torch
import torch.distributed as dist
from gpu_check.steps import NO_GPU


def describe() -> Mapping[str, str]:
    """Return the names and values of the report's table of versions; ``GPU`` is first."""
    has_gpu = torch.cuda.is_available()
    backends = ", ".join(name for name in ("gloo", "nccl") if dist.is_backend_available(name))
    return {
        "GPU": torch.cuda.get_device_name(0) if has_gpu else NO_GPU,
        **(_gpu() if has_gpu else {}),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "NCCL": ".".join(map(str, nccl_version())) or "none",
        "backends": backends,
        "Python": platform.python_version(),
        "CPUs": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.release()}",
    }


def nccl_version() -> tuple[int, ...]:
    """Return the version of the loaded NCCL, empty without one; torch knows only the version it was built with."""
    if not (dist.is_available() and dist.is_nccl_available()):
        return ()
    found = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(found))
    except (OSError, AttributeError):  # linked statically
        return tuple(torch.cuda.nccl.version())
    # 22809 is 2.28.9.
    return found.value // 10_000, found.value // 100 % 100, found.value % 100


def _gpu() -> Mapping[str, str]:
    properties = torch.cuda.get_device_properties(0)
    told = _first_line_of_smi("--query-gpu=driver_version,compute_mode,mig.mode.current", "--format=csv,noheader")
    driver, compute_mode, mig = told.split(", ") if told.count(", ") == 2 else ["unknown"] * 3
    return {
        "GPUs": str(torch.cuda.device_count()),
        "GPU memory": f"{properties.total_memory / 1e9:.1f} GB",
        "compute capability": f"{properties.major}.{properties.minor}",
        "driver": driver,
        "compute mode": compute_mode,
        "MIG": mig,
    }


def _first_line_of_smi(*options: str) -> str:
    """Return the first line that nvidia-smi prints; empty if it is not installed or fails."""
    command = [shutil.which("nvidia-smi") or "", *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().partition("\n")[0]


def why_unusable() -> str:
    """Return why torch cannot use the GPU of this machine; empty if it can, or if there is none or it is hidden."""
    if torch.cuda.is_available() or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return ""
    # "GPU 0: NVIDIA H100 PCIe (UUID: GPU-...)"
    listed = _first_line_of_smi("-L").partition(" (UUID")[0].partition(": ")[2]
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return listed and f"nvidia-smi lists {listed}, but torch cannot use it: {error}"
    return listed and f"nvidia-smi lists {listed}, but torch finds no GPU"


if __name__ == "__main__":
    if reason := why_unusable():
        raise SystemExit(f"{' '.join(reason.split())} (with CUDA_VISIBLE_DEVICES= set, substitutes run on the CPU)")
    print(json.dumps(describe()))
