"""Hooks around a step, and arguments that a step hands on."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from support.combinations import WHERE
from support.refusals import is_mine
from support.training import EVERYWHERE, assert_bitwise_equal, set_gradients, twin_optimizers, twins
from torch import optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import PeerLostError
from zeroshard_testing import assert_replicas_equal

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")


class ScaledSGD(optim.SGD):
    """Takes a further argument of its own in ``step``."""

    def step(self, closure: Any = None, *, scale: float = 1.0) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = 0.1 * scale
            group["scale"] = scale
        return super().step(closure)


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_further_arguments_reach_the_class_and_keys_that_it_adds_the_groups() -> None:
    pair = twins()
    sharded, plain = twin_optimizers(pair, ScaledSGD, lr=0.1)
    for step, scale in enumerate((1.0, 0.5)):
        for module, optimizer in zip(pair, (sharded, plain), strict=True):
            set_gradients(module.parameters(), step)
            optimizer.step(scale=scale)
        assert_bitwise_equal(*pair, f"after step {step}")
        assert sharded.param_groups[0]["scale"] == scale


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_each_hook_fires_once_and_sees_the_public_groups() -> None:
    pair = twins()
    sharded = ZeroRedundancyOptimizer(pair[0].parameters(), optim.Adam)
    seen: list[tuple[str, int]] = []

    def note(name: str) -> Callable[..., None]:
        return lambda optimizer, args, kwargs: seen.append((name, len(optimizer.param_groups[0]["params"])))

    handles = [
        register_optimizer_step_pre_hook(note("global pre")),
        register_optimizer_step_post_hook(note("global post")),
        sharded.register_step_pre_hook(note("pre")),
        sharded.register_step_post_hook(note("post")),
    ]
    try:
        set_gradients(pair[0].parameters(), 0)
        sharded.step()
    finally:
        for handle in handles:
            handle.remove()
    everything = len(list(pair[0].parameters()))
    assert seen == [(name, everything) for name in ("global pre", "pre", "post", "global post")]


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_hook_may_change_the_arguments_until_it_is_removed() -> None:
    pair = twins()
    sharded = ZeroRedundancyOptimizer(pair[0].parameters(), ScaledSGD, lr=0.1)
    # Without a hook: torch would call that of a subclass twice.
    plain = ScaledSGD(pair[1].parameters(), lr=0.1)
    handle = sharded.register_step_pre_hook(lambda optimizer, args, kwargs: (args, {"scale": 0.5}))
    for step, scale in enumerate((0.5, 1.0)):
        for module in pair:
            set_gradients(module.parameters(), step)
        sharded.step()
        plain.step(scale=scale)
        assert_bitwise_equal(*pair, f"after step {step}")
        assert sharded.param_groups[0]["scale"] == scale
        handle.remove()


# The other rank waits for a step that does not come, until its timeout.
@pytest.mark.ranks(2, backend="gloo", isolation="process", checks="no:messages")
@pytest.mark.parametrize("where", WHERE)
def test_what_a_step_pre_hook_raises_is_raised_where_it_occurs(rank: int, where: str) -> None:
    model, reference = twins()
    group = dist.new_group(timeout=timedelta(seconds=2))
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, process_group=group)
    set_gradients(model.parameters(), 0)

    def fail(*_: object) -> None:
        if is_mine(where, rank):
            raise ZeroDivisionError("no step today")

    handle = sharded.register_step_pre_hook(fail)
    with pytest.raises(ZeroDivisionError if is_mine(where, rank) else PeerLostError) as caught:
        sharded.step()
    assert not is_mine(where, rank) or str(caught.value) == "no step today"
    assert_bitwise_equal(model, reference, "after a hook has raised before the step")
    handle.remove()
    if where == "on all ranks":
        sharded.step()
        assert_replicas_equal(model.parameters())
    dist.barrier()
