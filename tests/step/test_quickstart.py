"""The quickstart trains plainly and sharded, and says what each needs and whether both end with the same parameters."""

from __future__ import annotations

import math
import os
import re
from typing import Any

import pytest
import torch
from support.example_scripts import script
from zeroshard_testing import run_on_ranks

PARAMETERS = 25.86
"""Megabytes of the model's parameters."""


def train(*arguments: Any) -> None:
    script("quickstart").train(int(os.environ["RANK"]), *arguments)


def spawn(_: Any, arguments: tuple[Any, ...], ranks: int) -> None:
    """Train on ranks of the harness, which have imported torch already, in place of new processes."""
    run_on_ranks(train, ranks, *arguments, init=False)


def table(text: str) -> dict[str, dict[str, float]]:
    """The printed numbers, by row and by column."""
    titles, *rows = [
        re.split(r"\s{2,}", line.strip()) for line in text.partition("MB of each rank")[2].splitlines()[1:8]
    ]
    return {row[0]: dict(zip(titles, map(float, row[1:]), strict=True)) for row in rows}


@pytest.mark.parametrize("gradients", ["sharded", "ddp"])
def test_the_resumed_training_ends_as_the_plain_one(gradients, monkeypatch, capsys):
    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)

    status = script("quickstart").main(["--steps", "1", "--gradients", gradients])

    text = capsys.readouterr().out
    assert text.endswith("parameters, resumed and plain: equal bit for bit\n")
    assert status == 0
    found, share = table(text), 1 / 2 if gradients == "sharded" else 1
    for rank in (0, 1):
        plain, sharded, resumed = (found[f"{part}, rank {rank}"] for part in ("plain", "sharded", "resumed"))
        assert resumed["loss"] == plain["loss"] < sharded["loss"]
        assert plain["state"] == pytest.approx(2 * PARAMETERS, rel=0.01)
        assert sharded["state"] == pytest.approx(PARAMETERS, rel=0.03)
        assert plain["gradients"] == PARAMETERS
        assert sharded["gradients"] == pytest.approx(share * PARAMETERS, rel=0.03)
        assert sharded["sent"] == pytest.approx(plain["sent"], rel=0.03)
    for name, gradients_and_state in (
        ("plain, 2", 1 + 2),
        ("sharded, 2", share + 1),
        ("predicted, 8", share**3 + 1 / 4),
    ):
        [(held, bar)] = re.findall(rf"^{name} ranks +([\d.]+)  (=+\++-+)$", text, re.MULTILINE)
        assert float(held) == pytest.approx((1 + gradients_and_state) * PARAMETERS, rel=0.02)
        assert len(bar) == pytest.approx(float(held) / 2, abs=1.5)


@pytest.mark.parametrize(("ranks", "end", "status"), [(2, 1.5, 1), (2, math.nan, 1), (3, 1.5, 0)])
def test_parameters_that_differ_are_an_error_at_two_ranks(ranks, end, status, monkeypatch, capsys):
    def leave(_, arguments, ranks):
        _, folder, part, _ = arguments
        needed = {"parameters": 1.0, "gradients": 1.0, "state": 1.0}
        for rank in range(ranks):
            torch.save((needed, torch.tensor([end if part == "resumed" else 1.0])), folder / f"{part}{rank}.pt")

    monkeypatch.setattr(torch.multiprocessing, "spawn", leave)

    assert script("quickstart").main(["--ranks", str(ranks)]) == status
    assert "differ by up to" in capsys.readouterr().out
