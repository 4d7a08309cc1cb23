"""Train until STEPS, and save with torch.distributed.checkpoint. A second run goes on where the first one ended.

Start it with: torchrun --nproc-per-node 2 checkpoint_dcp.py sharded run STEPS
The first argument is "sharded", "plain" or "fsdp"; each resumes from what the others have saved.
"""

import sys
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_training import make_model, newest, train
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_integrations.ddp import reduce_to_owner_hook

kind, folder, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")

model = make_model()
if kind == "sharded":
    model = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-3)
    model.register_comm_hook(optimizer, reduce_to_owner_hook)
elif kind == "plain":
    model = DistributedDataParallel(model)
    optimizer = AdamW(model.parameters(), lr=1e-3)
else:
    fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=1e-3)

first = 0
checkpoint = newest(folder)
if checkpoint is not None:
    if kind == "sharded":
        optimizer.init_state()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    saved = {"model": model_state, "optimizer": optimizer_state, "steps": 0}
    dcp.load(saved, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    first = saved["steps"]

train(model, optimizer, range(first, last))

model_state, optimizer_state = get_state_dict(model, optimizer)
saved = {"model": model_state, "optimizer": optimizer_state, "steps": last}
dcp.save(saved, checkpoint_id=folder / f"{last:06}")
if dist.get_rank() == 0:
    print(f"steps {first + 1} to {last} on {dist.get_world_size()} ranks, {kind}")
dist.destroy_process_group()
