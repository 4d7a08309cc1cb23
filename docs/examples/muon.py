"""Train a small GPT with Muon for the matrices of its blocks and AdamW for all else, in one sharded optimizer.

Start it with: torchrun --nproc-per-node 2 muon.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_gpt import SmallGPT, Windows
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_integrations.ddp import register_reduce_to_owner


def param_groups(model: nn.Module, head: nn.Module) -> list[dict[str, Any]]:
    """Return param groups by module: Muon for matrices that are no embedding and not the output head, AdamW else."""
    outer = {param for module in model.modules() if isinstance(module, nn.Embedding) for param in module.parameters()}
    # A head that is tied to the embedding is the same parameter: it is in the set once.
    outer |= set(head.parameters())
    matrices, rest = [], []
    for name, param in model.named_parameters():
        (matrices if param.ndim == 2 and param not in outer else rest).append((name, param))
    return [
        {"params": matrices, "optimizer_class": torch.optim.Muon, "lr": 0.02, "name": "matrices"},
        {"params": rest, "lr": 3e-3, "name": "rest"},
    ]


def main() -> None:
    """Train on this rank, and print the groups and the loss on the first one."""
    dist.init_process_group("gloo")
    model = SmallGPT()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    groups = param_groups(model, model.head)
    optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, betas=(0.8, 0.95), partition="level")
    register_reduce_to_owner(ddp, optimizer)
    if dist.get_rank() == 0:
        for group in optimizer.param_groups:
            print(f"{group['name']}: {', '.join(group['param_names'])}")
    data = Windows(10_000)
    for step in range(20):
        batch = [data[8 * (dist.get_world_size() * step + dist.get_rank()) + number] for number in range(8)]
        loss = ddp(*[torch.stack([item[key] for item in batch]) for key in ("inputs", "targets")])
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "muon.new")
        Path("muon.new").replace("muon.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
