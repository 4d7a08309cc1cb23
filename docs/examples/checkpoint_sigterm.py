"""Train until STEPS, or until a rank gets SIGTERM, as from a scheduler before it takes the machine; save then.

Start it with: torchrun --nproc-per-node 2 checkpoint_sigterm.py FILE STEPS
"""

import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint_training import build, train

file, last = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
ddp, optimizer = build("sharded")

first = 0
if file.exists():
    saved = torch.load(file)
    ddp.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["steps"]

# The handler only notes the signal: here another rank may be in another step, or this one in a collective.
signals: list[int] = []
signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))

for step in range(first, last):
    train(ddp, optimizer, range(step, step + 1))
    first = step + 1
    # All ranks leave the loop after the same step. On GPUs, ask every ten steps: reading the flag waits for the device.
    is_asked = torch.tensor(len(signals))
    dist.all_reduce(is_asked, op=dist.ReduceOp.MAX)
    if is_asked.item():
        break

optimizer.consolidate_state_dict(to=0)
if rank == 0:
    saved = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict(), "steps": first}
    new_file = file.with_suffix(".new")
    torch.save(saved, new_file)
    new_file.replace(file)
# Before its process group: a DistributedDataParallel that outlives its group may hang when it is freed (torch 2.13).
del ddp
dist.destroy_process_group()
