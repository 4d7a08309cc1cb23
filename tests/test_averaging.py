"""Subgroups of ranks that shard an optimizer each, and whose parameters are averaged."""

from __future__ import annotations

import copy
import io
import re
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from averaging_training import Branching, Training
from torch import nn, optim
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager as TorchAverager
from training import EVERYWHERE, cutting, small_model
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError, PeerLostError
from zeroshard_integrations.averaging import HierarchicalModelAverager, PeriodicModelAverager, PostLocalSGDOptimizer
from zeroshard_testing import assert_replicas_equal

pytestmark = [pytest.mark.ranks(4, backend=EVERYWHERE), pytest.mark.usefixtures("tensors_on_the_device")]
EVERY_SCHEDULE = pytest.mark.parametrize(
    ("schedule", "warmup"),
    [(1, 0), (3, 0), (4, 3), (2, 5), ({2: 2}, 0), ({3: 2}, 4)],
    ids=["1", "3", "4-after-3", "2-after-5", "hierarchical-2", "hierarchical-3-after-4"],
)
STEPS = 13
COMPARED = 9
"""Steps that have two averages of every schedule."""


def train_and_compare(training: Training) -> None:
    simulation = training.simulation()
    mine = dist.get_rank() // training.subgroup
    for number in range(COMPARED):
        training.step()
        simulation.step()
        for (name, ours), theirs in zip(
            training.module.named_parameters(), simulation.models[mine].parameters(), strict=True
        ):
            off = (ours - theirs).abs().max()
            assert off <= 1e-12, f"{name} differs by {off:.3g} after step {number}"
        assert_replicas_equal(training.module.parameters(), training.within)


