"""What Join cannot take is an error by name on every rank, and leaves models and optimizers as they were."""

# ruff: noqa: PT012 - the loop inside the block is what is tested

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from join_training import HOOKS, Loop, Script, Uneven, inputs, never_zero, usual, windows
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError
from zeroshard_integrations.ddp import reduce_to_owner_hook, register_reduce_to_owner
from zeroshard_integrations.join import Join

EVERY_HOOK = pytest.mark.parametrize("hook", HOOKS)
UNKNOWN = "whose part of them no rank knows: call zero_grad\\(\\)"
NOTHING_STEPPED = 0
UNCHECKED = -1


def short(numbers: list[int], hook: str = "none", seconds: float = 4, **options: Any) -> Uneven:
    return Uneven(numbers, hook, group=dist.new_group(timeout=timedelta(seconds=seconds)), **options)


# ---------------------------------------------------------------------- refused once a rank has run out


def reduced_and_then_not(loop: Loop, number: int) -> None:
    loop.backward(number)
    loop.backward(number + 50, reduces=False)
    loop.backward(number + 60)
    loop.step()
    loop.zero()


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize(
    ("hook", "script"),
    [
        ("none", reduced_and_then_not),
        ("owner", windows(2, reduces=True)),
    ],
    ids=["reduced and not", "two batches are too few"],
)
def test_gradients_of_which_nobody_knows_a_part(hook: str, script: Script) -> None:
    # Nothing is refused while all have data.
    Uneven([3, 3, 3], hook).check(script)
    for numbers in ([1, 4, 4], [4, 4, 0]):
        short(numbers, hook).refuse(script, UNKNOWN)


def zeroed_in_a_window(loop: Loop, number: int) -> None:
    loop.backward(number)
    loop.backward(number + 50, reduces=False)
    loop.zero(to_none=False)
    loop.backward(number + 60)
    loop.step()
    loop.zero()


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("numbers", [[1, 4, 4], [4, 4, 2]], ids=str)
def test_gradients_that_are_zeroed_where_a_rank_without_data_does_not_see_it(numbers: list[int]) -> None:
    Uneven([3, 3, 3], "owner").check(zeroed_in_a_window)
    match = r"this rank has run out of data in Join, and cannot repeat what was done to the gradient of tensor"
    short(numbers, "owner").refuse(zeroed_in_a_window, match)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("numbers", [[2, 4], [1, 4], [0, 4]], ids=str)
def test_gradients_that_are_kept_while_ddp_rebuilds_its_buckets_without_the_model(numbers: list[int]) -> None:
    uneven = short(numbers)
    uneven.ddp.register_comm_hook(uneven.optimizer, reduce_to_owner_hook)
    with pytest.raises(RuntimeError, match="register the hook by register_reduce_to_owner"):
        uneven.train(windows(2, reduces=True))


@pytest.mark.ranks(3, backend="gloo")
@EVERY_HOOK
def test_a_rank_that_runs_out_in_a_window(hook: str) -> None:
    for numbers, steps in (([1, 4, 4], 0), ([4, 4, 3], 2)):
        uneven = short(numbers, hook)
        match = f"rank {numbers.index(min(numbers))}: this rank has run out of data in a window of no_sync"
        uneven.refuse(windows(2), match, error=ValueError, until=steps)
    # The last ranks may: their window is not stepped.
    Uneven([2, 3, 3], hook).check(windows(2))


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_a_window_that_began_before_the_block(hook: str) -> None:
    uneven = short([1, 1], hook)
    uneven.check(windows(2))
    uneven.lengths = [0, 2]
    uneven.refuse(lambda loop, number: loop.backward(number), UNKNOWN, until=UNCHECKED)


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize(
    ("hook", "operation"),
    [*product(HOOKS, ("add_param_group", "load_state_dict")), ("none", "step")],
)
def test_what_needs_all_ranks(hook: str, operation: str) -> None:
    uneven = short([2, 4, 4], hook)
    argument: Any = {
        "add_param_group": {"params": nn.Linear(3, 3).double().parameters()},
        "load_state_dict": uneven.plain.state_dict(),
        "step": lambda: torch.tensor(0.0),
    }[operation]

    def script(loop: Loop, number: int) -> None:
        if number == 2:
            loop.use(lambda optimizer: getattr(optimizer, operation)(argument))
        usual(loop, number)

    uneven.refuse(script, "need all ranks, and one has run out of data: call them outside of Join")
    assert len(uneven.optimizer.param_groups) == 1


class Noted(optim.SGD):
    def step(self, closure: Any = None, note: object = None) -> Any:
        return super().step(closure)


