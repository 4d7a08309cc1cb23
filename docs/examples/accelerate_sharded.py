"""Train for 20 steps under Accelerate, and save. A second run goes on where the first one ended.

Start it with: torchrun --nproc-per-node 2 NAME_OF_THIS_FILE FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from small_gpt import SmallGPT, Windows
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from zeroshard_integrations.accelerate import ZeroRedundancyOptimizer, ZeroShardPlugin


def train(
    folder: Path | None,
    first: int = 0,
    last: int = 20,
    *,
    accumulated: int = 1,
    precision: str = "no",
    clip: str = "norm",
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.nn.Module, list[float], list[float]]:
    """Take the steps from ``first`` on, and save; return the model, the loss of each batch, and gradient norms.

    Args:
        folder: checkpoints lie here, by their number of steps; with None, none is read or saved.
        first: go on from this checkpoint; with 0 from none.
        last: stop, and save, after this step.
        accumulated: batches for each step.
        precision: ``mixed_precision`` of Accelerate.
        clip: gradients by "norm" or by "value", or "off".
        dtype: of the parameters.
    """
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), mixed_precision=precision, gradient_accumulation_steps=accumulated
    )
    torch.manual_seed(0)
    model = SmallGPT().to(accelerator.device, dtype)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=3e-3, partition="split")
    scheduler = LambdaLR(optimizer, lambda step: 0.99**step)
    batches = DataLoader(Windows(last * accumulated * 4 * accelerator.num_processes), batch_size=4)
    model, optimizer, batches, scheduler = ZeroShardPlugin(accelerator).prepare(model, optimizer, batches, scheduler)
    if folder is not None and first > 0:
        accelerator.load_state(folder / f"{first:06}")
        batches = accelerator.skip_first_batches(batches, first * accumulated)

    losses, norms = [], []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch)
            losses.append(loss.item())
            accelerator.backward(loss)
            if accelerator.sync_gradients and clip == "norm":
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            if accelerator.sync_gradients and clip == "value":
                accelerator.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    if folder is not None:
        accelerator.save_state(folder / f"{last:06}")
    accelerator.print(f"steps {first + 1} to {last} on {accelerator.num_processes} ranks: loss {losses[-1]:.2f}")
    trained = accelerator.unwrap_model(model)
    # DDP that outlives its process group can hang.
    del model
    accelerator.free_memory()
    return trained, losses, norms


if __name__ == "__main__":
    done = sorted(int(path.name) for path in Path(sys.argv[1]).glob("0*"))
    first = done[-1] if done else 0
    train(Path(sys.argv[1]), first, first + 20)
    dist.destroy_process_group()
