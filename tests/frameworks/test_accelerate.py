"""Accelerate's ``prepare()``, a plain loop around it and ``save_state()``: as with the unsharded optimizer, bitwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from training import assert_same_state
from zeroshard_testing import raises_on

pytestmark = [needs("accelerate"), pytest.mark.ranks(2, backend="gloo")]

OPTIMIZER_FILE = "optimizer.bin"


@pytest.fixture(autouse=True)
def _state_of_this_test_alone():
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Training:
    """A plain loop around what ``prepare()`` returned."""

    def __init__(self, is_sharded: bool, **options: Any) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True, **options)
        self.model, self.losses = new_model(), []
        self.built = adamw(self.model, is_sharded)
        batches = DataLoader(Windows(), batch_size=SEQUENCES)
        prepared = self.accelerator.prepare(self.model, self.built, batches, warmup(self.built))
        self.ddp, self.optimizer, self.batches, self.scheduler = prepared
        assert isinstance(self.ddp, DistributedDataParallel)

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


@pytest.mark.parametrize("accumulated", [1, 2])
def test_ten_steps_equal_the_unsharded_ones(accumulated):
    assert_equal_to_unsharded(lambda is_sharded: Training(is_sharded, gradient_accumulation_steps=accumulated).run())


def test_an_optimizer_that_has_state_is_prepared():
    def train(is_sharded: bool) -> Run:
        training = Training(is_sharded)
        training.run(range(5))
        training.optimizer = training.accelerator.prepare(training.built)
        return training.run(range(5, STEPS))

    assert_equal_to_unsharded(train)


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


def test_saving_without_consolidating_is_an_error_that_says_what_to_call(tmp_path):
    training = Training(is_sharded=True)
    training.run(range(1))
    with raises_on(RuntimeError, ranks=0, match="consolidate_state_dict"):
        training.accelerator.save_state(tmp_path)
    if training.accelerator.is_main_process:
        assert_unreadable(tmp_path / OPTIMIZER_FILE)