@pytest.mark.ranks(3, backend="gloo")
@EVERY_HOOK
def test_what_cannot_be_told(hook: str) -> None:
    uneven = short([2, 4, 4], hook)
    groups = uneven.optimizer.param_groups
    groups[0]["note"] = object()
    uneven.refuse(
        usual,
        "rank [12]: .*cannot be told the hyperparameter 'note': it is an? object",
        error=(TypeError, ValueError),
        until=UNCHECKED,
    )
    del groups[0]["note"]
    uneven.refer(usual, 2)
    uneven.compare()
    if hook in HOOKS[:2]:

        def script(loop: Loop, number: int) -> None:
            loop.zero()
            loop.backward(number)
            loop.step(note=object())

        uneven = short([2, 4, 4], hook, optimizer=(Noted, {"lr": 0.1}))
        uneven.refuse(script, r"cannot be told the argument 'note' of step\(\)", error=(TypeError, ValueError))


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_a_static_graph_on_a_rank_without_a_batch(hook: str) -> None:
    uneven = short([0, 3], hook, ddp={"static_graph": True})
    uneven.refuse(usual, "learns a static_graph in the first batch: give every rank one", error=ValueError)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("least", [0, 1])
def test_sparse_gradients_on_a_rank_with_too_few_batches(rank: int, least: int) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model((batch[:, 0].abs() * 19 % 20).long()).square().mean()
        return result

    uneven = short([least, 3], model=lambda: nn.Embedding(20, 3, sparse=True), loss=loss, optimizer="SGD without decay")
    uneven.refuse(
        usual,
        "learns in two batches of the sparse gradients of .*: give every rank two",
        error=ValueError,
        until=UNCHECKED,
    )


# ---------------------------------------------------------------------- different calls


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("numbers", [[4, 4, 4], [1, 4, 4]], ids=str)
@pytest.mark.parametrize(
    ("hook", "kind"),
    [*product(HOOKS, ("no_sync", "another forward")), *product(HOOKS[:2], ("another step", "no step"))],
)
def test_ranks_that_make_different_calls(rank: int, hook: str, numbers: list[int], kind: str) -> None:
    def script(loop: Loop, number: int) -> None:
        is_here = rank == 2 and number == 2
        loop.zero()
        if is_here and kind == "another forward":
            loop.forward(number, with_grad=False)
        loop.backward(number, reduces=not (is_here and kind == "no_sync"))
        for _ in range({"another step": 2, "no step": 0}.get(kind, 1) if is_here else 1):
            loop.step()

    short(numbers, hook).refuse(
        script,
        r"rank \d is about to make a .*, and rank 2 an? .*: ranks that still have data must make the same calls",
        error=DisagreementError,
        until=UNCHECKED,
    )


# ---------------------------------------------------------------------- refused at once


@pytest.mark.ranks(2, backend="gloo")
def test_what_is_refused_at_once() -> None:
    uneven, other, hooked = short([2, 2]), short([2, 2]), short([2, 2], "interleaved")
    theirs = TorchZero(uneven.ddp.parameters(), optim.Adam, process_group=uneven.group)
    for joinables, error, match in (
        ([], ValueError, "at least one joinable"),
        ([uneven.ddp, uneven.ddp, uneven.optimizer], ValueError, "twice"),
        ([nn.Linear(1, 1)], TypeError, "Linear is none"),
        ([uneven.ddp, theirs], ValueError, r"use zeroshard.ZeroRedundancyOptimizer"),
        ([uneven.ddp, other.optimizer], ValueError, "same process group"),
        ([uneven.optimizer, uneven.ddp], ValueError, r"write Join\(\[ddp, optimizer\]\)"),
        ([hooked.ddp], ValueError, "optimizer that is not in the Join block"),
        ([hooked.optimizer], ValueError, "model that is not in the Join block"),
    ):
        with pytest.raises(error, match=match):
            Join(joinables)
    with (
        pytest.raises(RuntimeError, match="in a Join block already"),
        Join([uneven.ddp, uneven.optimizer]),
        Join([uneven.ddp, uneven.optimizer]),
    ):
        pass
    join = Join([uneven.ddp, uneven.optimizer])
    with pytest.raises(RuntimeError, match="in a Join block already"), join, join:
        pass
    uneven.check(usual)


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
@pytest.mark.parametrize("enable", [True, False])
def test_torchs_join(hook: str, enable: bool) -> None:
    uneven = short([2, 3], hook)
    match = "torch's Join does not support zeroshard's optimizer: use zeroshard_integrations.join.Join, which takes the"
    with pytest.raises(RuntimeError, match=match):
        TorchJoin([uneven.ddp, uneven.optimizer], enable=enable)
    uneven.check(usual)


