"""What Join cannot take is an error by name on every rank, and leaves models and optimizers as they were."""

# ruff: noqa: PT012 - the loop inside the block is what is tested

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ddp_training import batch, each_hook_with, with_hook
from support.groups import group_of
from support.join_training import NOTHING_STEPPED, UNCHECKED, Loop, Uneven, inputs, short, usual
from support.training import small_model
from torch import nn, optim
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError, PeerLostError
from zeroshard_integrations._torch_private import set_join_config
from zeroshard_integrations.ddp import register_reduce_to_owner
from zeroshard_integrations.join import Join
from zeroshard_testing import assert_replicas_equal

HOOK_LEFT_OUT = "With uneven data leave the hook out"


def hooked(hook: str, seconds: float = 60) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
    """A model with a communication hook, and its optimizer."""
    ddp = DistributedDataParallel(small_model().double(), process_group=group_of(seconds=seconds))
    return ddp, with_hook(hook, ddp)


# ---------------------------------------------------------------------- refused once a rank has run out


def two_backwards_over_one_forward(loop: Loop, number: int) -> None:
    loop.backward(number)
    loop.change(lambda model: model(inputs(number, dist.get_rank())).square().mean().backward())
    loop.backward(number + 50)
    loop.step()
    loop.zero()


@pytest.mark.ranks(3, backend="gloo")
def test_gradients_that_no_backward_has_reduced_are_refused() -> None:
    match = "no backward inside Join has reduced, so the gradients of the first one are unknown"
    # Nothing is refused while all have data.
    Uneven([3, 3, 3]).train(two_backwards_over_one_forward)
    for numbers in ([1, 4, 4], [4, 4, 0]):
        short(numbers).refuse(two_backwards_over_one_forward, match, until=UNCHECKED)
    kept = short([1, 1, 1])
    kept.check(usual)
    kept.lengths = [0, 2, 2]
    kept.refuse(lambda loop, number: loop.backward(number), match, until=UNCHECKED)


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("operation", ["add_param_group", "load_state_dict", "step"])
def test_calls_that_need_all_ranks_are_refused(operation: str) -> None:
    uneven = short([2, 4, 4])
    argument: Any = {
        "add_param_group": {"params": nn.Linear(3, 3).double().parameters()},
        "load_state_dict": uneven.plain.state_dict(),
        "step": lambda: torch.tensor(0.0),
    }[operation]

    def script(loop: Loop, number: int) -> None:
        if number == 2:
            loop.use(lambda optimizer: getattr(optimizer, operation)(argument))
        usual(loop, number)

    uneven.refuse(script, "need all ranks, but a rank has run out of data: call them outside of Join")
    assert len(uneven.optimizer.param_groups) == 1


class Noted(optim.SGD):
    def step(self, closure: Any = None, note: object = None) -> Any:
        return super().step(closure)


@pytest.mark.ranks(3, backend="gloo")
def test_what_cannot_be_told_to_ranks_that_have_ended_is_refused() -> None:
    uneven = short([2, 4, 4])
    groups = uneven.optimizer.param_groups
    groups[0]["note"] = object()
    uneven.refuse(
        usual,
        "rank [12]: .*cannot receive the hyperparameter 'note': it is an? object",
        error=(TypeError, ValueError),
        until=UNCHECKED,
    )
    del groups[0]["note"]
    uneven.refer(usual, 2)
    uneven.compare()

    def script(loop: Loop, number: int) -> None:
        loop.zero()
        loop.backward(number)
        loop.step(note=object())

    uneven = short([2, 4, 4], optimizer=(Noted, {"lr": 0.1}))
    uneven.refuse(script, r"cannot receive the argument 'note' of step\(\)", error=(TypeError, ValueError))


@pytest.mark.ranks(2, backend="gloo")
def test_a_static_graph_on_a_rank_without_a_batch_is_refused() -> None:
    uneven = short([0, 3], ddp={"static_graph": True})
    uneven.refuse(usual, "needs one batch to record a static graph: give every rank a batch", error=ValueError)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("least", [0, 1])
def test_sparse_gradients_on_a_rank_with_too_few_batches_are_refused(rank: int, least: int) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model((batch[:, 0].abs() * 19 % 20).long()).square().mean()
        return result

    uneven = short([least, 3], model=lambda: nn.Embedding(20, 3, sparse=True), loss=loss, optimizer="SGD without decay")
    uneven.refuse(
        usual,
        "needs two batches to record the sparse gradients of .*: give every rank two",
        error=ValueError,
        until=UNCHECKED,
    )


