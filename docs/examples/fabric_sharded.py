"""Train a small GPT with Fabric, and save. A second run goes on where the first one ended.

Start it with: torchrun --nproc-per-node 2 NAME_OF_THIS_FILE run.ckpt
"""

import os
import sys
from pathlib import Path

from lightning.fabric import Fabric
from small_gpt import SmallGPT, Windows
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader
from zeroshard_integrations.lightning import ZeroRedundancyOptimizer


def train(
    checkpoint: Path,
    resume_from: Path | None = None,
    strategy: str = "ddp_zeroshard",
    steps: int = 20,
    precision: str = "32-true",
    accumulated: int = 1,
    **clipping: float,
) -> tuple[nn.Module, list[float]]:
    """Train, save ``checkpoint``, and return the model and losses; ``clipping`` as for ``clip_gradients()``."""
    ranks, losses = int(os.environ["WORLD_SIZE"]), []
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy, precision=precision)
    fabric.launch()
    model = SmallGPT()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-3, partition="split")
    model, optimizer = fabric.setup(model, optimizer)
    batches = fabric.setup_dataloaders(DataLoader(Windows(1000), batch_size=4))
    state = {"model": model, "optimizer": optimizer, "steps": 0}
    if resume_from:
        fabric.load(resume_from, state)

    for number, batch in enumerate(batches, 1):
        is_accumulating = number % accumulated != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            loss = model(**batch)
            fabric.backward(loss / accumulated)
        losses.append(loss.item())
        if is_accumulating:
            continue
        if clipping:
            fabric.clip_gradients(model, optimizer, **clipping)
        optimizer.step()
        optimizer.zero_grad()
        state["steps"] += 1
        if state["steps"] == steps:
            break

    fabric.save(checkpoint, state)
    fabric.print(f"{state['steps']} steps on {ranks} ranks: last loss {losses[-1]:.2f}")
    return model.module, losses


if __name__ == "__main__":
    checkpoint = Path(sys.argv[1])
    resumed = checkpoint if checkpoint.exists() else None
    train(checkpoint, resumed, steps=40 if resumed else 20, max_norm=1.0)
