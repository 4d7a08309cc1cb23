"""overlap_forward: parameters arrive during the next forward, and nothing reads them before they have."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zeroshard_comm.wire
from ddp_training import HOOKS, MANY_BUCKETS, Twins, batch
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from training import assert_bitwise_equal, small_model
from zeroshard import Stepping
from zeroshard_integrations import ddp as hooks
from zeroshard_testing import Faults, assert_replicas_equal

EVERY_HOOK = pytest.mark.parametrize("hook", HOOKS)


class Overlapped(Twins):
    """Twins of which the sharded one overlaps its shares with the next forward; it comes last, for any step waits."""

    @property
    def sides(self) -> tuple[tuple[DistributedDataParallel, optim.Optimizer], ...]:
        return super().sides[::-1]

    def register(self, hook: str, inner: Callable[..., Any], inner_state: object) -> None:
        if hook == "owner":
            hooks.register_reduce_to_owner(self.ddp, self.optimizer, overlap_forward=True)
            return
        make = hooks.hook_with_zero_step if hook == "behind" else hooks.hook_with_zero_step_interleaved
        self.ddp.register_comm_hook(inner_state, make(allreduce_hook, self.ddp, self.optimizer, overlap_forward=True))


@pytest.mark.ranks(2, 4, backend="gloo")
@EVERY_HOOK
@pytest.mark.parametrize("partition", ["whole", "split"])
def test_parity(hook: str, partition: str) -> None:
    twins = Overlapped(hook, partition=partition)
    for number in range(1, 21):
        twins.iterate(number)
        if number in (1, 2, 3, 20):
            twins.check(f"after iteration {number}")


def late(twins: Overlapped, faults: Faults) -> None:
    """A step of which the parameters of rank 1 arrive late on rank 0."""
    for number in range(1, 4):
        twins.iterate(number)
    faults.delay(1, "send#*", 0.05)
    twins.iterate(4)
    assert twins.optimizer.follow_backward(Stepping.IN_STEP).arriving


READERS: dict[str, Callable[[DistributedDataParallel], object]] = {
    "state_dict": lambda ddp: ddp.state_dict(),
    "of_a_layer": lambda ddp: ddp.module[0].state_dict(),
    "parameters": lambda ddp: list(ddp.parameters()),
    "named": lambda ddp: list(ddp.module.named_parameters()),
    "eval": lambda ddp: ddp.eval(),
    "train": lambda ddp: ddp.module.train(),
    "copy": lambda ddp: copy.deepcopy(ddp.module),
    "pickle": lambda ddp: pickle.dumps(ddp.module),
    "forward": lambda ddp: ddp(batch(9)),
    "average": lambda ddp: optim.swa_utils.AveragedModel(ddp.module),
    "step": lambda _: optim.SGD([torch.zeros(1, requires_grad=True)]).step(),
}


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("reader", READERS)
def test_whatever_reads_parameters_waits_for_them(reader: str, faults: Faults) -> None:
    twins = Overlapped("owner")
    late(twins, faults)
    params = [param for layer in twins.ddp.module for param in layer._parameters.values() if param is not None]
    READERS[reader](twins.ddp)
    # Without another call of ours in between.
    for ours, theirs in zip(params, twins.plain_ddp.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.ranks(2, backend="gloo")
def test_copies_and_pickles_are_of_the_plain_class() -> None:
    twins = Overlapped("owner")
    twins.iterate(0)
    assert isinstance(twins.ddp.module, nn.Sequential)
    for other in (copy.deepcopy(twins.ddp.module), pickle.loads(pickle.dumps(twins.ddp.module))):
        assert type(other) is nn.Sequential
        assert_bitwise_equal(other, twins.plain_ddp.module, "in the copy")


class Reading(nn.Module):
    """Reads weights of modules that it does not call, as for tied and for positional weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.uncalled = nn.Linear(40, 40), nn.Linear(40, 40)
        self.free = nn.Parameter(torch.ones(40))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.linear(inputs, self.uncalled.weight, self.uncalled.bias) * self.free
        return nn.functional.linear(self.first(hidden), self.first.weight)


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_weights_that_the_model_reads_itself(hook: str) -> None:
    twins = Overlapped(hook, model=Reading, ddp={"bucket_cap_mb": 0.001})
    for number in range(8):
        twins.iterate(number)
    twins.check("after 8 iterations")