# ---------------------------------------------------------------------- different calls


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize(
    ("kind", "numbers"), [("another forward", [4, 4, 4]), ("another step", [1, 4, 4]), ("no step", [4, 4, 4])]
)
def test_ranks_that_make_different_calls_are_told(rank: int, numbers: list[int], kind: str) -> None:
    def script(loop: Loop, number: int) -> None:
        is_here = rank == 2 and number == 2
        loop.zero()
        if is_here and kind == "another forward":
            loop.forward(number, with_grad=False)
        loop.backward(number)
        for _ in range({"another step": 2, "no step": 0}.get(kind, 1) if is_here else 1):
            loop.step()

    short(numbers).refuse(
        script,
        r"rank \d is about to make a .*, and rank 2 an? .*: ranks that still have data must make the same calls",
        error=DisagreementError,
        until=UNCHECKED,
    )


# ---------------------------------------------------------------------- refused at once


@pytest.mark.ranks(2, backend="gloo")
def test_what_is_refused_at_once() -> None:
    uneven, other, (ddp, optimizer) = short([2, 2]), short([2, 2]), hooked("hook_with_zero_step_interleaved")
    compressed = DistributedDataParallel(small_model(), process_group=uneven.group)
    compressed._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    second = ZeroRedundancyOptimizer(small_model().parameters(), optim.SGD, process_group=uneven.group, lr=0.1)
    model = DistributedDataParallel(small_model(), process_group=uneven.group)
    theirs = TorchZero(uneven.ddp.parameters(), optim.Adam, process_group=uneven.group)
    for joinables, error, match in (
        ([], ValueError, "at least one joinable"),
        ([uneven.ddp, uneven.ddp, uneven.optimizer], ValueError, "twice"),
        ([nn.Linear(1, 1)], TypeError, "Join expects Joinable objects, but got Linear"),
        ([uneven.ddp, theirs], ValueError, r"use zeroshard.ZeroRedundancyOptimizer"),
        ([uneven.ddp, other.optimizer], ValueError, "same process group"),
        ([uneven.optimizer, uneven.ddp], ValueError, r"write Join\(\[ddp, optimizer\]\)"),
        ([ddp, optimizer], ValueError, HOOK_LEFT_OUT),
        ([ddp], ValueError, HOOK_LEFT_OUT),
        ([optimizer], ValueError, HOOK_LEFT_OUT),
        ([compressed], ValueError, HOOK_LEFT_OUT),
        ([uneven.ddp, model, uneven.optimizer], ValueError, "but got 2 and 1: put several models into one module"),
        ([uneven.ddp, uneven.optimizer, second], ValueError, "but got 1 and 2: .*one optimizer with a class per param"),
    ):
        with pytest.raises(error, match=match):
            Join(joinables)
    with (
        pytest.raises(RuntimeError, match="already in a Join block"),
        Join([uneven.ddp, uneven.optimizer]),
        Join([uneven.ddp, uneven.optimizer]),
    ):
        pass
    join = Join([uneven.ddp, uneven.optimizer])
    with pytest.raises(RuntimeError, match="already in a Join block"), join, join:
        pass
    uneven.check(usual)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("enable", [True, False])
def test_torchs_join_is_refused(enable: bool) -> None:
    uneven = short([2, 3])
    match = "torch's Join does not support zeroshard's optimizer: use zeroshard_integrations.join.Join, which takes the"
    with pytest.raises(RuntimeError, match=match):
        TorchJoin([uneven.ddp, uneven.optimizer], enable=enable)
    uneven.check(usual)


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize(
    ("alone", "numbers"),
    [(True, [3, 3, 3]), (True, [0, 3, 3]), (False, [1, 3, 3])],
    ids=["on one rank", "on one rank, none", "on all"],
)
def test_no_sync_once_a_rank_has_ended(rank: int, numbers: list[int], alone: bool) -> None:
    def script(loop: Loop, number: int) -> None:
        if number == 2 and (rank == 2 or not alone):
            with uneven.ddp.no_sync():
                loop.forward(number)
        usual(loop, number)

    uneven = short(numbers)
    uneven.refuse(script, r"no_sync\(\) is not supported inside Join: let every backward reduce", until=UNCHECKED)
    uneven.refer(usual, 2)
    uneven.compare()


