"""The scripts that the documentation shows run as they stand, and sharding changes none of their numbers."""

from __future__ import annotations

import contextlib
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from support.training import assert_same_state
from zeroshard_testing import run_on_ranks

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def run(script: str, checkpoint: Path) -> None:
    sys.argv = [script, str(checkpoint)]
    runpy.run_path(str(EXAMPLES / script))


def train(script: str, ranks: int, checkpoint: Path) -> dict:
    run_on_ranks(run, ranks, script, checkpoint, init=False)
    return torch.load(checkpoint)


def test_sharded_training_is_saved_and_resumed_as_plain_training_is(tmp_path: Path) -> None:
    for steps in (50, 100):
        plain, sharded = (train(script, 2, tmp_path / f"{script}.pt") for script in ("plain.py", "sharded.py"))
        assert plain["steps"] == sharded["steps"] == steps
        assert all(torch.equal(value, plain["model"][name]) for name, value in sharded["model"].items())
        # The sharded optimizer is built from named parameters.
        assert sharded["optimizer"]["param_groups"][0].pop("param_names") == list(sharded["model"])
        assert_same_state(sharded["optimizer"], plain["optimizer"])


@pytest.mark.parametrize("script", ["sharded.py", "plain.py"])
def test_another_number_of_ranks_resumes_a_run(script: str, tmp_path: Path) -> None:
    train("sharded.py", 2, tmp_path / "run.pt")
    assert train(script, 3, tmp_path / "run.pt")["steps"] == 100


def run_page(page: str, folder: Path) -> None:
    """Run the script that a page shows, with what torchrun sets, in a folder."""
    source = re.search("```python\n(# train.py\n.*?)```", (EXAMPLES.parent / page).read_text("utf-8"), re.DOTALL)[1]
    with contextlib.chdir(folder) if sys.version_info >= (3, 11) else contextlib.nullcontext():
        exec(source, {"__name__": "__main__"})


@pytest.mark.skipif(sys.version_info < (3, 11), reason="contextlib.chdir is new in Python 3.11")
def test_the_script_for_several_hosts_runs_and_saves(tmp_path: Path) -> None:
    run_on_ranks(run_page, 2, "first-steps.md", tmp_path, init=False)
    saved = torch.load(tmp_path / "checkpoint.pt")
    assert saved["optimizer"]["state"][0]["exp_avg"].shape == saved["model"]["weight"].shape
