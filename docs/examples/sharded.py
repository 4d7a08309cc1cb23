"""Train for 50 steps, and save. A second run goes on where the first one ended.

Start it with: torchrun --nproc-per-node 2 NAME_OF_THIS_FILE run.pt
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW
from zeroshard import ZeroRedundancyOptimizer, shard_gradients

STEPS, ROWS, CONTEXT = 50, 48, 16
checkpoint = Path(sys.argv[1])
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

# The model predicts a byte of one of Python's own sources from the bytes before it.
text = torch.tensor(list(Path(os.__file__).read_bytes()))
torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(256, 32),
    nn.Flatten(),
    nn.Linear(CONTEXT * 32, 256),
    nn.ReLU(),
    nn.Linear(256, 256),
)
optimizer = ZeroRedundancyOptimizer(model.named_parameters(), AdamW, lr=1e-3, partition="split")
sharding = shard_gradients(model, optimizer)

first, losses = 0, []
if checkpoint.exists():
    saved = torch.load(checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["steps"]

for step in range(first, first + STEPS):
    # All ranks draw the same rows; each takes its share.
    drawing = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - CONTEXT, (ROWS,), generator=drawing)[rank::ranks]
    rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(rows[:, :CONTEXT]), rows[:, CONTEXT])
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())

mean = torch.stack(losses).mean() / ranks
dist.all_reduce(mean)
optimizer.consolidate_state_dict(to=0)
if rank == 0:
    steps = first + STEPS
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    new_file = checkpoint.with_suffix(".new")
    torch.save({**saved, "steps": steps}, new_file)
    new_file.replace(checkpoint)
    print(f"steps {first + 1} to {steps} on {ranks} ranks: mean loss {mean.item():.2f}")
dist.barrier()  # No rank exits before the file is written.
dist.destroy_process_group()