@pytest.mark.ranks(2, backend="gloo")
def test_a_hook_that_is_registered_in_the_block_is_refused() -> None:
    uneven = short([2, 2])
    with pytest.raises(ValueError, match=HOOK_LEFT_OUT), Join([uneven.ddp, uneven.optimizer]):
        register_reduce_to_owner(uneven.ddp, uneven.optimizer)
    uneven.check(usual)


@pytest.mark.ranks(2, backend="gloo")
@each_hook_with("numbers", [2, 2], [0, 2], [2, 0])
def test_torchs_join_of_a_model_with_a_hook_is_refused(rank: int, hook: str, numbers: list[int]) -> None:
    # As Accelerate's join_uneven_inputs([ddp]) enters it. A rank without data raises too.
    ddp, optimizer = hooked(hook)
    before = [param.clone() for param in ddp.parameters()]
    with pytest.raises(RuntimeError, match=HOOK_LEFT_OUT), TorchJoin([ddp]):
        for number in range(numbers[rank]):
            ddp(inputs(number, rank))
    # torch's does not take it out again.
    set_join_config(ddp, None)
    for number in range(3):
        optimizer.zero_grad()
        ddp(inputs(number, rank)).square().mean().backward()
        optimizer.step()
    assert not any(map(torch.equal, before, ddp.parameters()))
    assert_replicas_equal(ddp.parameters())


@pytest.mark.ranks(2, backend="gloo")
def test_ranks_that_enter_with_other_settings_are_told(rank: int) -> None:
    for settings in ({"throw_on_early_termination": rank == 1}, {"thing": rank}):
        uneven = short([2, 3])
        uneven.arguments = settings
        uneven.refuse(
            usual, "rank 0 has entered Join.* and rank 1 Join", error=DisagreementError, until=NOTHING_STEPPED
        )
    # Of values that are not plain, the type counts.
    uneven.arguments = {"thing": object()}
    uneven.check(usual)


@pytest.mark.ranks(2, backend="gloo")
def test_throw_on_early_termination_raises_on_every_rank(rank: int) -> None:
    uneven = short([2, 4])
    uneven.arguments, batches = {"throw_on_early_termination": True}, []

    def script(loop: Loop, number: int) -> None:
        usual(loop, number)
        batches.append(number)

    with pytest.raises(RuntimeError, match="rank 0 has run out of data, and throw_on_early_termination is set"):
        uneven.train(script)
    assert batches == [0, 1]
    uneven.lengths, uneven.arguments = [2, 2], {}
    uneven.refer(usual)
    uneven.compare()
    uneven.check(usual)


# ---------------------------------------------------------------------- models, and what a rank has not seen


@pytest.mark.ranks(2, backend="gloo")
def test_parameters_that_are_trained_only_after_a_rank_has_run_out_are_refused(rank: int) -> None:
    def script(loop: Loop, number: int) -> None:
        loop.change(lambda model: [param.requires_grad_(number >= 2) for param in list(model.parameters())[:2]])
        usual(loop, number)

    uneven = short([1, 4], ddp={"find_unused_parameters": True})
    with pytest.raises(DisagreementError, match="is frozen on rank 0"):
        uneven.train(script)


@pytest.mark.ranks(2, backend="gloo")
def test_leaving_after_the_first_forward_is_refused() -> None:
    # Its calls are zero, the forward, the backward, step.
    with pytest.raises(ValueError, match="leave the loop before both, or after the backward"):
        Uneven([4, 4], calls=[2, 99]).train(usual)


@pytest.mark.ranks(2, backend="gloo", checks="no:deadlock")
def test_uneven_data_in_the_join_of_ddp_is_told_of_ours(rank: int) -> None:
    group = group_of(seconds=3)
    model = small_model().double()
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, process_group=group, lr=0.1)

    def train() -> None:
        with ddp.join():
            for number in range(2 + rank):
                optimizer.zero_grad()
                ddp(batch(number)).sum().backward()
                optimizer.step()

    told = r"step\(\).* With uneven data, use zeroshard_integrations\.join\.Join\(\[ddp, optimizer\]\)"
    # The other one waits in a collective of DDP.
    with pytest.raises(PeerLostError if rank == 1 else RuntimeError, match=told if rank == 1 else None):
        train()
