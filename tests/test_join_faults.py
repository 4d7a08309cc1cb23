"""What goes wrong inside a Join block is an error on every rank, within the timeout, that says what to do."""

# ruff: noqa: PT012 - the loop inside the block is what is tested

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_training import register
from join_training import HOOKS, Uneven, inputs
from torch import nn, optim
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel
from training import small_model
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError
from zeroshard_integrations.join import Join
from zeroshard_testing import assert_replicas_equal

EVERY_HOOK = pytest.mark.parametrize("hook", HOOKS)
SHORT = timedelta(seconds=4)
SOON = 20.0
"""Seconds within which ranks hear of an error that they need no timeout for."""


class DamagedFileError(ValueError):
    pass


def short(numbers: list[int], hook: str, timeout: timedelta = SHORT, **options: Any) -> Uneven:
    return Uneven(numbers, hook, group=dist.new_group(timeout=timeout), **options)


def fail(rank: int, where: str, here: str, number: int, at: int = 2) -> None:
    if rank == 1 and where == here and number == at:
        raise DamagedFileError("file 7 is damaged")


def train(uneven: Uneven, where: str, at: int = 2) -> None:
    rank = uneven.rank

    class Broken(nn.Module):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            fail(rank, where, "in the forward", int(uneven_number[0]), at)
            return batch

    uneven_number = [0]
    uneven.ddp.module.insert(0, Broken())
    with Join([uneven.ddp, uneven.optimizer]):
        for number in range(uneven.lengths[rank]):
            uneven_number[0] = number
            fail(rank, where, "before the forward", number, at)
            uneven.optimizer.zero_grad()
            loss = uneven.loss(uneven.ddp, inputs(number, rank))
            fail(rank, where, "before backward", number, at)
            loss.backward()
            fail(rank, where, "before the step", number, at)
            uneven.optimizer.step()
            fail(rank, where, "behind the step", number, at)


PLACES = ("before the forward", "in the forward", "before backward", "before the step", "behind the step")


@pytest.mark.ranks(3, backend="gloo")
@EVERY_HOOK
def test_an_exception_on_one_rank(rank: int, hook: str) -> None:
    for where in PLACES:
        # While all have data, and when rank 0 has run out.
        for numbers in ([4, 4, 4], [1, 4, 4]):
            uneven = short(numbers, hook)
            started = time.monotonic()
            with pytest.raises(ValueError, match="file 7 is damaged") as caught:
                train(uneven, where)
            assert type(caught.value) is (DamagedFileError if rank == 1 else ValueError), where
            assert rank == 1 or "rank 1" in str(caught.value), where
            assert time.monotonic() - started < SOON, where
            assert not uneven.ddp._join_config.enable
            assert not uneven.optimizer._join_config.enable


class FailingBackward(torch.autograd.Function):
    """Raises in the backward of rank 1."""

    @staticmethod
    def forward(ctx: object, batch: torch.Tensor) -> torch.Tensor:
        return batch.view_as(batch)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("in backward")
        return grad