@EVERY_SCHEDULE
@pytest.mark.parametrize("ddp", ["within", "owner", "stepping", "all"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("partition", ["whole", "split"])
@pytest.mark.parametrize("views", [False, True], ids=["apart", "views"])
def test_as_in_one_process(schedule: Any, warmup: int, ddp: str, optimizer: str, partition: str, views: bool) -> None:
    train_and_compare(Training(2, schedule, warmup, optimizer, ddp, partition, views))


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("schedule", [{2: 2, 6: 4}, {6: 4, 2: 2}, {2: 2, 3: 4}], ids=["nested", "any-order", "apart"])
def test_two_levels_as_in_one_process(schedule: dict[int, int], warmup: int) -> None:
    train_and_compare(Training(1, schedule, warmup))


@pytest.mark.exhaustive
@pytest.mark.ranks(8, backend=EVERYWHERE)
@pytest.mark.parametrize("ddp", ["within", "all"])
def test_two_levels_over_subgroups_of_two(ddp: str) -> None:
    train_and_compare(Training(2, {2: 2, 4: 4}, 3, ddp=ddp))


def differs_anywhere(training: Training) -> bool:
    first = next(training.module.parameters()).detach()
    found = [torch.empty_like(first) for _ in range(4)]
    dist.all_gather(found, first.contiguous())
    return not all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("hierarchical", [False, True], ids=["periodic", "hierarchical"])
def test_subgroups_are_equal_until_local_sgd_begins_and_after_each_average(hierarchical: bool) -> None:
    training = Training(2, {3: 2} if hierarchical else 3, 4, ddp="all")
    for number in range(STEPS):
        training.step()
        if number < 4 or (number - 4) % 3 == 0:
            assert_replicas_equal(training.module.parameters())
        else:
            assert differs_anywhere(training)


@pytest.mark.parametrize("ddp", ["within", "owner", "all"])
@pytest.mark.parametrize("views", [False, True], ids=["apart", "views"])
def test_saved_and_resumed(ddp: str, views: bool) -> None:
    # Given a training, and one that ends where subgroups differ, which each saves its own part,
    whole, begun = (Training(2, 3, 2, ddp=ddp, views=views) for _ in range(2))
    for _ in range(STEPS):
        whole.step()
    for _ in range(7):
        begun.step()
    begun.local_sgd.consolidate_state_dict(to=0)
    file = io.BytesIO()
    if dist.get_rank(begun.within) == 0:
        torch.save({"model": begun.module.state_dict(), "optimizer": begun.local_sgd.state_dict()}, file)
    sent = [file.getvalue()]
    dist.broadcast_object_list(sent, group=begun.within, group_src=0)
    # when it is resumed,
    saved = torch.load(io.BytesIO(sent[0]))
    resumed = Training(2, 3, 2, ddp=ddp, views=views)
    resumed.module.load_state_dict(saved["model"])
    resumed.local_sgd.load_state_dict(saved["optimizer"])
    assert resumed.averager.step == 7
    assert saved["optimizer"]["step"] == 7
    resumed.hook_state.iter, resumed.steps = resumed.averager.step, 7
    for _ in range(7, STEPS):
        resumed.step()
    # then the result is the same.
    for ours, theirs in zip(resumed.module.parameters(), whole.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_plain_optimizer_takes_the_state_and_gives_it() -> None:
    plain = optim.Adam(Branching().parameters())
    ours = PostLocalSGDOptimizer(plain, PeriodicModelAverager(2))
    ours.averager.step = 5
    state = ours.state_dict()
    other = PostLocalSGDOptimizer(optim.Adam(Branching().parameters()), PeriodicModelAverager(2))
    other.load_state_dict(state)
    assert other.averager.step == 5
    assert state["step"] == 5
    # torch's load_state_dict replaces the list of groups.
    assert other.param_groups is other.optim.param_groups
    assert repr(other).startswith("PostLocalSGDOptimizer of Adam")
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        copy.deepcopy(other)


def test_a_state_without_the_step_is_refused_on_every_rank(rank: int) -> None:
    training = Training(2, 2)
    training.step()
    before = [param.clone() for param in training.module.parameters()]
    training.local_sgd.consolidate_state_dict()
    good = training.local_sgd.state_dict()
    bad = training.zero.state_dict() if rank == 1 else good
    if rank < 2:
        with pytest.raises(ValueError, match=r"^(rank 1: )?the state dict has no 'step'"):
            training.local_sgd.load_state_dict(bad)
    assert training.averager.step == 1
    assert all(torch.equal(*pair) for pair in zip(before, training.module.parameters(), strict=True))
    training.step()


class Mixed(nn.Module):
    """Three dtypes, a frozen parameter, a channels_last weight, a scalar and a parameter that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.params = nn.ParameterList(
            [
                torch.zeros(3, 4),
                torch.zeros(5, dtype=torch.float64),
                torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
                torch.zeros(7, dtype=torch.bfloat16),
                torch.zeros(()),
                torch.zeros(6, 4).t(),
            ]
        )
        self.frozen = nn.Parameter(torch.zeros(9), requires_grad=False)
        self.again = self.params[0]


@torch.no_grad()
def fill(params: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
    """Set every element to a small number that differs between elements and ranks; return the means of both ranks."""
    for param in params:
        param.copy_((torch.arange(param.numel()).view(param.shape) % 7 + 2 * rank).to(param.dtype))
    return [param - rank * 2 + 1 for param in params]


@pytest.mark.parametrize("views", [False, True], ids=["apart", "views"])
@pytest.mark.parametrize("what", ["frozen apart", "frozen later"])
def test_one_all_reduce_for_each_dtype_in_place(rank: int, views: bool, what: str) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = Mixed()
    params = list(model.parameters())
    zero = ZeroRedundancyOptimizer(
        params, optim.SGD, pairs[rank // 2], lr=0.0, parameters_as_bucket_view=views, partition=cutting("split")
    )
    optimizer = PostLocalSGDOptimizer(zero, PeriodicModelAverager(1, process_group=between[rank % 2]))
    if what == "frozen later":
        params[5].requires_grad_(False)
    means = fill(params, rank // 2)
    frozen = {index: param.clone() for index, param in enumerate(params) if not param.requires_grad}
    addresses = [param.data_ptr() for param in params]
    versions = [param._version for param in params]
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        optimizer.averager._average(optimizer.param_groups, zero.buffers)
    reduced = [call.args[0] for call in all_reduce.call_args_list]
    assert sorted(str(flat.dtype) for flat in reduced) == ["torch.bfloat16", "torch.float32", "torch.float64"]
    # A buffer that holds a parameter which is frozen by now is not averaged as a whole.
    in_place = {flat.data_ptr() for flat in reduced} & {buffer.data_ptr() for buffer in zero.buffers}
    assert len(in_place) == (0 if not views else 2 if frozen.keys() - {0} else 3)
    for index, param in enumerate(params):
        assert torch.equal(param, frozen.get(index, means[index])), index
        assert (param._version > versions[index]) == param.requires_grad, index
    assert addresses == [param.data_ptr() for param in params]
    assert model.params[2].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("views", [False, True], ids=["apart", "views"])
def test_autograd_notices_the_write(views: bool) -> None:
    training = Training(2, 1, views=views)
    weight = training.module.first.weight
    made = (weight * weight).sum()
    training.averager._average(training.local_sgd.param_groups, training.zero.buffers)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made.backward()


@pytest.mark.parametrize("what", ["parameters", "groups", "several groups"])
def test_in_a_loop_without_the_wrapper(rank: int, what: str) -> None:
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    model = small_model()
    averager = PeriodicModelAverager(2, 1, between)
    for number in range(4):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(rank // 2)
        groups = optim.SGD([{"params": [param]} for param in model.parameters()]).param_groups
        given = {"parameters": model.parameters(), "groups": groups[:], "several groups": groups * 2}[what]
        averager.average_parameters(given)
        expected = 0.5 if number in (1, 3) else rank // 2
        assert all(bool((param == expected).all()) for param in model.parameters()), number
    assert averager.step == 4


def test_schedulers_and_other_methods_work_through_the_wrapper() -> None:
    training = Training(2, 2, optimizer="SGD")
    scheduler = optim.lr_scheduler.OneCycleLR(training.local_sgd, 0.5, total_steps=4)
    calls: list[Any] = []
    training.local_sgd.register_step_pre_hook(lambda *_: calls.append("before"))
    training.local_sgd.register_step_post_hook(lambda *_: calls.append("after"))
    for _ in range(3):
        training.step()
        scheduler.step()
    assert calls == ["before", "after"] * 3
    assert training.zero.param_groups[0]["lr"] == scheduler.get_last_lr()[0]
    assert training.local_sgd.plan is training.zero.plan
    assert training.local_sgd.step(lambda: torch.tensor(3.0)) == 3
    training.local_sgd.add_param_group({"params": [nn.Parameter(torch.zeros(3, dtype=torch.float64))], "lr": 0.1})
    assert len(training.local_sgd.param_groups) == 2


def test_ranks_of_one_optimizer_are_refused(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = small_model()
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, pairs[rank // 2], lr=0.1)
    for averager in (PeriodicModelAverager(2), HierarchicalModelAverager({2: 2, 4: 4})):
        with pytest.raises(ValueError, match=r"ranks \[0, 1, 2, 3\], of which \[.*\] share the state of one optimizer"):
            PostLocalSGDOptimizer(zero, averager)
    three = dist.new_group([0, 1, 2])
    if rank < 3:
        # Rank 2 has no other rank of its optimizer there, and hears of the others'.
        averager = PeriodicModelAverager(2, process_group=three)
        with pytest.raises(ValueError, match=r"of which \[0, 1\] share the state of one optimizer"):
            PostLocalSGDOptimizer(zero, averager)
    with pytest.raises(TypeError, match=r"and not a torch.*PeriodicModelAverager"):
        PostLocalSGDOptimizer(zero, TorchAverager(2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PeriodicModelAverager(0), r"1 step or more, but there are \[0\]"),
        (lambda: PeriodicModelAverager(2, -1), "warmup_steps should not be negative, but is -1"),
        (lambda: PeriodicModelAverager(2, 1.5), "should be integers, but one is 1.5"),
        (lambda: HierarchicalModelAverager({2: 2.0, 4: 4}), "should be integers, but one is 2.0"),
        (lambda: HierarchicalModelAverager({}), "there are no periods"),
        (lambda: HierarchicalModelAverager(), "there are no periods"),
        (lambda: HierarchicalModelAverager({0: 2, 2: 4}), r"there are \[0, 2\]"),
        (lambda: HierarchicalModelAverager({2: 4, 4: 2}), r"sizes are \[4, 2\]"),
        (lambda: HierarchicalModelAverager({2: 2}), r"sizes are \[2\]: .* 4, the number of ranks"),
        (lambda: HierarchicalModelAverager({2: 3, 4: 4}), r"sizes are \[3, 4\]"),
        (lambda: HierarchicalModelAverager({2: 0, 4: 4}), r"sizes are \[0, 4\]"),
        (lambda: HierarchicalModelAverager({2: 4}, -2), "negative, but is -2"),
    ],
)
@pytest.mark.parametrize("where", ["everywhere", "rank 1"])
def test_bad_arguments_are_errors_on_every_rank(rank: int, make: Any, message: str, where: str) -> None:
    is_bad = where == "everywhere" or rank == 1
    with pytest.raises((TypeError, ValueError), match=message):
        make() if is_bad else HierarchicalModelAverager({2: 2, 4: 4})
    assert PeriodicModelAverager(2).step == 0


def test_different_arguments_are_refused_on_every_rank(rank: int) -> None:
    with pytest.raises(DisagreementError, match=r"is '{2: 4}' on rank 0 and '{3: 4}' on rank 2"):
        PeriodicModelAverager(3 if rank == 2 else 2)
    with pytest.raises(DisagreementError, match=r"warmup_steps is 0 on rank 0 and 1 on rank 3"):
        PeriodicModelAverager(2, int(rank == 3))


def test_ranks_in_different_numbers_of_groups_cannot_make_the_levels(rank: int) -> None:
    dist.new_group([0, 1, 2])
    with pytest.raises(DisagreementError, match="process groups made so far is 2 on rank 0 and 1 on rank 3"):
        HierarchicalModelAverager({2: 2, 4: 4})
    assert HierarchicalModelAverager({2: 4}).step == 0


# It makes sparse tensors, which the emulated device does not have.
@pytest.mark.ranks(4, backend="gloo")
@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("frozen", DisagreementError, "tensor 9"),
        ("longer", DisagreementError, "tensor 2"),
        ("dtype", DisagreementError, "tensor 2"),
        ("step", DisagreementError, "the averager's step is 2 on rank 0 and 4 on rank 1"),
        ("number", TypeError, "takes parameters or param groups, and not a int"),
        ("one", TypeError, "several parameters or param groups, and not one Parameter"),
        ("one group", TypeError, "several parameters or param groups, and not one dict"),
        ("sparse", ValueError, r"a torch.sparse_coo parameter of shape \(2, 2\) cannot be averaged"),
    ],
)
def test_ranks_that_differ_raise_and_change_nothing(rank: int, what: str, error: type[Exception], message: str) -> None:
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    torch.manual_seed(rank)
    params: Any = [nn.Parameter(torch.rand(3, 4)) for _ in range(10)]
    averager = PeriodicModelAverager(2, process_group=between)
    averager.step = 2
    given = params[:]
    if rank >= 2:
        averager.step = 4 if what == "step" else 2
        if what == "frozen":
            given[9] = nn.Parameter(given[9].detach(), requires_grad=False)
        given[2] = {
            "longer": nn.Parameter(torch.rand(3, 5)),
            "dtype": nn.Parameter(torch.rand(3, 4).double()),
            "number": 3,
            "sparse": nn.Parameter(torch.eye(2).to_sparse()),
        }.get(what, given[2])
        given = {"one": given[0], "one group": {"params": given}}.get(what, given)
    before = copy.deepcopy(params)
    counted = averager.step
    with pytest.raises(error, match=message):
        averager.average_parameters(given)
    assert averager.step == counted
    assert all(torch.equal(*pair) for pair in zip(before, params, strict=True))
    averager.step = 2
    averager.average_parameters(params)
    assert_replicas_equal(params, between)


def test_buffers_of_other_layout_are_refused(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    zero = ZeroRedundancyOptimizer(
        small_model().parameters(),
        optim.SGD,
        pairs[rank // 2],
        lr=0.1,
        parameters_as_bucket_view=True,
        partition=cutting("split" if rank < 2 else "whole"),
    )
    optimizer = PostLocalSGDOptimizer(zero, PeriodicModelAverager(1, process_group=between[rank % 2]))
    with pytest.raises(DisagreementError, match="the layout of its buckets"):
        optimizer.step()
    # In a loop of one's own they are packed.
    optimizer.averager.average_parameters(optimizer.param_groups)


def test_frozen_parameters_that_differ_may_differ_in_number(rank: int) -> None:
    """Only trainable parameters are compared."""
    params = [nn.Parameter(torch.full((3,), float(rank)))]
    frozen = [nn.Parameter(torch.zeros(rank), requires_grad=False) for _ in range(rank)]
    PeriodicModelAverager(1).average_parameters([*frozen, *params])
    assert params[0].tolist() == [1.5] * 3


# The emulated group itself fails a test in which a rank leaves out a collective.
@pytest.mark.ranks(4, backend="gloo")
def test_a_rank_that_does_not_average_is_named_lost(rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=2))
    averager = PeriodicModelAverager(1, process_group=group)
    params = [nn.Parameter(torch.ones(3))]
    averager.average_parameters(params)
    if rank != 3:
        with pytest.raises(PeerLostError, match=r"average_parameters\(\)"):
            averager.average_parameters(params)


def test_the_page() -> None:
    page = (Path(__file__).parents[1] / "docs" / "averaging.md").read_text(encoding="utf-8")
    script = next(
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "init_process_group" in block
    )
    names: dict[str, Any] = {}
    exec(script.replace('dist.init_process_group("gloo")\n', "").replace("dist.destroy_process_group()\n", ""), names)
    assert names["optimizer"].averager.step > names["optimizer"].averager.warmup_steps
    assert_replicas_equal(names["model"].parameters(), names["within"])
