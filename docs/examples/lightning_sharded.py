"""Train a small GPT with Lightning's Trainer, and save. A second run goes on where the first one ended.

Start it with: torchrun --nproc-per-node 2 NAME_OF_THIS_FILE run.ckpt
"""

import os
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from small_gpt import SmallGPT, Windows
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader
from zeroshard_integrations.lightning import ZeroRedundancyOptimizer


class Module(pl.LightningModule):
    """The model, and the losses of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.losses = SmallGPT(), []

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of a batch."""
        loss = self.model(**batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Optimizer:
        """Return the optimizer."""
        return ZeroRedundancyOptimizer(self.parameters(), AdamW, lr=1e-3, partition="split")


def train(
    checkpoint: Path,
    resume_from: Path | None = None,
    strategy: str = "ddp_zeroshard",
    **options: object,
) -> Module:
    """Train, and save ``checkpoint``; ``options`` are those of ``Trainer``."""
    ranks, module = int(os.environ["WORLD_SIZE"]), Module()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **options,
    )
    trainer.fit(module, DataLoader(Windows(1000), batch_size=4), ckpt_path=resume_from)
    trainer.save_checkpoint(checkpoint)
    trainer.print(f"{trainer.global_step} steps on {ranks} ranks: last loss {module.losses[-1]:.2f}")
    return module


if __name__ == "__main__":
    checkpoint = Path(sys.argv[1])
    resumed = checkpoint if checkpoint.exists() else None
    train(checkpoint, resumed, max_steps=40 if resumed else 20, gradient_clip_val=1.0)
