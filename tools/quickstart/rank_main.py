"""The program of one rank, started by torchrun: ``rank_main.py JOB.json``."""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from job import Job, write_answer
from side_by_side import resume, train


def main() -> int:
    """Do the job; on failure leave ``<task>.rank<N>.error.json`` in its folder, for the launcher to relay."""
    job = Job.read(Path(sys.argv[1]))
    rank = int(os.environ["RANK"])
    # One thread a rank: sums are then made in one order, and ranks do not fight for cores.
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
        write_answer(
            job, rank, train(job) if job.task == "train" else resume(job, sharded=job.task == "resume-sharded")
        )
        # No rank leaves while another may still need it.
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001 - whatever it is, the person at the terminal must hear of it
        told = {
            "rank": rank,
            "time": time.time(),
            "error": f"{type(error).__name__}: {error}",
            "trace": traceback.format_exc(),
        }
        (Path(job.folder) / f"{job.task}.rank{rank}.error.json").write_text(json.dumps(told))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