class FailsInTheMiddle(nn.Module):
    """Some gradients are on their way already when its backward raises."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(40, 300), nn.Linear(300, 30)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = FailingBackward.apply(self.first(batch))  # type: ignore[no-untyped-call]
        result: torch.Tensor = self.second(hidden)
        return result


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_an_exception_inside_a_backward(rank: int, hook: str) -> None:
    started = time.monotonic()
    # Rank 0 waits until it is over.
    uneven = short([3, 3], hook, timedelta(seconds=2), model=FailsInTheMiddle)
    with pytest.raises((RuntimeError, ZeroDivisionError), match="in backward") as caught:
        uneven.train(Join)
    assert rank == 1 or "rank 1 has failed inside the Join block: ZeroDivisionError" in str(caught.value)
    assert time.monotonic() - started < 3 * SHORT.total_seconds()


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_an_exception_in_the_backward_of_the_loss(rank: int, hook: str) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return FailingBackward.apply(model(batch)).square().mean()  # type: ignore[no-untyped-call,no-any-return]

    started = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="in backward" if rank else "rank 1: in backward"):
        short([3, 3], hook, loss=loss).train(Join)
    assert time.monotonic() - started < SOON


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_a_rank_that_breaks_out_of_an_iteration(rank: int, hook: str) -> None:
    for behind in ("forward", "backward"):
        if behind == "backward" and hook in HOOKS[2:]:
            # Backward has stepped: nothing is missing.
            continue
        uneven = short([4, 4], hook)
        started = time.monotonic()
        with (
            pytest.raises(RuntimeError, match=r"has left the Join block behind a (forward|backward\(\)) .* is missing"),
            Join([uneven.ddp, uneven.optimizer]),
        ):
            for number in range(4):
                uneven.optimizer.zero_grad()
                loss = uneven.loss(uneven.ddp, inputs(number, rank))
                if rank == 0 and number == 2 and behind == "forward":
                    break
                loss.backward()
                if rank == 0 and number == 2 and behind == "backward":
                    break
                uneven.optimizer.step()
        assert time.monotonic() - started < SOON


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_a_rank_that_breaks_between_iterations_has_run_out(rank: int, hook: str) -> None:
    uneven = Uneven([5, 5], hook)
    with Join([uneven.ddp, uneven.optimizer]):
        for number in range(5):
            if rank == 0 and number == 2:
                break
            uneven.optimizer.zero_grad()
            uneven.loss(uneven.ddp, inputs(number, rank)).backward()
            uneven.optimizer.step()
    uneven.lengths = [2, 5]
    uneven.reference()
    assert uneven.distance() < 1e-12


@pytest.mark.ranks(3, backend="gloo")
@EVERY_HOOK
def test_no_sync_on_one_rank_only(rank: int, hook: str) -> None:
    for numbers in ([4, 4, 4], [1, 4, 4]):
        uneven = short(numbers, hook)
        started = time.monotonic()
        with (
            pytest.raises(DisagreementError, match=r"rank 2 is in no_sync\(\) and rank [01] is not"),
            Join([uneven.ddp, uneven.optimizer]),
        ):
            for number in range(numbers[rank]):
                uneven.optimizer.zero_grad()
                with uneven.ddp.no_sync() if rank == 2 and number == 2 else nullcontext():
                    uneven.loss(uneven.ddp, inputs(number, rank)).backward()
                uneven.optimizer.step()
        assert time.monotonic() - started < SOON


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_throw_on_early_termination(rank: int, hook: str) -> None:
    uneven = short([2, 4], hook)
    batches = 0
    started = time.monotonic()
    with (
        pytest.raises(RuntimeError, match="rank 0 has run out of data"),
        Join([uneven.ddp, uneven.optimizer], throw_on_early_termination=True),
    ):
        for number in range(uneven.lengths[rank]):
            uneven.optimizer.zero_grad()
            uneven.loss(uneven.ddp, inputs(number, rank)).backward()
            uneven.optimizer.step()
            batches += 1
    assert batches == 2
    assert time.monotonic() - started < SOON
    assert_replicas_equal(uneven.ddp.parameters())
    # The optimizer can be used on.
    uneven.lengths = [2, 2]
    uneven.reference()
    uneven.optimizer.zero_grad()
    uneven.check(Join)


@pytest.mark.ranks(2, backend="gloo")
def test_throw_on_early_termination_of_torchs(rank: int) -> None:
    uneven = short([2, 4], "none")
    with (
        pytest.raises(RuntimeError, match="exhausted"),
        TorchJoin([uneven.ddp, uneven.optimizer], throw_on_early_termination=True),
    ):
        for number in range(uneven.lengths[rank]):
            uneven.loss(uneven.ddp, inputs(number, rank)).backward()
            uneven.optimizer.step()


@pytest.mark.ranks(2, backend="gloo")
def test_nested_blocks(rank: int) -> None:
    for inner in (Join, TorchJoin):
        uneven = short([2, 3], "none")
        joinables: list[Any] = [uneven.ddp, uneven.optimizer]
        with pytest.raises(RuntimeError, match="in a Join block already"), Join(joinables), inner(joinables):
            pass
        assert not uneven.ddp._join_config.enable
        uneven.check(Join)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("join", [Join, TorchJoin], ids=["ours", "torchs"])
def test_what_is_refused_at_once(rank: int, join: Any) -> None:
    uneven, other = short([2, 2], "none"), short([2, 2], "none")
    with pytest.raises(ValueError, match=r"write Join\(\[ddp, optimizer\]\)"):
        join([uneven.optimizer, uneven.ddp])
    with pytest.raises(ValueError, match="process group"):
        join([uneven.ddp, other.optimizer])
    with pytest.raises(ValueError, match="at least one joinable"):
        join([])
    if join is TorchJoin:
        return
    with pytest.raises(TypeError, match="Linear is none"):
        join([nn.Linear(1, 1)])
    hooked = short([2, 2], "interleaved")
    with pytest.raises(ValueError, match="optimizer that is not in the Join block"):
        join([hooked.ddp])
    with pytest.raises(ValueError, match="model that is not in the Join block"):
        join([hooked.optimizer])
    with pytest.raises(ValueError, match="twice"):
        join([uneven.ddp, uneven.ddp, uneven.optimizer])
    theirs = TorchZero(uneven.ddp.parameters(), optim.Adam, process_group=uneven.group)
    with pytest.raises(ValueError, match=r"use zeroshard.ZeroRedundancyOptimizer"):
        join([uneven.ddp, theirs])
    uneven.check(join)


@pytest.mark.ranks(2, backend="gloo")
def test_ranks_that_enter_with_other_settings(rank: int) -> None:
    uneven = short([2, 3], "none")
    with (
        pytest.raises(DisagreementError, match=r"rank 0 has entered Join.* and rank 1 Join"),
        Join([uneven.ddp, uneven.optimizer], throw_on_early_termination=rank == 1),
    ):
        pass
    uneven.check(Join)


@pytest.mark.ranks(2, backend="gloo")
def test_arguments_for_joinables_are_compared_by_value_only_if_they_are_plain(rank: int) -> None:
    uneven = short([2, 3], "none")
    uneven.check(lambda joinables, **kwargs: Join(joinables, thing=object(), **kwargs))
    with pytest.raises(DisagreementError, match="thing=1"), Join([uneven.ddp, uneven.optimizer], thing=rank):
        pass
    assert not uneven.optimizer._join_config.enable
    uneven.optimizer.zero_grad()


@pytest.mark.ranks(2, backend="gloo")
def test_a_model_that_is_missing_shows_in_the_first_step(rank: int) -> None:
    uneven = short([2, 4], "owner")
    with pytest.raises(ValueError, match="model that is not in the Join block"), Join([uneven.optimizer]):
        for number in range(2):
            uneven.loss(uneven.ddp, inputs(number, rank)).backward()
            uneven.optimizer.step()


@pytest.mark.ranks(2, backend="gloo")
def test_a_static_graph_on_a_rank_without_a_batch(rank: int) -> None:
    started = time.monotonic()
    with pytest.raises(ValueError, match="without a single batch, and static_graph"):
        short([0, 3], "none", ddp={"static_graph": True}).train(Join)
    assert time.monotonic() - started < SOON


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("without", [0, 1])
def test_sparse_gradients_on_a_rank_with_too_few_batches(rank: int, without: int) -> None:
    group = dist.new_group(timeout=SHORT)
    ddp = DistributedDataParallel(nn.Embedding(20, 3, sparse=True), process_group=group)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optim.SGD, process_group=group, lr=0.1)
    started = time.monotonic()
    with pytest.raises(ValueError, match="with fewer than two batches, and 'weight' has"), Join([ddp, optimizer]):
        for _ in range(without + 3 * rank):
            optimizer.zero_grad()
            ddp(torch.tensor([1, 2])).sum().backward()
            optimizer.step()
    assert time.monotonic() - started < SOON


@pytest.mark.ranks(3, backend="gloo")
@EVERY_HOOK
def test_a_local_step_that_raises(rank: int, hook: str) -> None:
    class Picky(optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            type(self).steps += 1
            if rank == 1 and self.steps >= 3:
                raise ArithmeticError("no more steps")
            return super().step(closure)

    uneven = short([1, 5, 5], "none")
    early = hook in HOOKS[2:]
    model = DistributedDataParallel(small_model().double(), process_group=uneven.group)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), Picky, process_group=uneven.group, overlap_with_ddp=early, lr=0.1
    )
    if hook != "none":
        register(hook, model, optimizer)
    with pytest.raises(ArithmeticError, match="no more steps"), Join([model, optimizer]):
        for number in range(uneven.lengths[rank]):
            optimizer.zero_grad()
            uneven.loss(model, inputs(number, rank)).backward()
            optimizer.step()


@pytest.mark.ranks(3, backend="gloo")
@EVERY_HOOK
def test_hyperparameters_that_cannot_be_told(rank: int, hook: str) -> None:
    uneven = short([2, 4, 4], hook)
    for group in uneven.optimizer.param_groups:
        group["note"] = object()
    batches = 0
    started = time.monotonic()
    with (
        pytest.raises((TypeError, RuntimeError), match="cannot be told the hyperparameter 'note', of type object"),
        Join([uneven.ddp, uneven.optimizer]),
    ):
        for number in range(uneven.lengths[rank]):
            uneven.optimizer.zero_grad()
            uneven.loss(uneven.ddp, inputs(number, rank)).backward()
            uneven.optimizer.step()
            batches += 1
    assert batches == 2
    assert time.monotonic() - started < SOON


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("hook", HOOKS[:2])
def test_arguments_of_steps_that_cannot_be_told(rank: int, hook: str) -> None:
    class Noted(optim.SGD):
        def step(self, closure: Any = None, note: object = None) -> Any:
            return super().step(closure)

    uneven = short([2, 4], "none")
    uneven.optimizer = ZeroRedundancyOptimizer(uneven.ddp.parameters(), Noted, process_group=uneven.group, lr=0.1)
    if hook != "none":
        register(hook, uneven.ddp, uneven.optimizer)
    with (
        pytest.raises(TypeError, match=r"cannot be told the argument 'note' of step\(\), of type object"),
        Join([uneven.ddp, uneven.optimizer]),
    ):
        for number in range(uneven.lengths[rank]):
            uneven.optimizer.zero_grad()
            uneven.loss(uneven.ddp, inputs(number, rank)).backward()
            uneven.optimizer.step(note=object())


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("at", [0, 2])
def test_an_exception_before_clipping(rank: int, at: int) -> None:
    for numbers in ([4, 4, 4], *([[1, 4, 4]] if at else [])):
        uneven = short(numbers, "owner")
        started = time.monotonic()
        with (
            pytest.raises((ValueError, RuntimeError), match="file 7 is damaged"),
            Join([uneven.ddp, uneven.optimizer]),
        ):
            for number in range(numbers[rank]):
                uneven.optimizer.zero_grad()
                uneven.loss(uneven.ddp, inputs(number, rank)).backward()
                fail(rank, "here", "here", number, at)
                uneven.optimizer.clip_grad_norm_(0.1)
                uneven.optimizer.step()
        # In the first iteration nobody knows yet that the others clip.
        assert time.monotonic() - started < (SOON if at else 3 * SHORT.total_seconds())


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("hook", HOOKS[:2])
@pytest.mark.parametrize("where", ["before the second backward", "behind the second backward", "before the step"])
def test_an_exception_in_a_window_of_backwards_that_reduce(rank: int, hook: str, where: str) -> None:
    for numbers in ([4, 4, 4], [1, 4, 4]):
        uneven = short(numbers, hook)
        started = time.monotonic()
        with pytest.raises(ValueError, match="file 7 is damaged"), Join([uneven.ddp, uneven.optimizer]):
            for number in range(numbers[rank]):
                for part in range(3):
                    loss = uneven.loss(uneven.ddp, inputs(10 * number + part, rank))
                    if part == 1:
                        fail(rank, where, "before the second backward", number)
                    loss.backward()
                    if part == 1:
                        fail(rank, where, "behind the second backward", number)
                fail(rank, where, "before the step", number)
                uneven.optimizer.step()
                uneven.optimizer.zero_grad()
        assert time.monotonic() - started < SOON, numbers


@pytest.mark.ranks(3, backend="gloo")
@EVERY_HOOK
@pytest.mark.parametrize("where", ["behind the first step", "behind the second model", "at the end"])
def test_an_exception_between_two_models(rank: int, hook: str, where: str) -> None:
    for numbers in ([4, 4, 4], [1, 4, 4]):
        first = short(numbers, hook)
        second = Uneven(numbers, hook, group=first.group)
        started = time.monotonic()
        with (
            pytest.raises(ValueError, match="file 7 is damaged"),
            Join([first.ddp, second.ddp, first.optimizer, second.optimizer]),
        ):
            for number in range(numbers[rank]):
                for pair in (first, second):
                    pair.optimizer.zero_grad()
                    pair.loss(pair.ddp, inputs(number, rank)).backward()
                    if pair is second:
                        fail(rank, where, "behind the second model", number)
                    pair.optimizer.step()
                    fail(rank, where, "behind the first step" if pair is first else "at the end", number)
        assert time.monotonic() - started < SOON, numbers


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("hook", HOOKS[:2])
def test_a_last_step_that_all_ranks_leave_out_is_no_early_leaving(rank: int, hook: str) -> None:
    def overflown(uneven: Uneven, number: int) -> None:
        loss = uneven.loss(uneven.ddp, inputs(number, rank))
        (loss * (torch.inf if hook == "none" and number == 3 else 1)).backward()

    for numbers in ([4, 4], [4, 6]):
        uneven = short(numbers, hook)
        with Join([uneven.ddp, uneven.optimizer]):
            for number in range(numbers[rank]):
                uneven.optimizer.zero_grad()
                overflown(uneven, number)
                if number != 3:
                    uneven.optimizer.step()
                elif hook == "owner":
                    # Gradients lie at their owners, and nobody sees whether they are finite.
                    uneven.optimizer.zero_grad()
        for number in (number for number in range(max(numbers)) if number != 3):
            uneven.plain.zero_grad()
            for other in range(2):
                if number < numbers[other]:
                    (uneven.loss(uneven.plain_model, inputs(number, other)) / 2).backward()
            uneven.plain.step()
        assert uneven.distance() < 1e-12


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
@pytest.mark.parametrize("operation", ["add_param_group", "load_state_dict"])
def test_what_needs_all_ranks_is_refused_once_one_has_run_out(rank: int, hook: str, operation: str) -> None:
    uneven = short([2, 4], hook)
    state = uneven.plain.state_dict()
    extra = nn.Linear(3, 3).double()
    started = time.monotonic()
    with (
        pytest.raises(RuntimeError, match=rf"{operation}\(\) needs all ranks, and one has run out of data"),
        Join([uneven.ddp, uneven.optimizer]),
    ):
        for number in range(uneven.lengths[rank]):
            uneven.optimizer.zero_grad()
            uneven.loss(uneven.ddp, inputs(number, rank)).backward()
            uneven.optimizer.step()
            if number != 2 and rank == 0:
                continue
            if number == 2 and operation == "add_param_group":
                uneven.optimizer.add_param_group({"params": extra.parameters()})
            elif number == 2:
                uneven.optimizer.load_state_dict(state)
    assert time.monotonic() - started < SOON
    assert len(uneven.optimizer.param_groups) == 1


@pytest.mark.ranks(2, backend="gloo")
def test_a_hook_that_one_rank_cannot_make(rank: int) -> None:
    class Picky(DistributedDataParallel):
        def join_hook(self, **kwargs: Any) -> Any:
            if rank == 1:
                raise OSError("no space left")
            return super().join_hook(**kwargs)

    group = dist.new_group(timeout=SHORT)
    model = Picky(small_model().double(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, process_group=group, lr=0.1)
    started = time.monotonic()
    with pytest.raises(OSError, match="no space left"), Join([optimizer, model][::-1]):
        pass
    assert time.monotonic() - started < SOON
    assert not optimizer._join_config.enable
    model(inputs(0, rank)).sum().backward()
    optimizer.step()


@pytest.mark.ranks(2, backend="gloo")
def test_gradients_that_are_changed_between_backwards_that_do_not_reduce(rank: int) -> None:
    uneven = short([1, 4], "none")
    started = time.monotonic()
    with (
        pytest.raises(RuntimeError, match=r"gradients were changed, .* between backwards under no_sync\(\)"),
        Join([uneven.ddp, uneven.optimizer]),
    ):
        for number in range(uneven.lengths[rank]):
            with uneven.ddp.no_sync():
                uneven.loss(uneven.ddp, inputs(number, rank)).backward()
            nn.utils.clip_grad_norm_(uneven.ddp.parameters(), 0.01)
            uneven.loss(uneven.ddp, inputs(number + 50, rank)).backward()
            uneven.optimizer.step()
            uneven.optimizer.zero_grad()
    assert time.monotonic() - started < SOON


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_training_goes_on_in_another_block_behind_an_error(rank: int, hook: str) -> None:
    uneven = short([4, 4], hook)
    with pytest.raises(ValueError, match="file 7"), Join([uneven.ddp, uneven.optimizer]):
        for number in range(4):
            fail(rank, "here", "here", number)
            uneven.optimizer.zero_grad()
            uneven.loss(uneven.ddp, inputs(number, rank)).backward()
            uneven.optimizer.step()
    uneven.lengths = [2, 2]
    uneven.reference()
    uneven.lengths = [3, 5]
    uneven.check(Join)


@pytest.mark.ranks(2, backend="gloo")
def test_errors_that_are_caught_inside_the_block(rank: int) -> None:
    uneven = short([2, 4], "none")
    started = time.monotonic()
    with (
        pytest.raises(RuntimeError, match=r"has ended with an error on every rank|rank 0 has run out of data"),
        Join([uneven.ddp, uneven.optimizer], throw_on_early_termination=True),
    ):
        for number in range(uneven.lengths[rank]):
            uneven.optimizer.zero_grad()
            try:
                uneven.loss(uneven.ddp, inputs(number, rank)).backward()
                uneven.optimizer.step()
            except RuntimeError:
                break
    assert time.monotonic() - started < SOON
    uneven.optimizer.zero_grad()
    uneven.lengths = [2, 2]
    uneven.reference()
    uneven.lengths = [3, 1]
    uneven.check(Join)


@pytest.mark.ranks(2, backend="gloo")
def test_gradients_set_to_zero_between_the_forward_that_rebuilds_buckets_and_its_backward(rank: int) -> None:
    for without in ([0, 4], [1, 4]):
        uneven = short(without, "owner")
        started = time.monotonic()
        with (
            pytest.raises(RuntimeError, match="set them to None, or before the forward"),
            Join([uneven.ddp, uneven.optimizer]),
        ):
            for number in range(without[rank]):
                loss = uneven.loss(uneven.ddp, inputs(number, rank))
                uneven.optimizer.zero_grad(set_to_none=False)
                loss.backward()
                uneven.optimizer.step()
        assert time.monotonic() - started < SOON


@pytest.mark.ranks(2, backend="gloo")
def test_what_a_hook_raises_when_all_have_left(rank: int) -> None:
    class Late(DistributedDataParallel):
        def join_hook(self, **kwargs: Any) -> Any:
            hook = super().join_hook(**kwargs)
            synchronize = hook.post_hook

            def refuse(is_last_joiner: bool) -> None:
                synchronize(is_last_joiner)
                raise OSError("no space left")

            if rank == 1:
                hook.post_hook = refuse
            return hook

    group = dist.new_group(timeout=SHORT)
    model = Late(small_model().double(), process_group=group)
    started = time.monotonic()
    with pytest.raises(OSError, match="no space left") if rank == 1 else nullcontext(), Join([model]):
        pass
    assert time.monotonic() - started < SOON
    assert not model._join_config.enable


@pytest.mark.ranks(2, backend="gloo")
def test_gradients_that_were_changed_before_a_rank_runs_out_in_its_window(rank: int) -> None:
    uneven = short([2, 4], "none")
    started = time.monotonic()
    with (
        pytest.raises(RuntimeError, match=r"gradients were changed, .* between backwards under no_sync\(\)"),
        Join([uneven.ddp, uneven.optimizer], divide_by_initial_world_size=False),
    ):
        for number in range(uneven.lengths[rank]):
            uneven.loss(uneven.ddp, inputs(number, rank)).backward()
            with uneven.ddp.no_sync():
                uneven.loss(uneven.ddp, inputs(number + 20, rank)).backward()
            for param in uneven.ddp.parameters():
                assert param.grad is not None
                param.grad.mul_(0.5)
            with uneven.ddp.no_sync():
                uneven.loss(uneven.ddp, inputs(number + 50, rank)).backward()
            if number == 1:
                continue
            uneven.loss(uneven.ddp, inputs(number + 70, rank)).backward()
            uneven.optimizer.step()
            uneven.optimizer.zero_grad()
    assert time.monotonic() - started < SOON
