"""What the ranks of a group do of which one is killed; a module of its own, so that spawned processes can import it."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import optim
from training import set_gradients, small_model
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import PeerLostError


def survive(rank: int, folder: str, when: str) -> None:
    """One rank of a group of three, of which rank 2 is killed; the others note in the folder what they were told."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3, timeout=timedelta(seconds=20)
    )
    model = small_model()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam)
    set_gradients(model.parameters(), 0)
    sharded.step()
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if when == "step":
            sharded.step()
        else:
            sharded.consolidate_state_dict(to=0)
    except PeerLostError as error:
        Path(folder, f"rank{rank}").write_text(str(error))
        # gloo's threads still wait for the lost rank; torch's own clean-up at exit sometimes aborts over them.
        os._exit(0)
