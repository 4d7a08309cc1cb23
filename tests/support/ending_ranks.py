"""A program of its own: rank 1 ends as soon as it has made its last step, and rank 0, which is late, saves what it has.

Its arguments are the first way to train, and the one after the last. Two ranks are forked for each; rank 0 goes on when
rank 1's process has ended. It prints, per way, what it could save.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from datetime import timedelta

import torch

# Once, before the ranks are forked: it takes seconds.
import torch._dynamo.compiled_autograd
import torch.distributed as dist
from support.ddp_training import steps_in_backward
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_integrations import ddp as hooks

WAYS = [
    ("none", False, True),
    ("reduce_to_owner_hook", True, False),
    ("hook_with_zero_step", True, True),
    ("none", True, False),
    ("reduce_to_owner_hook", False, True),
    ("hook_with_zero_step_interleaved", False, True),
]
"""The hook, whether there are bucket views, and whether rank 1 destroys its group."""


def train(rank: int, hook: str, views: bool) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(400, 400), nn.Linear(400, 2)), bucket_cap_mb=0.1)
    sharded = ZeroRedundancyOptimizer(
        ddp.parameters(),
        optim.Adam,
        parameters_as_bucket_view=views,
        overlap_with_ddp=steps_in_backward(hook),
    )
    if hook == "reduce_to_owner_hook":
        hooks.register_reduce_to_owner(ddp, sharded)
    elif hook != "none":
        make = hooks.hook_with_zero_step if hook == "hook_with_zero_step" else hooks.hook_with_zero_step_interleaved
        ddp.register_comm_hook(None, make(allreduce_hook, ddp, sharded))
    for step in range(3):
        ddp(torch.ones(4, 400)).square().sum().backward()
        if step == 2:
            sharded.consolidate_state_dict(to=0)
            time.sleep(0.3 if rank == 0 else 0.0)
        sharded.step()
        sharded.zero_grad()
    return ddp, sharded


def run(rank: int, store: str, ended: int, hook: str, views: bool, destroys: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    trained = train(rank, hook, views)
    if rank == 1:
        if destroys:
            dist.destroy_process_group()
        else:
            # Still there when Python ends.
            globals()["kept"] = trained
        return
    os.read(ended, 1)
    ddp, sharded = trained
    saved, weights = sharded.state_dict(), ddp.state_dict()
    finite = all(bool(value.isfinite().all()) for value in weights.values())
    print(hook, views, destroys, len(saved["state"]), len(weights), finite, flush=True)


if __name__ == "__main__":
    # Ranks that end look at what they have made, and not at all that was imported.
    gc.freeze()
    first, last = map(int, sys.argv[1:])
    for way in WAYS[first:last]:
        store = os.path.join(tempfile.mkdtemp(), "store")  # noqa: PTH118
        reading, writing = os.pipe()
        ranks = []
        for rank in range(2):
            ranks.append(os.fork())
            if ranks[-1] == 0:
                run(rank, store, reading, *way)
                sys.exit()
        codes = [os.waitpid(ranks[1], 0)[1]]
        os.write(writing, b".")
        codes.append(os.waitpid(ranks[0], 0)[1])
        if any(codes):
            print("ranks 1 and 0 have ended with", codes, flush=True)
