"""Accelerate, with ZeroShardPlugin and without: training and checkpoints are those of the unsharded optimizer."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from support.combinations import each_of
from support.example_scripts import PLUGINS, Trained, assert_equal, lines_that_differ, script, sharded, train
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
from support.training import assert_same_state
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_testing import assert_replicas_equal, raises_on, run_on_ranks

pytestmark = needs("accelerate")


def step(accelerator: Any, model: nn.Module, optimizer: optim.Optimizer) -> None:
    accelerator.backward(model(torch.ones(4, 8) * (1 + accelerator.process_index)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


class Training:
    """A plain loop around what ``prepare()`` returned."""

    def __init__(self, is_sharded: bool, muon: str = "", plugin: str = "hook", **options: Any) -> None:
        from accelerate import Accelerator
        from zeroshard_integrations.accelerate import ZeroShardPlugin

        preparing = self.accelerator = Accelerator(cpu=True, **options)
        self.model, self.losses = muon_model(muon) if muon else new_model(), []
        if muon and is_sharded:
            preparing = ZeroShardPlugin(self.accelerator, **PLUGINS[plugin])
            self.built = preparing.create_optimizer(self.model, muon_groups, optim.AdamW, partition=muon)
            assert_shared(self.built, muon)
        else:
            self.built = MuonAndAdamW(muon_groups(self.model)) if muon else adamw(self.model, is_sharded)
        batches = DataLoader(Windows(), batch_size=SEQUENCES)
        prepared = preparing.prepare(self.model, self.built, batches, warmup(self.built))
        self.ddp, self.optimizer, self.batches, self.scheduler = prepared
        assert isinstance(self.ddp, DistributedDataParallel) == (not is_sharded or plugin == "hook")

    def run(self, steps: range = range(STEPS)) -> Run:
        for step, batch in enumerate(self.batches):
            if step not in steps:
                continue
            with self.accelerator.accumulate(self.ddp):
                loss = self.ddp(**batch)
                self.losses.append(loss.item())
                self.accelerator.backward(loss)
                self.accelerator.clip_grad_norm_(self.ddp.parameters(), 0.5)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return Run(self.model, self.losses)


@two_ranks
@pytest.mark.parametrize("accumulated", [1, 2])
def test_ten_steps_equal_the_unsharded_ones(accumulated):
    assert_equal_to_unsharded(lambda is_sharded: Training(is_sharded, gradient_accumulation_steps=accumulated).run())


@two_ranks
def test_an_optimizer_that_has_state_is_prepared():
    def train(is_sharded: bool) -> Run:
        training = Training(is_sharded)
        training.run(range(5))
        training.optimizer = training.accelerator.prepare(training.built)
        return training.run(range(5, STEPS))

    assert_equal_to_unsharded(train)


OPTIMIZER_FILE = "optimizer.bin"


def train_script(kind: str, *arguments: Any, plugin: str = "hook", partition: str = "whole", **options: Any) -> Trained:
    """Run a script of the page; sharded without the plugin, that is the plain one with our optimizer class."""
    from zeroshard_integrations.accelerate import ZeroShardPlugin

    forget_accelerator()
    ours = sharded(partition)
    if kind == "plain":
        return train("accelerate_plain", *arguments, **options)
    if plugin in PLUGINS:
        made = functools.partial(ZeroShardPlugin, **PLUGINS[plugin])
        replaced = {"ZeroRedundancyOptimizer": ours, "ZeroShardPlugin": made}
        return train("accelerate_sharded", *arguments, replaced=replaced, **options)
    without_hook = functools.partial(ours, optimizer_class=optim.AdamW)
    return train("accelerate_plain", *arguments, replaced={"AdamW": without_hook}, **options)


def resume(folder: Path, plugin: str) -> None:
    options = {"plugin": plugin, "dtype": torch.float64}
    ours, theirs = (train_script(kind, folder / kind, 10, 20, **options) for kind in ("sharded", "plain"))
    assert_equal(ours, theirs, steps=10, rounding=ROUNDING)


@two_ranks
def test_a_state_consolidated_before_it_is_saved_is_the_unsharded_one_and_resumes(tmp_path):
    half = STEPS // 2
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder, is_sharded in ((ours, True), (theirs, False)):
        training = Training(is_sharded)
        training.run(range(half))
        if is_sharded:
            consolidate = training.built.consolidate_state_dict
            training.accelerator.register_save_state_pre_hook(lambda *_, call=consolidate: call())
        training.accelerator.save_state(folder)
        training.accelerator.wait_for_everyone()
    saved = [torch.load(folder / OPTIMIZER_FILE) for folder in (ours, theirs)]
    assert len(saved[1]["state"]) == len(list(new_model().parameters()))
    assert_same_state(*saved)

    def resume(is_sharded: bool) -> Run:
        training = Training(is_sharded)
        training.accelerator.load_state(ours)
        return training.run(range(half, STEPS))

    assert_equal_to_unsharded(resume, steps=half)


@two_ranks
def test_saving_without_consolidating_is_an_error_that_says_what_to_call(tmp_path):
    training = Training(is_sharded=True)
    training.run(range(1))
    with raises_on(RuntimeError, ranks=0, match="consolidate_state_dict"):
        training.accelerator.save_state(tmp_path)
    if training.accelerator.is_main_process:
        assert_unreadable(tmp_path / OPTIMIZER_FILE)


def save(kind: str, folder: Path, plugin: str) -> None:
    train_script(kind, folder, 0, 10, plugin=plugin, dtype=torch.float64)


@two_ranks
@pytest.mark.parametrize(("plugin", "partition", "accumulated"), [("hook", "whole", 1), ("sharded, local", "level", 2)])
def test_muon_and_adamw_train_save_and_resume_as_two_plain_optimizers(tmp_path, partition, accumulated, plugin):
    folders, half = {True: tmp_path / "ours", False: tmp_path / "theirs"}, STEPS // 2
    options = {"muon": partition, "gradient_accumulation_steps": accumulated, "plugin": plugin}
    compared = {"steps": half, "rounding": MUON_ROUNDING[partition]}

    def save(is_sharded: bool) -> Run:
        training = Training(is_sharded, **options)
        run = training.run(range(half))
        training.accelerator.save_state(folders[is_sharded])
        training.accelerator.wait_for_everyone()
        return run

    def resume(is_sharded: bool) -> Run:
        training = Training(is_sharded, **options)
        training.accelerator.load_state(folders[True])
        return training.run(range(half, STEPS))

    assert_equal_to_unsharded(save, **compared)
    saved = [torch.load(folder / OPTIMIZER_FILE) for folder in folders.values()]
    assert_same_muon_state(*saved, partition)
    assert_equal_to_unsharded(resume, **compared)


def sharded_adam(params: Any, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(params, optim.Adam, **options)


@two_ranks
@pytest.mark.parametrize(
    ("plugin", "accumulated", "muon", "clip"),
    [("hook", 1, True, True), ("sharded", 2, False, False), ("sharded, local", 2, True, True)],
    ids=["hook, Muon, clipped", "sharded, accumulated", "sharded, local, Muon, clipped"],
)
def test_a_gradient_scaler_skips_the_steps_that_it_skips_unsharded(clip, muon, plugin, accumulated):
    from accelerate import Accelerator
    from zeroshard_integrations.accelerate import ZeroShardPlugin

    def run(is_sharded: bool) -> list[Any]:
        forget_accelerator()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
        # Accelerate makes one for mixed_precision="fp16" on GPUs alone.
        accelerator.scaler = torch.amp.GradScaler("cpu", growth_interval=3)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        if muon:
            groups = script("muon").param_groups(model, model[2])
            ours, plain = ZeroRedundancyOptimizer(groups, optim.AdamW, partition="level"), MuonAndAdamW(groups)
        else:
            ours, plain = (build(model.parameters(), lr=1e-2) for build in (sharded_adam, optim.Adam))
        preparing = ZeroShardPlugin(accelerator, **PLUGINS[plugin]) if is_sharded else accelerator
        prepared, optimizer = preparing.prepare(model, ours if is_sharded else plain)
        skipped = []
        for number in range(12 * accumulated):
            overflows = number // accumulated in (4, 5) and accelerator.process_index == 1
            with accelerator.accumulate(prepared):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = prepared(torch.ones(4, 8) * (1 + accelerator.process_index)).square().mean()
                accelerator.backward(loss * (1e38 if overflows else 1.0))
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                skipped.append(accelerator.optimizer_step_was_skipped)
        assert skipped[4:6] == [True, True]
        assert not all(skipped[6:])
        return [skipped, accelerator.scaler.get_scale(), [param.detach() for param in model.parameters()]]

    # Means are added up in another order.
    rounding = 1e-5 if plugin == "sharded" and accumulated > 1 else 0.0
    torch.testing.assert_close(run(True), run(False), rtol=0, atol=rounding)


@two_ranks
@pytest.mark.parametrize("plugin", ["hook", "sharded"])
def test_clipping_a_plateau_and_an_average_of_the_model(plugin):
    from accelerate import Accelerator
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
    from zeroshard_integrations.accelerate import ZeroShardPlugin

    def run(is_sharded: bool) -> list[torch.Tensor]:
        forget_accelerator()
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        ours, plain = ZeroRedundancyOptimizer(model.parameters(), optim.Adam), optim.Adam(model.parameters())
        preparing = ZeroShardPlugin(accelerator, **PLUGINS[plugin]) if is_sharded else accelerator
        prepared, optimizer = preparing.prepare(model, ours if is_sharded else plain)
        scheduler = accelerator.prepare(optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0))
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        norms = []
        for _ in range(6):
            accelerator.backward(prepared(torch.ones(4, 8) * (1 + accelerator.process_index)).square().mean())
            norms.append(accelerator.clip_grad_norm_(prepared.parameters(), 0.1))
            optimizer.step()
            scheduler.step(1.0)
            averaged.update_parameters(model)
            optimizer.zero_grad()
        return [*norms, *averaged.parameters()]

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=0)


# ---------------------------------------------------------------------- the scripts of the page


def test_the_scripts_differ_in_three_lines():
    assert len(lines_that_differ("accelerate_plain", "accelerate_sharded")) == 3


@two_ranks
@each_of("clip", ["norm", "value", "off"], accumulated=[4, 1], precision=["bf16", "no"])
@pytest.mark.parametrize("plugin", [*PLUGINS, "none"])
def test_twenty_steps_of_the_script_equal_the_unsharded_ones(precision, accumulated, clip, plugin):
    options, rounding = {"precision": precision, "accumulated": accumulated, "clip": clip}, 0.0
    if plugin == "sharded" and accumulated > 1:
        # The means of four batches add up, and not the batches of a rank.
        options, rounding = {**options, "precision": "no", "dtype": torch.float64}, ROUNDING
    ours, theirs = (train_script(kind, None, plugin=plugin, **options) for kind in ("sharded", "plain"))
    assert_equal(ours, theirs, steps=20 * accumulated, rounding=rounding)
    assert len(ours.norms) == (20 if clip == "norm" else 0)
    assert_replicas_equal(ours.params)


@two_ranks
@each_of("plugin", ["hook", "sharded"], clip=["norm", "value"])
def test_cut_tensors_are_clipped_as_the_unsharded_ones(clip, plugin):
    options = {"clip": clip, "dtype": torch.float64, "partition": "split"}
    ours = train_script("sharded", None, plugin=plugin, **options)
    del options["partition"]
    assert_equal(ours, train_script("plain", None, **options), steps=20, rounding=ROUNDING)


@each_of("plugin", ["hook", "sharded"], ranks=[1, 3])
def test_what_two_ranks_save_is_resumed_by_other_numbers_of_ranks(tmp_path, ranks, plugin):
    for kind in ("sharded", "plain"):
        run_on_ranks(save, 2, kind, tmp_path / kind, plugin, init=False)
    assert_same_state(*(torch.load(tmp_path / kind / "000010" / OPTIMIZER_FILE) for kind in ("sharded", "plain")))
    run_on_ranks(resume, ranks, tmp_path, plugin, init=False)
