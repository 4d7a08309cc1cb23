"""How two NCCL ranks share one GPU. NVIDIA does not support it up to NCCL 2.29; it may hang, so a timeout must end it.

NCCL refuses two ranks on one GPU ("Duplicate GPU detected"). From 2.30 on ``NCCL_MULTI_RANK_GPU_ENABLE=1`` allows it,
experimentally (its user guide, Environment Variables). Before, NCCL compares a hash of the host and the PCI address;
the hash is of ``NCCL_HOSTID`` if that is set (its sources, misc/utils.cc). With a host id of its own each rank counts
as another host, and the ranks talk by sockets over loopback. So kernels, streams, futures and aborts are NCCL's; its
speed and its transports through shared memory are not shown.

Without MPS the kernels of two processes take turns of some milliseconds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
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
    # All channels must be resident at a time, beside those of the other rank.
    "NCCL_MAX_CTAS": "2",
    "NCCL_DEBUG": "WARN",
}
_ALLOWED_FROM = (2, 30)


def claim_host() -> None:
    """Let NCCL take this process for a host of its own. Call before its first collective; no-op unless it shares."""
    from gpu_check.machine import nccl_version

    if os.environ.get(SHARED) and nccl_version() < _ALLOWED_FROM:
        os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"


@contextmanager
def served_by_mps() -> Iterator[tuple[Mapping[str, str], str]]:
    """Run NVIDIA's MPS during the block, if it is installed and works.

    Yields:
        The environment variables of its clients, empty without MPS, and a sentence for the report.
    """
    program = shutil.which("nvidia-cuda-mps-control")
    if program is None:
        yield {}, "MPS is not installed: kernels of the two ranks take turns."
        return
    # The daemon may still write to it while it ends.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as pipes:
        served = {"CUDA_MPS_PIPE_DIRECTORY": pipes, "CUDA_MPS_LOG_DIRECTORY": pipes}
        try:
            if _starts(program, served):
                yield served, "MPS serves the steps on two NCCL ranks."
            else:
                yield {}, "MPS is installed and does not work: kernels of the two ranks take turns."
        finally:
            with suppress(OSError, subprocess.SubprocessError):
                subprocess.run(
                    [program], input=b"quit\n", env=os.environ | served, timeout=10, check=False, capture_output=True
                )


def _starts(program: str, served: Mapping[str, str]) -> bool:
    uses_the_gpu = [sys.executable, "-c", "import torch; torch.ones(1, device='cuda').item()"]
    log = Path(served["CUDA_MPS_LOG_DIRECTORY"], "gpu-check.log")
    for command in ([program, "-d"], uses_the_gpu):
        try:
            # To a file: the daemon would keep a pipe open.
            with log.open("wb") as output:
                subprocess.run(
                    command, env=os.environ | served, timeout=30, check=True, stdout=output, stderr=subprocess.STDOUT
                )
        except (OSError, subprocess.SubprocessError):
            return False
    return True
