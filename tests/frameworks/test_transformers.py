"""Hugging Face's Trainer, ours and with ours in it: training and checkpoints are those of the unsharded optimizer."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from support.combinations import each_of
from support.example_scripts import PLUGINS, Trained, assert_equal, lines_that_differ, script
from support.example_scripts import train as train_script
from support.framework_training import (
    MUON_ROUNDING,
    ROUNDING,
    SEQUENCES,
    STEPS,
    MuonAndAdamW,
    Run,
    Windows,
    adamw,
    assert_equal_to_unsharded,
    assert_same_muon_state,
    assert_shared,
    assert_unreadable,
    forget_accelerator,
    muon_groups,
    muon_model,
    needs,
    new_model,
    two_ranks,
    warmup,
)
from support.training import assert_same_state, cutting
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_testing import assert_replicas_equal, raises_on, run_on_ranks

pytestmark = [needs("accelerate"), needs("transformers")]


class WithLoss(nn.Module):
    """Gives the loss as the Trainer wants it."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model = model or new_model()
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


@two_ranks
@pytest.mark.parametrize("is_built_by_trainer", [False, True], ids=["given", "built"])
def test_ten_steps_equal_the_unsharded_ones(tmp_path, is_built_by_trainer):
    assert_equal_to_unsharded(lambda is_sharded: train(tmp_path, is_sharded, is_built_by_trainer=is_built_by_trainer))


def skip_where_the_trainer_cannot_resume_on_cpus() -> None:
    import transformers

    if Version(transformers.__version__) < Version("5.18"):
        pytest.skip("before 5.18, transformers loads no optimizer's state on several ranks of CPUs, plain ones neither")


OPTIMIZER_FILE = "optimizer.pt"


@two_ranks
def test_a_checkpoint_of_a_consolidated_state_is_the_unsharded_one_and_resumes(tmp_path):
    skip_where_the_trainer_cannot_resume_on_cpus()
    half = STEPS // 2
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    train(ours, True, max_steps=half, save_strategy="steps", save_steps=half)
    train(theirs, False, max_steps=half, save_strategy="steps", save_steps=half)
    saved = [torch.load(folder / f"checkpoint-{half}" / OPTIMIZER_FILE) for folder in (ours, theirs)]
    assert len(saved[1]["state"]) == len(list(new_model().parameters()))
    assert_same_state(*saved)
    checkpoint = ours / f"checkpoint-{half}"
    assert_equal_to_unsharded(lambda is_sharded: train(tmp_path, is_sharded, checkpoint), steps=half)


@two_ranks
def test_saving_without_consolidating_is_an_error_that_says_what_to_call(tmp_path):
    trainer = new_trainer(tmp_path, is_sharded=True, max_steps=1)
    trainer.train()
    # What the Trainer calls when it is time to save; the others would wait in its next collective otherwise.
    with raises_on(RuntimeError, ranks=0, match="consolidate_state_dict"):
        trainer._save_optimizer_and_scheduler(str(tmp_path))
    assert trainer.args.should_save == (dist.get_rank() == 0)
    if trainer.args.should_save:
        assert_unreadable(tmp_path / OPTIMIZER_FILE)


def muon_trainer(folder: Path, is_sharded: bool, partition: str, max_steps: int):
    from transformers import Trainer, TrainingArguments
    from zeroshard_integrations.transformers import ZeroShardTrainer

    class Sharded(ZeroShardTrainer):
        sharding_options: ClassVar[dict[str, Any]] = {"partition": partition}

    module = WithLoss(muon_model(partition))
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        optim="adamw_torch",
        per_device_train_batch_size=SEQUENCES,
        max_grad_norm=0.5,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=4,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        max_steps=max_steps,
        save_strategy="steps",
        save_steps=STEPS // 2,
    )
    if is_sharded:
        groups = {"param_groups": lambda trained: muon_groups(trained.model)}
        return Sharded(module, arguments, train_dataset=Windows(), **groups)
    plain = MuonAndAdamW(muon_groups(module.model))
    return Trainer(module, arguments, train_dataset=Windows(), optimizers=(plain, None))


def trainer_without_hook(model: nn.Module, arguments: Any, **options: Any):
    from transformers import Trainer

    optimizer_class, kwargs = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    ours = ZeroRedundancyOptimizer, {"optimizer_class": optimizer_class, **kwargs}
    return Trainer(model, arguments, optimizer_cls_and_kwargs=ours, **options)


def run_script(kind: str, folder: Path, *arguments: Any, plugin: str = "hook", **options: Any) -> Trained:
    """Run a script of the page; sharded without our Trainer, that is the plain one whose Trainer is given our class."""
    forget_accelerator()
    options = {"disable_tqdm": True, **options}
    if kind == "plain":
        return train_script("trainer_plain", folder, *arguments, **options)
    if plugin == "none":
        return train_script("trainer_plain", folder, *arguments, replaced={"Trainer": trainer_without_hook}, **options)
    made = functools.partial(script("trainer_sharded").ZeroShardTrainer, **PLUGINS[plugin])
    return train_script("trainer_sharded", folder, *arguments, replaced={"ZeroShardTrainer": made}, **options)


def save(kind: str, folder: Path, plugin: str) -> None:
    run_script(kind, folder, 0, 10, plugin=plugin, dtype=torch.float64)


KINDS = ["sharded", "plain"]

SHARDED = ["sharded", "sharded, local"]


