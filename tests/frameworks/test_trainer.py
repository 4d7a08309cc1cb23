"""Hugging Face's Trainer with ``optimizers=(ours, scheduler)``: training and checkpoints as unsharded ones, bitwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from framework_training import (
    SEQUENCES,
    STEPS,
    Run,
    Windows,
    adamw,
    assert_equal_to_unsharded,
    assert_unreadable,
    needs,
    new_model,
    warmup,
)
from torch import nn, optim
from training import assert_same_state
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_testing import raises_on

pytestmark = [needs("accelerate"), needs("transformers"), pytest.mark.ranks(2, backend="gloo")]

OPTIMIZER_FILE = "optimizer.pt"


class WithLoss(nn.Module):
    """Gives the loss as the Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = new_model()
        self.losses: list[float] = []

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = self.model(inputs, targets)
        self.losses.append(loss.item())
        return {"loss": loss}


def new_trainer(folder: Path, is_sharded: bool, *, is_built_by_trainer: bool = False, **options: Any):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    module = WithLoss()
    optimizer = adamw(module.model, is_sharded)

    class Consolidate(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if control.should_save and is_sharded:
                optimizer.consolidate_state_dict()

    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=SEQUENCES,
        max_grad_norm=0.5,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        **{"max_steps": STEPS, "save_strategy": "no", **options},
    )
    if is_built_by_trainer:
        built = (ZeroRedundancyOptimizer, {"optimizer_class": optim.AdamW}) if is_sharded else (optim.AdamW, {})
        return Trainer(module, arguments, train_dataset=Windows(), optimizer_cls_and_kwargs=built)
    pair = optimizer, warmup(optimizer)
    return Trainer(module, arguments, train_dataset=Windows(), optimizers=pair, callbacks=[Consolidate()])


def train(folder: Path, is_sharded: bool, resume_from: Path | None = None, **options: Any) -> Run:
    trainer = new_trainer(folder, is_sharded, **options)
    trainer.train(resume_from_checkpoint=resume_from and str(resume_from))
    return Run(trainer.model.model, trainer.model.losses)


@pytest.mark.parametrize("is_built_by_trainer", [False, True], ids=["given", "built"])
def test_ten_steps_equal_the_unsharded_ones(tmp_path, is_built_by_trainer):
    assert_equal_to_unsharded(lambda is_sharded: train(tmp_path, is_sharded, is_built_by_trainer=is_built_by_trainer))


def test_a_checkpoint_of_a_consolidated_state_is_the_unsharded_one_and_resumes(tmp_path):
    half = STEPS // 2
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    train(ours, True, max_steps=half, save_strategy="steps", save_steps=half)
    train(theirs, False, max_steps=half, save_strategy="steps", save_steps=half)
    saved = [torch.load(folder / f"checkpoint-{half}" / OPTIMIZER_FILE) for folder in (ours, theirs)]
    assert len(saved[1]["state"]) == len(list(new_model().parameters()))
    assert_same_state(*saved)
    checkpoint = ours / f"checkpoint-{half}"
    assert_equal_to_unsharded(lambda is_sharded: train(tmp_path, is_sharded, checkpoint), steps=half)


def test_saving_without_consolidating_is_an_error_that_says_what_to_call(tmp_path):
    trainer = new_trainer(tmp_path, is_sharded=True, max_steps=1)
    trainer.train()
    # What the Trainer calls when it is time to save; the others would wait in its next collective otherwise.
    with raises_on(RuntimeError, ranks=0, match="consolidate_state_dict"):
        trainer._save_optimizer_and_scheduler(str(tmp_path))
    assert trainer.args.should_save == (dist.get_rank() == 0)
    if trainer.args.should_save:
        assert_unreadable(tmp_path / OPTIMIZER_FILE)
