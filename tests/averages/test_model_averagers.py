"""torch's model averagers over an optimizer that is sharded within a subgroup, as over the plain optimizer."""

from __future__ import annotations

import copy
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.combinations import FLAG, each_of
from support.master_weights import PlainMasters
from support.training import EVERYWHERE, assert_bitwise_equal, assert_same_state, cutting
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_integrations.ddp import hook_with_zero_step, register_reduce_to_owner
from zeroshard_testing import assert_replicas_equal

pytestmark = [pytest.mark.ranks(4, backend=EVERYWHERE), pytest.mark.usefixtures("tensors_on_the_device")]
WARMUP = 2
AVERAGERS = {
    "periodic": lambda: PeriodicModelAverager(2, WARMUP),
    # Two ranks, which are a subgroup, after steps 2 and 6, and all ranks after step 4.
    "hierarchical": lambda: HierarchicalModelAverager({2: 2, 4: 4}, WARMUP),
}


class Mixed(nn.Module):
    """Layers in half and in single precision: averagers convert the former, and give all parameters other memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 30)).bfloat16()
        self.last = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(inputs.bfloat16()).float())


def subgroup_of(rank: int) -> dist.ProcessGroup:
    return [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]


class Training:
    """One rank's training in two subgroups of two ranks; its ``optimizer`` is sharded within them, or not.

    Args:
        zero: settings of the sharded optimizer; None for the plain one.
        averager: a key of ``AVERAGERS``.
        caller: "wrapper" steps by torch's wrapper, which averages; else the loop averages "parameters" or "groups".
        masters: whether float32 copies are stepped.
    """

    def __init__(self, zero: dict[str, Any] | None, averager: str, caller: str, *, masters: bool) -> None:
        rank, self.caller, self.steps = dist.get_rank(), caller, 0
        self.module = Mixed()
        self.ddp = DistributedDataParallel(self.module)
        self.subgroup = subgroup_of(rank)
        self.hook_state = PostLocalSGDState(None, self.subgroup, WARMUP)
        self.ddp.register_comm_hook(self.hook_state, post_localSGD_hook)
        self.averager = AVERAGERS[averager]()
        params = self.module.parameters()
        if zero is not None:
            settings = {"master_weights": masters, "process_group": self.subgroup, "lr": 1e-2, **zero}
            self.optimizer: Any = ZeroRedundancyOptimizer(params, optim.AdamW, **settings)
        else:
            self.optimizer = PlainMasters(params, optim.AdamW, lr=1e-2) if masters else optim.AdamW(params, lr=1e-2)
        self.local_sgd = PostLocalSGDOptimizer(self.optimizer, self.averager)

    def step(self) -> None:
        generator = torch.Generator().manual_seed(10 * self.steps + dist.get_rank())
        inputs = torch.randn(8, 20, generator=generator, device="cpu").to(next(self.module.parameters()).device)
        stepped = self.local_sgd if self.caller == "wrapper" else self.optimizer
        stepped.zero_grad()
        self.ddp(inputs).square().mean().backward()
        stepped.step()
        if self.caller != "wrapper":
            is_model = self.caller == "parameters"
            self.averager.average_parameters(self.ddp.parameters() if is_model else self.optimizer.param_groups)
        self.steps += 1


@pytest.mark.parametrize("averager", AVERAGERS)
@each_of("caller", ["wrapper", "parameters", "groups"], partition=["whole", "split"], views=FLAG, masters=FLAG)
def test_equals_the_plain_optimizer(averager: str, caller: str, partition: str, views: bool, masters: bool) -> None:
    zero = {"parameters_as_bucket_view": views, "partition": cutting(partition)}
    sharded, plain = (Training(settings, averager, caller, masters=masters) for settings in (zero, None))
    for step in range(8):
        sharded.step()
        plain.step()
        assert_bitwise_equal(sharded.module, plain.module, f"after step {step}")
        if step in (1, 4):
            assert_replicas_equal(sharded.module.parameters())
    # Subgroups have trained by themselves since then.
    with pytest.raises(AssertionError):
        assert_replicas_equal(sharded.module.parameters())


@pytest.mark.parametrize(("views", "masters"), [(False, False), (True, True)], ids=["apart", "views of masters"])
def test_a_training_is_saved_and_resumed_between_averages(views: bool, masters: bool) -> None:
    # Given a training that is saved between two averages, by each subgroup for itself,
    zero = {"parameters_as_bucket_view": views}
    begun = Training(zero, "periodic", "wrapper", masters=masters)
    for _ in range(6):
        begun.step()
    begun.optimizer.consolidate_state_dict(to=0)
    file = io.BytesIO()
    if dist.get_rank(begun.subgroup) == 0:
        torch.save({"model": begun.module.state_dict(), "optimizer": begun.local_sgd.state_dict()}, file)
    sent = [file.getvalue()]
    dist.broadcast_object_list(sent, group=begun.subgroup, group_src=0)
    saved = torch.load(io.BytesIO(sent[0]))
    # when it is loaded, and both go on,
    resumed = Training(zero, "periodic", "wrapper", masters=masters)
    resumed.module.load_state_dict(saved["model"])
    resumed.local_sgd.load_state_dict(saved["optimizer"])
    assert resumed.averager.step == saved["optimizer"]["step"] == 6
    resumed.hook_state.iter, resumed.steps = resumed.averager.step, 6
    for training in (begun, resumed):
        for _ in range(4):
            training.step()
    # then they are equal.
    assert_bitwise_equal(resumed.module, begun.module, "after it was resumed")


def test_the_state_is_that_over_the_plain_optimizer(rank: int) -> None:
    sharded, plain = (Training(zero, "periodic", "wrapper", masters=False) for zero in ({}, None))
    for training in (sharded, plain):
        for _ in range(4):
            training.step()
    sharded.optimizer.consolidate_state_dict(to=0)
    ours, theirs = sharded.local_sgd.state_dict(), plain.local_sgd.state_dict()
    if rank in (0, 2):
        assert ours["step"] == theirs["step"] == 4
        assert_same_state(ours, theirs)
    # Each loads the other's, and a scheduler over torch's wrapper changes the learning rate of our groups afterwards.
    sharded.local_sgd.load_state_dict(copy.deepcopy(theirs))
    scheduler = optim.lr_scheduler.StepLR(sharded.local_sgd, 1)
    sharded.step()
    scheduler.step()
    assert sharded.averager.step == 5
    assert sharded.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


def test_hooks_of_ours_are_refused_on_a_model_over_all_ranks(rank: int) -> None:
    ddp, subgroup = DistributedDataParallel(nn.Linear(20, 3)), subgroup_of(rank)
    in_step, in_backward = (
        ZeroRedundancyOptimizer(ddp.parameters(), optim.SGD, subgroup, overlap_with_ddp=overlaps, lr=0.1)
        for overlaps in (False, True)
    )
    told = re.escape("for post-local SGD, leave the hook out, and register torch's post_localSGD_hook")
    with pytest.raises(ValueError, match=told):
        register_reduce_to_owner(ddp, in_step)
    with pytest.raises(ValueError, match=told):
        hook_with_zero_step(allreduce_hook, ddp, in_backward)


@pytest.mark.parametrize("views", FLAG, ids=["apart", "views"])
def test_a_memory_format_is_restored_after_an_average(rank: int, views: bool) -> None:
    torch.manual_seed(0)
    sharded, plain = (nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in range(2))
    plain.load_state_dict(sharded.state_dict())
    zero = ZeroRedundancyOptimizer(
        sharded.parameters(), optim.AdamW, subgroup_of(rank), parameters_as_bucket_view=views, lr=0.1
    )
    pairs = [(sharded, zero), (plain, optim.AdamW(plain.parameters(), lr=0.1))]
    averagers = [PeriodicModelAverager(2) for _ in pairs]
    for _ in range(4):
        for (model, optimizer), averager in zip(pairs, averagers, strict=True):
            for param in model.parameters():
                # Subgroups differ.
                param.grad = param.detach() * (1 + rank // 2)
            optimizer.step()
            averager.average_parameters(model.parameters())
            model.to(memory_format=torch.channels_last)
        assert_bitwise_equal(sharded, plain, "after a step")


def test_the_script_of_the_page_averages_subgroups() -> None:
    page = (Path(__file__).parents[2] / "docs" / "beside.md").read_text(encoding="utf-8")
    found = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    script = next(block for block in found if "init_process_group" in block)
    names: dict[str, Any] = {}
    exec(script.replace('dist.init_process_group("gloo")\n', "").replace("dist.destroy_process_group()\n", ""), names)
    assert names["optimizer"].averager.step == 25
    assert_replicas_equal(names["model"].parameters(), names["subgroup"])