def assert_as_plain(ours: Trained, theirs: Trained, plugin: str, **options: Any) -> None:
    """Compare two trainings; without DistributedDataParallel there are no warnings of it."""
    assert {*ours.complaints} <= {*theirs.complaints}
    assert_equal(replace(ours, complaints=theirs.complaints) if plugin in SHARDED else ours, theirs, **options)


def resume(folder: Path, plugin: str) -> None:
    options = {"plugin": plugin, "dtype": torch.float64}
    ours, theirs = (run_script(kind, folder / kind, 10, 20, **options) for kind in KINDS)
    assert_as_plain(ours, theirs, plugin, steps=10, rounding=ROUNDING)


@two_ranks
@pytest.mark.parametrize("partition", MUON_ROUNDING)
def test_muon_and_adamw_train_save_and_resume_as_two_plain_optimizers(tmp_path, partition):
    skip_where_the_trainer_cannot_resume_on_cpus()
    folders, half = {True: tmp_path / "ours", False: tmp_path / "theirs"}, STEPS // 2
    checkpoint = folders[True] / f"checkpoint-{half}"
    compared = {"steps": half, "rounding": MUON_ROUNDING[partition]}

    def save(is_sharded: bool) -> Run:
        trainer = muon_trainer(folders[is_sharded], is_sharded, partition, half)
        trainer.train()
        if is_sharded:
            assert_shared(trainer.optimizer.optimizer, partition)
        return Run(trainer.model.model, trainer.model.losses)

    def resume(is_sharded: bool) -> Run:
        trainer = muon_trainer(tmp_path / "resumed", is_sharded, partition, STEPS)
        trainer.train(resume_from_checkpoint=str(checkpoint))
        return Run(trainer.model.model, trainer.model.losses)

    assert_equal_to_unsharded(save, **compared)
    saved = [torch.load(folder / f"checkpoint-{half}" / OPTIMIZER_FILE) for folder in folders.values()]
    assert_same_muon_state(*saved, partition)
    assert_equal_to_unsharded(resume, **compared)


# ---------------------------------------------------------------------- the scripts of the page


def test_the_scripts_differ_in_three_lines():
    assert len(lines_that_differ("trainer_plain", "trainer_sharded")) == 3


@two_ranks
@each_of("max_grad_norm", [0.5, 0.0], accumulated=[4, 1], bf16=[True, False])
@pytest.mark.parametrize("plugin", [*PLUGINS, "none"])
def test_twenty_steps_of_the_script_equal_the_unsharded_ones(tmp_path, bf16, accumulated, max_grad_norm, plugin):
    options = {"bf16": bf16, "gradient_accumulation_steps": accumulated, "max_grad_norm": max_grad_norm}
    rounding = 0.0
    if plugin == "sharded" and accumulated > 1:
        # The means of four batches add up, and not the batches of a rank.
        options, rounding = {**options, "bf16": False, "dtype": torch.float64}, ROUNDING
    ours, theirs = (run_script(kind, tmp_path, plugin=plugin, save_strategy="no", **options) for kind in KINDS)
    assert_as_plain(ours, theirs, plugin, steps=20, rounding=rounding)
    assert len(ours.norms) in ((20,) if max_grad_norm else (0, 20))  # transformers 5.0 logs none without clipping
    assert_replicas_equal(ours.params)


@two_ranks
@each_of("plugin", ["hook", "sharded"], max_grad_norm=[0.5, 0.0])
def test_cut_tensors_are_clipped_as_the_unsharded_ones(tmp_path, max_grad_norm, plugin, monkeypatch):
    monkeypatch.setattr(script("trainer_sharded").ZeroShardTrainer, "sharding_options", {"partition": cutting("split")})
    options = {"max_grad_norm": max_grad_norm, "dtype": torch.float64, "save_strategy": "no"}
    ours, theirs = (run_script(kind, tmp_path, plugin=plugin, **options) for kind in KINDS)
    assert_as_plain(ours, theirs, plugin, steps=20, rounding=ROUNDING)


ARGUMENTS: dict[str, dict[str, Any]] = {
    "adamw": {"optim": "adamw_torch", "adam_beta2": 0.95, "lr_scheduler_type": "cosine"},
    "adafactor": {"optim": "adafactor"},
    "sgd": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "rmsprop": {"optim": "rmsprop", "warmup_steps": 5},
    "compiled": {"torch_compile_backend": "eager"},
}


@two_ranks
@each_of("name", ARGUMENTS, plugin=["hook", "sharded"])
def test_arguments_mean_what_they_mean_to_the_trainer(tmp_path, name, plugin):
    options = {"save_strategy": "no", **ARGUMENTS[name]}
    ours, theirs = (run_script(kind, tmp_path, plugin=plugin, **options) for kind in KINDS)
    assert_as_plain(ours, theirs, plugin, steps=20)


@each_of("plugin", ["hook", "sharded"], ranks=[1, 3])
def test_what_two_ranks_save_is_resumed_by_other_numbers_of_ranks(tmp_path, ranks, plugin):
    if ranks > 1:
        skip_where_the_trainer_cannot_resume_on_cpus()
    for kind in KINDS:
        run_on_ranks(save, 2, kind, tmp_path / kind, plugin, init=False)
    saved = [torch.load(tmp_path / kind / "checkpoint-10" / OPTIMIZER_FILE) for kind in KINDS]
    assert_same_state(*saved)
    run_on_ranks(resume, ranks, tmp_path, plugin, init=False)
