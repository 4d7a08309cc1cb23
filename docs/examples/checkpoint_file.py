"""Train until STEPS, and save one file, by the names of the model. A second run goes on where the first one ended.

Start it with: torchrun --nproc-per-node 2 checkpoint_file.py sharded FOLDER STEPS
Instead of "sharded" it may be "plain" or "fsdp"; each resumes from what the others have saved.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint_training import build, train
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from zeroshard import full_optimizer_state_dict

kind, folder, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
rank = dist.get_rank()
model, optimizer = build(kind)

first = 0
files = sorted(folder.glob("*.pt"))
if files:
    first = int(files[-1].stem)
    saved = torch.load(files[-1]) if rank == 0 else {"model": {}, "optimizer": {}}
    if kind == "sharded":
        optimizer.init_state()
    from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, saved["model"], options=from_rank_0)
    set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=from_rank_0)

if first >= last:
    raise SystemExit(f"{folder} has a checkpoint of step {first} already")
train(model, optimizer, range(first, last))

full = StateDictOptions(full_state_dict=True, cpu_offload=True)
model_state = get_model_state_dict(model, options=full)
if kind == "sharded":
    optimizer_state = full_optimizer_state_dict(model, optimizer, to=0)
else:
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=full)
if rank == 0:
    folder.mkdir(exist_ok=True)
    new_file = folder / f"{last:06}.new"
    torch.save({"model": model_state, "optimizer": optimizer_state}, new_file)
    new_file.replace(new_file.with_suffix(".pt"))
# Before its process group: a DistributedDataParallel that outlives its group may hang when it is freed (torch 2.13).
del model
dist.destroy_process_group()
