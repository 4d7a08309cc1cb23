"""Loops of every form, written once, end on uneven ranks where they end in one process."""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
from itertools import cycle
from typing import Any

import pytest
import torch
from support.combinations import each_of
from support.join_training import (
    EVERY_MEAN,
    EVERY_PARTITION,
    MEANS_AND_ENDINGS,
    PARTITIONS,
    Loop,
    Script,
    Uneven,
    inputs,
    lengths_of,
    never_zero,
    usual,
    windows,
)
from support.training import EVERYWHERE
from torch import nn, optim
from zeroshard_integrations.join import Join

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")


# ---------------------------------------------------------------------- loops of every form


def to_zero(loop: Loop, number: int) -> None:
    loop.zero(to_none=False)
    loop.backward(number)
    loop.step()


def forwards_of_all_kinds(loop: Loop, number: int) -> None:
    loop.forward(number, with_grad=False)
    loop.zero()
    loop.forward(number + 50)
    loop.backward(number, forwards=2)
    loop.step()
    loop.forward(number + 60, with_grad=False)


def a_forward_at_the_end(loop: Loop, number: int) -> None:
    usual(loop, number)
    loop.forward(number + 50)


def given_up(loop: Loop, number: int) -> None:
    # A window of two that is thrown away from time to time.
    loop.backward(number)
    if number % 2:
        loop.step()
        loop.zero()
    elif number % 4 == 2:
        loop.zero(to_none=False)


def weights_that_the_loop_changes(loop: Loop, number: int) -> None:
    usual(loop, number)
    if number % 3:
        loop.change(clip_weights)


