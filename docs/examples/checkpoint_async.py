"""Train until STEPS, and save every 5 steps while training goes on.

Start it with: torchrun --nproc-per-node 2 checkpoint_async.py run STEPS
checkpoint_dcp.py resumes from what it has saved.
"""

import sys
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_training import make_model, train
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_integrations.ddp import reduce_to_owner_hook

EVERY = 5
folder, last = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
# The thread that saves has collectives of its own: on another group, they cannot mix with those of training.
saving_group = dist.new_group(backend="gloo")

ddp = DistributedDataParallel(make_model())
optimizer = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, lr=1e-3)
ddp.register_comm_hook(optimizer, reduce_to_owner_hook)

saving = None
for first in range(0, last, EVERY):
    train(ddp, optimizer, range(first, first + EVERY))
    if saving is not None:
        saving.result()  # raises if the save has failed
    model_state, optimizer_state = get_state_dict(ddp, optimizer)
    saved = {"model": model_state, "optimizer": optimizer_state, "steps": first + EVERY}
    saving = dcp.async_save(saved, checkpoint_id=folder / f"{first + EVERY:06}", process_group=saving_group)
saving.result()
dist.destroy_process_group()
