"""Train for 20 steps under Hugging Face's Trainer, and save. A second run goes on where the first one ended.

Start it with: torchrun --nproc-per-node 2 NAME_OF_THIS_FILE FOLDER
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_gpt import SmallGPT, Windows
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from zeroshard_integrations.transformers import ZeroShardTrainer


class Model(SmallGPT):
    """Returns its loss as the Trainer expects it."""

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """Return the mean loss."""
        return {"loss": super().forward(inputs, targets)}


def train(
    folder: Path,
    first: int = 0,
    last: int = 20,
    *,
    dtype: torch.dtype = torch.float32,
    **options: Any,  # noqa: ANN401 - as TrainingArguments
) -> tuple[torch.nn.Module, list[float], list[float]]:
    """Take the steps from ``first`` on; return the model, and the loss and gradient norm of each step.

    Args:
        folder: checkpoints lie here, by their number of steps.
        first: go on from this checkpoint; with 0 from none.
        last: stop after this step.
        dtype: of the parameters.
        **options: more of TrainingArguments.
    """
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=last,
        learning_rate=3e-3,
        weight_decay=0.1,
        per_device_train_batch_size=4,
        logging_steps=1,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        **{"max_grad_norm": 0.5, "save_strategy": "steps", "save_steps": 10, **options},
    )
    batches = last * arguments.gradient_accumulation_steps * arguments.world_size
    trainer = ZeroShardTrainer(Model().to(dtype), arguments, train_dataset=Windows(4 * batches))
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{first}") if first else None)
    steps = [entry for entry in trainer.state.log_history if "loss" in entry and entry["step"] > first]
    norms = [entry["grad_norm"] for entry in steps if "grad_norm" in entry]
    return trainer.model, [entry["loss"] for entry in steps], norms


if __name__ == "__main__":
    found = get_last_checkpoint(sys.argv[1]) if Path(sys.argv[1]).exists() else None
    first = int(found.rpartition("-")[2]) if found else 0
    train(Path(sys.argv[1]), first, first + 20)
    # The Trainer and its DDP: one that outlives its process group can hang.
    gc.collect()
    dist.destroy_process_group()