def clip_weights(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.clamp_(-0.05, 0.05)


def steps_left_out(loop: Loop, number: int) -> None:
    loop.zero()
    loop.backward(number)
    if number % 3:
        loop.step()


def clipped_windows(loop: Loop, number: int) -> None:
    loop.backward(number)
    if number % 3 == 2:
        loop.clip()
        loop.step()
        loop.zero()


def changed_in_a_window(loop: Loop, number: int) -> None:
    loop.backward(number)
    loop.scale(0.5)
    loop.backward(number + 50)
    loop.step()
    loop.zero()


def some_are_kept(loop: Loop, number: int) -> None:
    loop.backward(number)
    loop.clip()
    loop.backward(number + 50)
    loop.zero(some=True, to_none=number % 2 == 0)
    loop.backward(number + 60)
    loop.step()
    loop.zero()


def two_steps(loop: Loop, number: int) -> None:
    loop.backward(number)
    loop.step()
    loop.step()
    loop.zero()


def zero_before_the_step(loop: Loop, number: int) -> None:
    loop.backward(number)
    loop.zero(to_none=number % 4 == 0, some=number % 2 == 0)
    loop.clip()
    loop.step()
    loop.zero()


def some_are_never_zero(loop: Loop, number: int) -> None:
    loop.zero(some=True, to_none=number % 2 == 0)
    loop.backward(number)
    loop.step()


def decay_of_gradients(loop: Loop, number: int) -> None:
    loop.scale(0.5)
    loop.backward(number)
    loop.step()


def zeroed_past_autograd(loop: Loop, number: int) -> None:
    loop.change(zero_data)
    loop.backward(number)
    loop.step()


def zero_data(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.data.zero_()


def named(script: Script, name: str) -> Script:
    script.__name__ = name
    return script


FORMS: list[Script] = [
    to_zero,
    forwards_of_all_kinds,
    a_forward_at_the_end,
    given_up,
    weights_that_the_loop_changes,
    named(windows(3), "windows"),
    named(windows(4, to_none=False), "windows_on_zeros"),
    clipped_windows,
    steps_left_out,
    some_are_kept,
    two_steps,
    zero_before_the_step,
    changed_in_a_window,
    never_zero,
    some_are_never_zero,
    decay_of_gradients,
    zeroed_past_autograd,
]


# Each with one of the endings, in turn.
@pytest.mark.ranks(3, backend=EVERYWHERE)
@pytest.mark.parametrize(
    ("script", "ending"), [*zip(FORMS, cycle(range(3)))], ids=lambda value: getattr(value, "__name__", value)
)
def test_loops_of_every_form_end_as_in_one_process(world_size: int, script: Script, ending: int) -> None:
    divide = (FORMS.index(script) + ending) % 2 == 0
    Uneven(lengths_of(world_size)[ending], divide=divide, partition=PARTITIONS[ending % 2]).check(script)


@pytest.mark.exhaustive
@pytest.mark.ranks(2, 3, 4, backend=EVERYWHERE)
@EVERY_PARTITION
@EVERY_MEAN
@pytest.mark.parametrize("script", FORMS, ids=lambda script: script.__name__)
def test_loops_of_every_form_end_in_every_way_as_in_one_process(
    world_size: int, script: Script, divide: bool, partition: str
) -> None:
    for numbers in lengths_of(world_size):
        Uneven(numbers, divide=divide, partition=partition).check(script)


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_ranks_may_leave_between_any_two_calls() -> None:
    def script(loop: Loop, number: int) -> None:
        loop.backward(number)
        loop.backward(number + 50)
        loop.clip()
        loop.step()
        loop.zero()

    # The first iteration has its 8 calls; rank 0 and rank 1 leave the loop in turn.
    for calls in range(8, 16):
        Uneven([3, 3], calls=[99, calls] if calls % 2 else [calls, 99], divide=calls % 2 == 0).check(script)


@pytest.mark.exhaustive_at(3)
@pytest.mark.ranks(2, 3, backend=EVERYWHERE)
@MEANS_AND_ENDINGS
def test_a_scaler_leaves_out_the_same_steps_on_all_ranks(rank: int, world_size: int, divide: bool, ending: int) -> None:
    numbers = lengths_of(world_size)[ending]
    uneven = Uneven(numbers, divide=divide)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    overflows = {3, max(numbers) - 1}
    with Join([uneven.ddp, uneven.optimizer], divide_by_initial_world_size=divide):
        for number in range(numbers[rank]):
            uneven.optimizer.zero_grad()
            loss = uneven.loss(uneven.ddp, inputs(number, rank))
            scaler.scale(loss * torch.inf if number in overflows else loss).backward()
            scaler.unscale_(uneven.optimizer)
            scaler.step(uneven.optimizer)
            scaler.update()
    uneven.refer(lambda loop, number: None if number in overflows else usual(loop, number))
    uneven.compare()


class Scaled(optim.SGD):
    """Takes an argument in its step."""

    def step(self, closure: Any = None, scale: Any = 1.0) -> Any:
        for group in self.param_groups:
            group["before"], group["lr"] = group["lr"], float(group["lr"]) * float(scale)
        result = super().step(closure)
        for group in self.param_groups:
            group["lr"] = group.pop("before")
        return result


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_arguments_of_steps_and_hyperparameters_reach_ranks_that_have_ended() -> None:
    def script(loop: Loop, number: int) -> None:
        loop.zero()
        loop.backward(number)
        optimizer: Any = loop._optimizer
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (number + 1)
            group["notes"] = {"of": [number, None, "x"]}
        loop.step(scale=[0.5, torch.tensor(0.75)][number % 2])

    for numbers in ([2, 5], [5, 2]):
        uneven = Uneven(numbers, optimizer=(Scaled, {"lr": 0.1}))
        uneven.check(script)
        assert uneven.optimizer.param_groups[0]["notes"] == uneven.plain.param_groups[0]["notes"]


@pytest.mark.exhaustive_at(3)
@pytest.mark.ranks(2, 3, backend=EVERYWHERE)
@each_of("ending", range(3), partition=["whole", "split"], to=[0, 1])
def test_states_are_consolidated_inside_and_after_the_block(
    rank: int, world_size: int, partition: str, ending: int, to: int
) -> None:
    def check_state(uneven: Uneven) -> None:
        if rank != to:
            return
        ours, plain = uneven.optimizer.state_dict()["state"], uneven.plain.state_dict()["state"]
        assert ours.keys() == plain.keys()
        for key, entries in plain.items():
            torch.testing.assert_close(ours[key]["exp_avg"], entries["exp_avg"].cpu(), rtol=1e-12, atol=1e-14)
            assert ours[key]["step"] == entries["step"] == max(uneven.lengths)

    uneven = Uneven(lengths_of(world_size)[ending], partition=partition)

    def script(loop: Loop, number: int) -> None:
        usual(loop, number)
        if number == max(uneven.lengths) - 1:
            loop.use(lambda optimizer: optimizer.consolidate_state_dict(to=to))

    uneven.check(script)
    check_state(uneven)
    uneven.optimizer.consolidate_state_dict(to=to)
    check_state(uneven)
