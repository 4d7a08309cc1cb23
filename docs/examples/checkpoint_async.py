"""Train until STEPS, and save every 5 steps while training goes on; checkpoint_dcp.py resumes from there.

Start it with: torchrun --nproc-per-node 2 checkpoint_async.py NEW_FOLDER STEPS
"""

import sys
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_training import build, train
from torch.distributed.checkpoint.state_dict import get_state_dict

EVERY = 5
folder, last = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
# The thread that saves issues collectives. In a group of its own they cannot mix with those of training.
saving_group = dist.new_group(backend="gloo")
model, optimizer = build("sharded")

saving = None
for first in range(0, last, EVERY):
    train(model, optimizer, range(first, first + EVERY))
    if saving is not None:
        saving.result()  # raises if the save has failed
    model_state, optimizer_state = get_state_dict(model, optimizer)
    saved = {"model": model_state, "optimizer": optimizer_state, "steps": first + EVERY}
    saving = dcp.async_save(saved, checkpoint_id=folder / f"{first + EVERY:06}", process_group=saving_group)
saving.result()
# Before its process group: a DistributedDataParallel that outlives its group may hang when it is freed (torch 2.13).
del model
dist.destroy_process_group()
