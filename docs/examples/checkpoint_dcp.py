"""Train until STEPS, and save with torch.distributed.checkpoint. A second run goes on where the first one ended.

Start it with: torchrun --nproc-per-node 2 checkpoint_dcp.py sharded FOLDER STEPS
Instead of "sharded" it may be "plain" or "fsdp"; each resumes from what the others have saved.
"""

import sys
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_training import build, train
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

kind, folder, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
model, optimizer = build(kind)

first = 0
# A checkpoint is complete when it has this file, which is written last.
checkpoints = [file.parent for file in folder.glob("*/.metadata")]
if checkpoints:
    if kind == "sharded":
        optimizer.init_state()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    saved = {"model": model_state, "optimizer": optimizer_state, "steps": 0}
    dcp.load(saved, checkpoint_id=max(checkpoints))
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    first = saved["steps"]

if first >= last:
    raise SystemExit(f"{folder} has a checkpoint of step {first} already")
train(model, optimizer, range(first, last))

model_state, optimizer_state = get_state_dict(model, optimizer)
saved = {"model": model_state, "optimizer": optimizer_state, "steps": last}
dcp.save(saved, checkpoint_id=folder / f"{last:06}")
# Before its process group: a DistributedDataParallel that outlives its group may hang when it is freed (torch 2.13).
del model
dist.destroy_process_group()