class Fickle(nn.Module):
    """Calls its second layer at first, and reads its weight later."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(40, 40), nn.Linear(40, 40)
        self.calls = True

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.calls:
            return self.first(self.second(inputs))
        return self.first(nn.functional.linear(inputs, self.second.weight, self.second.bias))


@pytest.mark.ranks(2, backend="gloo")
def test_a_weight_that_was_read_too_early_is_noticed(rank: int) -> None:
    twins = Overlapped("owner", model=Fickle, ddp={"bucket_cap_mb": 0.001})
    for number in range(3):
        twins.iterate(number)
    twins.ddp.module.calls = False
    twins.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="before its new values had arrived"):
        twins.backward(twins.ddp, 3)


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_one_rank_evaluates_while_the_other_waits(rank: int, hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # All tensors are read from their senders' memory, where that can be done: also from that of a rank that waits.
    monkeypatch.setattr(zeroshard_comm.wire, "WORTH_READING", 1)
    twins = Overlapped(hook)
    for number in range(5):
        twins.iterate(number)
        if rank == number % 2:
            twins.ddp.module.eval()
            ours, theirs = twins.ddp.module.state_dict(), twins.plain_ddp.module.state_dict()
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], value) for name, value in theirs.items())
            # What is changed here after reading may not be what the other rank gets.
            with torch.no_grad():
                held = [param.clone() for param in twins.ddp.module.parameters()]
                for param in twins.ddp.module.parameters():
                    param.zero_()
                for param, values in zip(twins.ddp.module.parameters(), held, strict=True):
                    param.copy_(values)
            twins.ddp.module.train()
        dist.barrier()
    twins.check("after 5 iterations")


class Shrinking(nn.Linear):
    """Changes its own weight in its forward."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(inputs)


def shrinking() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Shrinking(40, 40) for _ in range(4)])


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_modules_that_change_their_own_weights(rank: int, hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeroshard_comm.wire, "WORTH_READING", 1)
    twins = Overlapped(hook, model=shrinking, ddp={"bucket_cap_mb": 0.001})
    for number in range(5):
        if rank == number % 2:
            time.sleep(0.1)
        twins.iterate(number)
    twins.check("after 5 iterations")


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_weights_that_are_loaded_behind_a_step(rank: int, hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeroshard_comm.wire, "WORTH_READING", 1)
    twins = Overlapped(hook)
    best = copy.deepcopy(twins.ddp.module.state_dict())
    for number in range(3):
        if rank == 1:
            time.sleep(0.1)
        twins.iterate(number)
        for ddp, _ in twins.sides:
            ddp.module.load_state_dict(best)
        twins.check(f"behind iteration {number}")


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_weights_that_are_changed_on_their_way(hook: str) -> None:
    twins = Overlapped(hook)
    params = list(twins.ddp.module.parameters())
    twins.optimizer.zero_grad()
    twins.backward(twins.ddp, 0)
    if hook == "owner":
        twins.optimizer.step()
    with torch.no_grad():
        torch._foreach_mul_(params, 0.9)
    with pytest.raises(
        RuntimeError, match=r"tensor 0 .* was changed on rank \d while its new values were on their way"
    ):
        twins.ddp.module.state_dict()


@pytest.mark.ranks(2, backend="gloo")
def test_what_a_rank_meets_in_its_step_reaches_all(rank: int) -> None:
    twins = Overlapped("owner")
    twins.iterate(0)
    twins.optimizer.param_groups[0]["lr"] = 0.1 + rank
    twins.optimizer.zero_grad()
    twins.backward(twins.ddp, 1)
    with pytest.raises(RuntimeError, match="lr of group 0 is"):
        twins.optimizer.step()
    assert_replicas_equal(twins.ddp.parameters())


def test_model_for_many_buckets() -> None:
    assert sum(param.numel() * 8 for param in small_model().parameters()) > 3 * MANY_BUCKETS * 2**20
