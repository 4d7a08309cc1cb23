"""Runs measurements on ranks: ``python -m gpu_check.measure waits,memory --ranks 2 --backend gloo``.

All ranks share the first GPU. On the fake backend this process is rank 0, and no other process is started.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from gpu_check.sharing import claim_host

_RANK, _STORE = "GPU_CHECK_RANK", "GPU_CHECK_STORE"
_GRACE = 5.0
"""Seconds that ranks have to report after one of them failed, and that each has to end after it was killed."""
_TIMEOUT = timedelta(seconds=60)


def run_rank(options: argparse.Namespace, rank: int, store: str) -> int:
    """Make the process group, run the measurements, and return how many rows are wrong."""
    claim_host()
    import torch
    import torch.distributed as dist
    from gpu_check.measurements import MEASUREMENTS, Settings
    from gpu_check.models import CUDA, DEVICE

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if CUDA:
        torch.accelerator.set_device_index(DEVICE.index)
    if options.backend == "fake":
        # The fake backend accepts no other store.
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.ranks)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        where = {"init_method": Path(store).as_uri(), "rank": rank, "world_size": options.ranks}
        dist.init_process_group(options.backend, timeout=_TIMEOUT, **where)
    settings = Settings(options.model, options.iterations, options.rounds)
    wrong = 0
    for name in options.names:
        if rank == 0:
            print(flush=True)
        try:
            wrong += MEASUREMENTS[name](settings)
        except Exception:  # noqa: BLE001 - the other measurements are still worth a try
            wrong += 1
            traceback.print_exc()
    return wrong


def start_ranks(ranks: int, arguments: Sequence[str]) -> int:
    """Start this program on ranks, wait for them, and return the largest exit status. End all if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        shared = {_STORE: str(Path(folder, "store"))}
        command = [sys.executable, "-m", "gpu_check.measure", *arguments]
        processes = [subprocess.Popen(command, env=os.environ | shared | {_RANK: str(rank)}) for rank in range(ranks)]
        deadline = float("inf")
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if deadline == float("inf") and any(process.poll() for process in processes):
                deadline = time.monotonic() + _GRACE
            time.sleep(0.05)
        for process in processes:
            process.kill()
        # A driver may hold a process that was killed.
        return max(abs(process.wait(_GRACE)) for process in processes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a rank if the environment says so, else start the ranks; return the exit status."""
    parser = argparse.ArgumentParser(description="Measure zeroshard on ranks that share the first GPU.")
    parser.add_argument("names", type=lambda text: text.split(","), help="measurements, with commas")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--backend", choices=["nccl", "gloo", "fake"], default="gloo")
    parser.add_argument("--model", default="124M", help="124M, 1.3B or tiny; without CUDA always tiny")
    parser.add_argument("--iterations", type=int, default=6, help="iterations that are timed together")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the medians over rounds are printed")
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    rank = 0 if options.backend == "fake" else os.environ.get(_RANK)
    if rank is None:
        return start_ranks(options.ranks, given)
    status = int(run_rank(options, int(rank), os.environ.get(_STORE, "")) > 0)
    sys.stdout.flush()
    # Ranks that share a GPU may hang in the teardown of NCCL; everything is printed.
    os._exit(status)


if __name__ == "__main__":
    raise SystemExit(main())