LEFT_OUT = (
    r"the optimizer of its communication hook is not, .*: use zeroshard_integrations.join.Join\(\[ddp, optimizer\]\)"
)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("numbers", [[2, 2], [0, 2], [2, 0]], ids=str)
@pytest.mark.parametrize("optimizers", [1, 2])
def test_torchs_join_of_the_model_alone(rank: int, numbers: list[int], optimizers: int) -> None:
    # As Accelerate's join_uneven_inputs([ddp]) enters it. A rank without data raises too: it does not wait for steps.
    uneven = short(numbers, seconds=60)
    params = list(uneven.ddp.parameters())
    each = [
        ZeroRedundancyOptimizer(params[place::optimizers], optim.SGD, process_group=uneven.group, lr=0.1)
        for place in range(optimizers)
    ]
    register_reduce_to_owner(uneven.ddp, each)
    reached = []
    with pytest.raises(RuntimeError, match=LEFT_OUT), TorchJoin([uneven.ddp]):
        for number in range(numbers[rank]):
            uneven.loss(uneven.ddp, inputs(number, rank)).backward()
            reached.append("backward")
            each[-1].step()
            reached.append("step")
    assert reached == ["backward"] * bool(numbers[rank])


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("hook", HOOKS[2:])
@pytest.mark.parametrize("numbers", [[2, 2], [0, 2]], ids=str)
def test_torchs_join_of_the_model_alone_with_a_hook_that_steps(rank: int, hook: str, numbers: list[int]) -> None:
    uneven = short(numbers, hook, seconds=60)
    before = [param.clone() for param in uneven.ddp.parameters()]
    with pytest.raises(RuntimeError, match=LEFT_OUT), TorchJoin([uneven.ddp]):
        for number in range(numbers[rank]):
            uneven.loss(uneven.ddp, inputs(number, rank)).backward()
    assert all(map(torch.equal, before, uneven.ddp.parameters()))


@pytest.mark.ranks(2, backend="gloo")
def test_the_optimizer_steps_again_after_torchs_join_of_the_model_alone(rank: int) -> None:
    uneven = short([3, 3], "owner")
    with TorchJoin([uneven.ddp]):
        uneven.loss(uneven.ddp, inputs(0, rank)).backward()
        with pytest.raises(RuntimeError, match=LEFT_OUT):
            uneven.optimizer.step()
        uneven.optimizer.zero_grad()
    uneven.check(usual)


@pytest.mark.ranks(2, backend="gloo")
def test_ranks_that_enter_with_other_settings(rank: int) -> None:
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
def test_a_model_that_is_missing_shows_in_the_first_step(rank: int) -> None:
    uneven = short([2, 4], "owner")
    with pytest.raises(ValueError, match="model that is not in the Join block"), Join([uneven.optimizer]):
        for number in range(2):
            uneven.loss(uneven.ddp, inputs(number, rank)).backward()
            uneven.optimizer.step()


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_throw_on_early_termination(rank: int, hook: str) -> None:
    uneven = short([2, 4], hook)
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


class Around(nn.Module):
    """Calls another model between its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(40, 20), nn.Linear(20, 30)

    def forward(self, batch: torch.Tensor, inner: nn.Module) -> torch.Tensor:
        result: torch.Tensor = self.second(inner(self.first(batch)))
        return result


# The gradients of the first model that were on their way stay there.
@pytest.mark.ranks(2, backend="gloo", checks="no:collectives no:messages")
@EVERY_HOOK
def test_models_whose_gradients_come_in_turns(rank: int, hook: str) -> None:
    outer = short([2, 4], hook, model=Around)
    inner = Uneven([2, 4], hook, model=lambda: nn.Linear(20, 20), group=outer.group)
    done = 0
    with (
        pytest.raises(RuntimeError, match=r"come in turns in one backward.* put both models into one"),
        Join([outer.ddp, inner.ddp, outer.optimizer, inner.optimizer]),
    ):
        for number in range(outer.lengths[rank]):
            outer.ddp(inputs(number, rank), inner.ddp).square().mean().backward()
            for part in (outer, inner):
                part.optimizer.step()
                part.optimizer.zero_grad()
            done += 1
    assert done == 2


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_parameters_that_are_trained_only_after_a_rank_has_run_out(rank: int, hook: str) -> None:
    def script(loop: Loop, number: int) -> None:
        loop.change(lambda model: [param.requires_grad_(number >= 2) for param in list(model.parameters())[:2]])
        usual(loop, number)

    uneven = short([1, 4], hook, ddp={"find_unused_parameters": True})
    with pytest.raises(DisagreementError, match="is frozen on rank 0"):
        uneven.train(script)


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_leaving_after_the_first_forward(hook: str) -> None:
    # Its calls are zero, the forward, the backward, step.
    with pytest.raises(ValueError, match="leave the loop before that, or after the backward"):
        Uneven([4, 4], hook, calls=[2, 99]).train(usual)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("hook", HOOKS[:2])
def test_a_backward_under_no_sync_after_one_that_reduces_of_earlier_forwards(hook: str) -> None:
    uneven = short([1, 4], hook)

    def script(loop: Loop, number: int) -> None:
        first = uneven.loss(uneven.ddp, inputs(number, uneven.rank))
        with uneven.ddp.no_sync():
            second = uneven.loss(uneven.ddp, inputs(number + 50, uneven.rank))
        first.backward()
        second.backward()
        loop.backward(number + 100)
        loop.step()
        loop.zero()

    uneven.refuse(script, UNKNOWN, until=UNCHECKED)


@pytest.mark.ranks(2, backend="gloo")
def test_a_users_hook_divides_by_all_ranks() -> None:
    uneven = short([1, 4])
    uneven.arguments["divide_by_initial_world_size"] = False
    uneven.ddp.register_comm_hook(None, allreduce_hook)
    uneven.check(never_zero)
