"""The scripts of the page about checkpoints: what they save is resumed as if training had never stopped."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.example_scripts import sharded
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from zeroshard_testing import run_on_ranks

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
# Other numbers of ranks add up gradients in another order, which changes their last bits: some 1e-16. AdamW divides by
# the size of a gradient, and multiplies by the learning rate, so parameters change by little more.
ROUNDING = 1e-12


def run(partition: str, script: str, *arguments: object) -> None:
    sys.argv = [script, *map(str, arguments)]
    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        import checkpoint_training

        with mock.patch.object(checkpoint_training, "ZeroRedundancyOptimizer", sharded(partition)):
            runpy.run_path(str(EXAMPLES / script))


def train(ranks: int, script: str, *arguments: object, partition: str = "whole") -> None:
    run_on_ranks(run, ranks, partition, script, *arguments, init=False)


def read(checkpoint: Path) -> dict[str, Any]:
    dcp_to_torch_save(checkpoint, checkpoint / "whole.pt")
    return torch.load(checkpoint / "whole.pt")


def assert_same(actual: dict[str, Any], expected: dict[str, Any], rounding: float) -> None:
    assert actual["steps"] == expected["steps"]
    # As JSON, for torch makes lists of tuples when it loads with full_state_dict.
    groups, of = (json.dumps(each["optimizer"]["param_groups"], sort_keys=True) for each in (actual, expected))
    assert groups == of
    torch.testing.assert_close(actual["model"], expected["model"], rtol=0, atol=rounding)
    torch.testing.assert_close(actual["optimizer"]["state"], expected["optimizer"]["state"], rtol=0, atol=rounding)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    train(2, "checkpoint_dcp.py", "sharded", folder, 10)
    return read(folder / "000010")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    train(2, "checkpoint_dcp.py", "sharded", folder, 5)
    return folder


@pytest.mark.parametrize(
    ("kind", "ranks", "rounding"),
    [
        ("sharded", 2, 0),
        pytest.param("sharded", 3, ROUNDING, marks=pytest.mark.exhaustive),
        ("plain", 1, ROUNDING),
        pytest.param("plain", 2, 0, marks=pytest.mark.exhaustive),
        ("fsdp", 3, ROUNDING),
    ],
)
def test_any_optimizer_resumes_at_any_number_of_ranks(
    kind: str, ranks: int, rounding: float, saved: Path, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    folder = shutil.copytree(saved, tmp_path / "run")
    train(ranks, "checkpoint_dcp.py", kind, folder, 10)
    assert_same(read(folder / "000010"), uninterrupted, rounding)


@pytest.mark.parametrize(("kind", "ranks"), [("plain", 1), ("fsdp", 2)])
def test_what_others_have_saved_is_resumed_sharded(
    kind: str, ranks: int, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    train(ranks, "checkpoint_dcp.py", kind, tmp_path, 5)
    train(3, "checkpoint_dcp.py", "sharded", tmp_path, 10, partition="split")
    assert_same(read(tmp_path / "000010"), uninterrupted, ROUNDING)


@pytest.mark.parametrize(("first", "second"), [("sharded", "fsdp"), ("fsdp", "sharded"), ("sharded", "plain")])
def test_one_file_is_resumed_by_another_optimizer(
    first: str, second: str, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    train(2, "checkpoint_file.py", first, tmp_path, 5, partition="split")
    train(3, "checkpoint_file.py", second, tmp_path, 10, partition="split")
    assert_same({**torch.load(tmp_path / "000010.pt"), "steps": 10}, uninterrupted, ROUNDING)


def test_what_is_saved_while_training_goes_on_is_resumed(
    saved: Path, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    train(2, "checkpoint_async.py", tmp_path, 10)
    assert_same(read(tmp_path / "000005"), read(saved / "000005"), 0)
    assert_same(read(tmp_path / "000010"), uninterrupted, 0)


@pytest.mark.parametrize("partition", ["whole", "split"])
def test_safetensors_are_resumed_at_any_number_of_ranks(
    partition: str, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    expected = uninterrupted["model"] | {
        f"state.{name}.{key}": value
        for name, entries in uninterrupted["optimizer"]["state"].items()
        for key, value in entries.items()
    }
    train(2, "checkpoint_safetensors.py", tmp_path / "two", 5, partition=partition)
    shutil.copytree(tmp_path / "two", tmp_path / "three")
    for folder, ranks, rounding in (("two", 2, 0), ("three", 3, ROUNDING)):
        train(ranks, "checkpoint_safetensors.py", tmp_path / folder, 10, partition=partition)
        found = {name: torch.full_like(value, torch.nan) for name, value in expected.items()}
        dcp.load(found, storage_reader=HuggingFaceStorageReader(tmp_path / folder / "000010"), no_dist=True)
        torch.testing.assert_close(found, expected, rtol=0, atol=rounding)


def run_and_signal(at: int, *arguments: object) -> None:
    """Run the script, and send SIGTERM to rank 1 alone, in the middle of a step."""
    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        import checkpoint_training

    original = checkpoint_training.train

    def train_and_signal(model: Any, optimizer: Any, steps: range) -> None:
        if steps.start == at and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        original(model, optimizer, steps)

    with mock.patch.object(checkpoint_training, "train", train_and_signal):
        run("whole", "checkpoint_sigterm.py", *arguments)


def test_all_ranks_save_at_a_signal_to_one_of_them(uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    run_on_ranks(run_and_signal, 2, 4, file, 10, init=False)
    assert torch.load(file)["steps"] == 5
    train(2, "checkpoint_sigterm.py", file, 10)
    saved = torch.load(file)
    assert saved["steps"] == 10
    torch.testing.assert_close(saved["model"], uninterrupted["model"], rtol=0, atol=0)
