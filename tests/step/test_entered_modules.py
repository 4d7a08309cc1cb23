"""How many modules a reader must know to follow a step, or a bucket and its step: those that Python enters."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_integrations.ddp import register_reduce_to_owner

MOST = 18
OURS = ("zeroshard.", "zeroshard_core.", "zeroshard_comm.", "zeroshard_integrations.")


def entered(call: Callable[[], object]) -> set[str]:
    """Return the modules of ours in which a call runs a function, in any thread."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        name = str(frame.f_globals.get("__name__", ""))
        if event == "call" and name.startswith(OURS):
            found.add(name)

    # The harness has profilers of its own.
    before = sys.getprofile(), threading.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before[0])
        threading.setprofile(before[1])
    return found


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("has_hook", [False, True], ids=["a plain step", "a bucket and its step"])
def test_a_step_enters_few_modules(monkeypatch: pytest.MonkeyPatch, has_hook: bool) -> None:
    monkeypatch.setenv("ZEROSHARD_CROSS_MEMORY", "0")
    ddp = DistributedDataParallel(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(ddp.module.named_parameters(), optim.AdamW, lr=0.1)
    if has_hook:
        register_reduce_to_owner(ddp, optimizer)

    def forward() -> torch.Tensor:
        optimizer.zero_grad()
        return ddp(torch.ones(2, 8)).sum()

    for _ in range(5):
        forward().backward()
        optimizer.step()
    loss = forward()
    if has_hook:
        modules = entered(lambda: (loss.backward(), optimizer.step()))
    else:
        loss.backward()
        modules = entered(optimizer.step)
    assert "zeroshard.step" in modules
    assert len(modules) <= MOST, "\n".join(sorted(modules))
