"""Lightning's Trainer and Fabric, with their strategy ``ddp`` and with ours: as the unsharded optimizer, bitwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.framework_training import (
    MUON_ROUNDING,
    SEQUENCES,
    STEPS,
    MuonAndAdamW,
    Run,
    Windows,
    adamw,
    assert_equal_to_unsharded,
    assert_same_muon_state,
    assert_shared,
    call_our_methods,
    muon_groups,
    muon_model,
    needs,
    new_model,
    warmup,
)
from support.lightning_training import strategy as new_strategy
from support.training import assert_same_state
from torch import nn, optim
from torch.utils.data import DataLoader
from zeroshard import ZeroRedundancyOptimizer

pytestmark = [needs("lightning"), pytest.mark.ranks(2, backend="gloo")]

STRATEGIES = ["ddp", "ddp_zeroshard", "sharded"]
PARTITIONS_AND_STRATEGIES = pytest.mark.parametrize(
    ("partition", "strategy"), [*zip(("whole", "level", "whole"), STRATEGIES, strict=True)]
)


def muon(model: nn.Module, is_sharded: bool, partition: str) -> optim.Optimizer:
    """Muon for matrices and AdamW for the rest: sharded, or two plain optimizers."""
    if not is_sharded:
        return MuonAndAdamW(muon_groups(model))
    optimizer = ZeroRedundancyOptimizer(muon_groups(model), optim.AdamW, partition=partition)
    assert_shared(optimizer, partition)
    return optimizer


def fit(
    is_sharded: bool,
    *,
    strategy: str = "ddp",
    partition: str = "",
    steps: int = STEPS,
    manual: bool = False,
    resume_from: Path | None = None,
    save_to: Path | None = None,
) -> Run:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = muon_model(partition) if partition else new_model()
            self.losses: list[float] = []
            self.automatic_optimization = not manual

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            loss = self.model(**batch)
            self.losses.append(loss.item())
            if manual:
                optimizer = self.optimizers()
                if is_sharded and index == 3:
                    call_our_methods(optimizer)
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=0.5)
                optimizer.step()
                self.lr_schedulers().step()
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = muon(self.model, is_sharded, partition) if partition else adamw(self.model, is_sharded)
            return [optimizer], [{"scheduler": warmup(optimizer), "interval": "step"}]

    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=new_strategy("lightning", strategy) if is_sharded else "ddp",
        max_steps=steps,
        gradient_clip_val=None if manual else 0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(Windows(), batch_size=SEQUENCES), ckpt_path=resume_from)
    if save_to:
        trainer.save_checkpoint(save_to)
    return Run(module.model, module.losses)


@pytest.mark.parametrize(
    ("manual", "strategy"),
    [(False, "ddp"), (True, "ddp_zeroshard"), (False, "sharded")],
    ids=["automatic-ddp", "manual-ddp_zeroshard", "automatic-sharded"],
)
def test_ten_steps_equal_the_unsharded_ones(manual, strategy):
    assert_equal_to_unsharded(lambda is_sharded: fit(is_sharded, manual=manual, strategy=strategy))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_is_the_unsharded_one_and_resumes(strategy, tmp_path):
    ours, theirs = tmp_path / "ours.ckpt", tmp_path / "theirs.ckpt"
    fit(True, strategy=strategy, steps=STEPS // 2, save_to=ours)
    fit(False, steps=STEPS // 2, save_to=theirs)
    saved = [torch.load(path)["optimizer_states"][0] for path in (ours, theirs)]
    assert len(saved[1]["state"]) == len(list(new_model().parameters()))
    assert_same_state(*saved)

    def resume(is_sharded: bool) -> Run:
        return fit(is_sharded, strategy=strategy, resume_from=ours)

    assert_equal_to_unsharded(resume, steps=STEPS // 2)


@PARTITIONS_AND_STRATEGIES
def test_muon_and_adamw_train_save_and_resume_as_two_plain_optimizers(partition, strategy, tmp_path):
    files, half = {True: tmp_path / "ours.ckpt", False: tmp_path / "theirs.ckpt"}, STEPS // 2
    options = {"strategy": strategy, "partition": partition}
    compared = {"steps": half, "rounding": MUON_ROUNDING[partition]}
    assert_equal_to_unsharded(lambda ours: fit(ours, steps=half, save_to=files[ours], **options), **compared)
    saved = [torch.load(path)["optimizer_states"][0] for path in files.values()]
    assert_same_muon_state(*saved, partition)
    assert_equal_to_unsharded(lambda ours: fit(ours, resume_from=files[True], **options), **compared)


def train_by_fabric(
    is_sharded: bool, strategy: str, folder: Path, *, partition: str = "", compiles: bool = False, plugins: Any = ()
) -> Run:
    """Train in a loop of Fabric, which saves and loads the optimizer in the middle."""
    from lightning.fabric import Fabric

    chosen = new_strategy("fabric", strategy) if is_sharded else "ddp"
    fabric = Fabric(accelerator="cpu", devices=2, strategy=chosen, plugins=list(plugins))
    fabric.launch()
    model, losses = muon_model(partition) if partition else new_model(), []
    built = muon(model, is_sharded, partition) if partition else adamw(model, is_sharded)
    ddp, optimizer = fabric.setup(torch.compile(model, backend="aot_eager") if compiles else model, built)
    schedule = warmup(optimizer)
    batches = fabric.setup_dataloaders(DataLoader(Windows(), batch_size=SEQUENCES))
    for step, batch in enumerate(batches):
        loss = ddp(**batch)
        losses.append(loss.item())
        fabric.backward(loss)
        fabric.clip_gradients(ddp, optimizer, max_norm=0.5, error_if_nonfinite=False)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if is_sharded and step == 3 and not partition:
            call_our_methods(optimizer)
        if step == STEPS // 2:
            fabric.save(folder / f"{is_sharded}.ckpt", {"optimizer": optimizer})
            # Both take what the sharded one has saved.
            fabric.load(folder / "True.ckpt", {"optimizer": optimizer})
    return Run(model, losses)


@PARTITIONS_AND_STRATEGIES
def test_fabric_trains_muon_and_adamw_as_two_plain_optimizers(partition, strategy, tmp_path):
    def train(is_sharded: bool) -> Run:
        return train_by_fabric(is_sharded, strategy, tmp_path, partition=partition)

    assert_equal_to_unsharded(train, rounding=MUON_ROUNDING[partition])
    saved = [torch.load(tmp_path / f"{is_sharded}.ckpt")["optimizer"] for is_sharded in (True, False)]
    assert_same_muon_state(*saved, partition)


@pytest.mark.parametrize(
    ("feature", "strategy"), [*zip(("alone", "fp16 with a scaler", "compiled"), STRATEGIES, strict=True)]
)
def test_fabric_trains_clips_saves_and_loads_as_unsharded(feature, strategy, tmp_path):
    from lightning.fabric.plugins import MixedPrecision

    def train(is_sharded: bool) -> Run:
        plugins = []
        if feature == "fp16 with a scaler":
            # Too large at first: some steps are skipped.
            plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**20))]
        run = train_by_fabric(is_sharded, strategy, tmp_path, compiles=feature == "compiled", plugins=plugins)
        assert not plugins or plugins[0].scaler.get_scale() < 2.0**20
        return run

    assert_equal_to_unsharded(train)
    assert_same_state(*(torch.load(tmp_path / f"{is_sharded}.ckpt")["optimizer"] for is_sharded in (True, False)))
