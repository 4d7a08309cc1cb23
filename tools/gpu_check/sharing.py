"""Makes two NCCL ranks share one GPU. NVIDIA does not support this up to NCCL 2.29, and it may hang, so use a timeout.

NCCL refuses two ranks on one GPU ("Duplicate GPU detected"). From 2.30 on ``NCCL_MULTI_RANK_GPU_ENABLE=1`` allows it,
experimentally (its user guide, Environment Variables). Earlier versions compare a hash of the host and the PCI address;
the hash is of ``NCCL_HOSTID`` if that is set (its sources, misc/utils.cc). With its own host id each rank counts as
another host, and the ranks communicate by sockets over loopback. So kernels, streams, futures and aborts are NCCL's,
but this shows neither its speed nor its transports through shared memory.

Without MPS the kernels of two processes take turns of some milliseconds.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

SHARED = "GPU_CHECK_SHARED"
"""Environment variable: set if NCCL ranks share a GPU."""
ALSO_ON = "GPU_CHECK_ALSO_ON"
"""Environment variable: backends, with commas, on which the tests of the CPU and the emulated device run too."""

ENVIRONMENT: Mapping[str, str] = {
    SHARED: "1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    # Ranks of one GPU cannot share NVLink SHARP.
    "NCCL_NVLS_ENABLE": "0",
    # All channels of both ranks must be resident at the same time.
    "NCCL_MAX_CTAS": "2",
    "NCCL_DEBUG": "WARN",
}
_ALLOWED_FROM = (2, 30)
_PATIENCE = 10.0
"""Seconds that MPS has to quit."""


def claim_host() -> None:
    """Make NCCL treat this process as a host of its own. Call before its first collective; no-op unless ranks share."""
    from gpu_check.machine import nccl_version

    if os.environ.get(SHARED) and nccl_version() < _ALLOWED_FROM:
        os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"


@contextmanager
def served_by_mps(notes: list[str]) -> Iterator[Mapping[str, str]]:
    """Run NVIDIA's MPS during the block if it works, yield variables for its clients, and add notes for the report."""
    program = shutil.which("nvidia-cuda-mps-control")
    if program is None:
        notes.append("MPS is not installed: kernels of the two ranks take turns.")
        yield {}
        return
    # The daemon may still write to it while it ends.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as pipes:
        served = {"CUDA_MPS_PIPE_DIRECTORY": pipes, "CUDA_MPS_LOG_DIRECTORY": pipes}
        try:
            works = _starts(program, served)
            refused = "is installed but does not work: kernels of the two ranks take turns"
            notes.append(f"MPS {'serves the steps on two NCCL ranks' if works else refused}.")
            yield served if works else {}
        finally:
            notes += _quit(program, served)


def _quit(program: str, served: Mapping[str, str]) -> list[str]:
    """End the daemon, by force if it does not quit; return a sentence for the report if so."""
    pid, deadline = 0, time.monotonic() + _PATIENCE
    with suppress(OSError, ValueError):
        pid = int(Path(served["CUDA_MPS_PIPE_DIRECTORY"], "nvidia-cuda-mps-control.pid").read_text())
    with suppress(OSError, subprocess.SubprocessError):
        environment = os.environ | served
        subprocess.run([program], input=b"quit\n", env=environment, timeout=_PATIENCE, check=False, capture_output=True)
    while pid and is_alive(pid):
        if time.monotonic() > deadline:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            return ["MPS did not quit and was killed."]
        time.sleep(0.05)
    return []


def is_alive(pid: int) -> bool:
    """Return True if a process runs. One that has ended may still wait for its parent to read its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _starts(program: str, served: Mapping[str, str]) -> bool:
    uses_the_gpu = [sys.executable, "-c", "import torch; torch.ones(1, device='cuda').item()"]
    log = Path(served["CUDA_MPS_LOG_DIRECTORY"], "gpu-check.log")
    for command in ([program, "-d"], uses_the_gpu):
        try:
            # To a file, because the daemon would keep a pipe open.
            with log.open("wb") as output:
                subprocess.run(
                    command, env=os.environ | served, timeout=30, check=True, stdout=output, stderr=subprocess.STDOUT
                )
        except (OSError, subprocess.SubprocessError):
            return False
    return True
