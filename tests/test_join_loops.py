"""Loops that leave out steps, keep gradients, change them, or call forwards as they please end as one process would."""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
import random
from itertools import cycle
from typing import Any

import pytest
import torch
from join_loops import Loop, Script, compare, lengths_of
from join_training import HOOKS, Uneven, inputs
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_integrations.join import Join
from zeroshard_testing import assert_replicas_equal

EVERY_HOOK = pytest.mark.parametrize("hook", HOOKS)
EVERY_MEAN = pytest.mark.parametrize("divide", [True, False], ids=["of all", "of those that run"])


def usual(loop: Loop, number: int) -> None:
    loop.zero()
    loop.backward(number)
    loop.step()


def to_zero(loop: Loop, number: int) -> None:
    loop.zero(to_none=False)
    loop.backward(number)
    loop.step()


def two_forwards(loop: Loop, number: int) -> None:
    loop.zero()
    loop.backward(number, forwards=2)
    loop.step()


def forwards_for_nothing(loop: Loop, number: int) -> None:
    loop.zero()
    loop.forward(number + 50)
    loop.backward(number)
    loop.step()


def steps_left_out(loop: Loop, number: int) -> None:
    loop.zero()
    loop.backward(number)
    if number % 3:
        loop.step()


def given_up(loop: Loop, number: int) -> None:
    # A window of two that is thrown away from time to time.
    loop.backward(number, reduces=number % 2 == 1)
    if number % 2:
        loop.step()
        loop.zero()
    elif number % 4 == 2:
        loop.zero()


def windows_on_zeros(loop: Loop, number: int) -> None:
    loop.backward(number, reduces=number % 2 == 1)
    if number % 2:
        loop.step()
        loop.zero(to_none=False)


def steps_made_later(loop: Loop, number: int) -> None:
    loop.backward(number)
    loop.backward(number + 50)
    if number % 3 != 1:
        loop.step()
        loop.zero()


def some_are_kept(loop: Loop, number: int) -> None:
    loop.backward(number)
    loop.backward(number + 50)
    loop.zero(some=True, to_none=number % 2 == 0)
    loop.backward(number + 60)
    loop.step()
    loop.zero()


def clipped_between(loop: Loop, number: int) -> None:
    loop.backward(number)
    loop.clip()
    loop.backward(number + 50)
    loop.step()
    loop.zero()


def two_steps(loop: Loop, number: int) -> None:
    loop.backward(number)
    loop.step()
    loop.step()
    loop.zero()


def zero_before_the_step(loop: Loop, number: int) -> None:
    loop.backward(number)
    loop.zero(to_none=False, some=number % 2 == 0)
    loop.step()
    loop.zero()


def some_are_none_when_clipped(loop: Loop, number: int) -> None:
    loop.backward(number)
    loop.zero(some=True, to_none=number % 2 == 0)
    loop.clip()
    loop.step()
    loop.zero()


def never_zero(loop: Loop, number: int) -> None:
    loop.backward(number)
    loop.step()


def never_zero_but_clip(loop: Loop, number: int) -> None:
    loop.backward(number)
    loop.clip()
    loop.step()


def some_are_never_zero(loop: Loop, number: int) -> None:
    loop.zero(some=True, to_none=number % 2 == 0)
    loop.backward(number)
    loop.step()


def decay_of_gradients(loop: Loop, number: int) -> None:
    loop.scale(0.5)
    loop.backward(number)
    loop.step()


def decay_in_windows(loop: Loop, number: int) -> None:
    loop.scale(0.5)
    loop.backward(number, reduces=False)
    loop.backward(number + 50)
    loop.step()


OF_ALL_HOOKS: list[Script] = [usual, to_zero, two_forwards, forwards_for_nothing, given_up, windows_on_zeros]
NOT_STEPPED_EARLY: list[Script] = [
    steps_left_out,
    steps_made_later,
    some_are_kept,
    clipped_between,
    two_steps,
    zero_before_the_step,
    some_are_none_when_clipped,
]
WITHOUT_HOOK: list[Script] = [
    never_zero,
    never_zero_but_clip,
    some_are_never_zero,
    decay_of_gradients,
    decay_in_windows,
]


def may_refuse(hook: str, script: Script, numbers: list[int]) -> bool:
    # DDP rebuilds its buckets in the second forward, with what was kept in them.
    return script is decay_in_windows or (hook == "owner" and min(numbers) < 2)


def possible(hook: str) -> list[Script]:
    if hook == "none":
        return [*OF_ALL_HOOKS, *NOT_STEPPED_EARLY, *WITHOUT_HOOK]
    return [*OF_ALL_HOOKS, *NOT_STEPPED_EARLY] if hook == "owner" else OF_ALL_HOOKS


FORMS = [(hook, script) for hook in HOOKS for script in possible(hook)]
EVERY_FORM = pytest.mark.parametrize(("hook", "script"), FORMS, ids=lambda each: getattr(each, "__name__", None))


@pytest.mark.ranks(2, backend="gloo")
@EVERY_FORM
def test_loops_of_every_form(hook: str, script: Script) -> None:
    divides = cycle([True, False] if FORMS.index((hook, script)) % 2 else [False, True])
    for numbers in lengths_of(2):
        compare(
            Uneven(numbers, hook, divide_by_initial=next(divides)),
            script,
            Join,
            may_refuse=may_refuse(hook, script, numbers),
        )


@pytest.mark.exhaustive
@pytest.mark.ranks(2, 3, 4, backend="gloo", timeout=240)
@EVERY_MEAN
@EVERY_FORM
@pytest.mark.parametrize("partition", ["whole", "split", "hybrid"])
def test_loops_of_every_form_on_more_ranks(
    world_size: int, hook: str, script: Script, divide: bool, partition: str
) -> None:
    for numbers in lengths_of(world_size):
        uneven = Uneven(numbers, hook, divide_by_initial=divide, partition=partition)
        compare(uneven, script, Join, may_refuse=may_refuse(hook, script, numbers))


def drawn(seed: int, hook: str) -> Script:
    """Draw a loop; the same on all ranks."""
    dice = random.Random(seed)
    iterations: list[list[tuple[str, Any]]] = []
    early = hook in HOOKS[2:]
    local = reduced = stepped = False
    for number in range(12):
        acts: list[tuple[str, Any]] = []
        for turn in range(dice.randint(1, 4)):
            if stepped and hook != "none":
                acts.append(("zero", {"to_none": dice.random() < 0.5}))
                local = reduced = stepped = False
            alone = dice.random() < 0.2
            if alone:
                acts.append(("forward", 900))
            # A forward that has no backward leaves its preparations to the next.
            reduces = alone or dice.random() < 0.6 or (number == 0 and turn == 0)
            acts.append(("backward", (100 * turn, reduces, dice.choice([1, 1, 2]))))
            local, reduced = not reduces, reduces or reduced
            if early and reduces:
                stepped = True
                acts.append(("step", None))
            if number == 0 and turn == 0 and not early:
                # Windows of backwards that reduce: known to the block from now on.
                acts.append(("backward", (100 * turn + 50, True, 1)))
            act = dice.choice(["none", "zero", "zero some", "step", "clip", "scale"])
            if act == "zero":
                acts.append(("zero", {"to_none": dice.random() < 0.5}))
                local = reduced = stepped = False
            elif act == "zero some" and not (hook == "none" and local) and not early:
                acts.append(("zero", {"to_none": dice.random() < 0.5, "some": True}))
            elif act in ("step", "clip") and reduced and not local and not early and not (stepped and act == "clip"):
                acts.append((act, None))
                stepped = stepped or act == "step"
            elif act == "scale" and hook == "none" and not local:
                acts.append(("scale", 0.5))
        iterations.append(acts)

    def script(loop: Loop, number: int) -> None:
        for act, how in iterations[number]:
            if act == "backward":
                loop.backward(number + how[0], reduces=how[1], forwards=how[2])
            elif act == "zero":
                loop.zero(**how)
            elif act == "scale":
                loop.scale(how)
            elif act == "forward":
                loop.forward(number + how)
            else:
                getattr(loop, act)()

    return script


def check_drawn(world_size: int, hook: str, seed: int) -> bool:
    dice = random.Random(seed)
    numbers = [dice.choice([0, 1, 3, 5, 8, 11]) for _ in range(world_size)]
    partition = dice.choice(["whole", "split", "hybrid"])
    views = {"gradient_as_bucket_view": dice.random() < 0.5}
    uneven = Uneven(numbers, hook, divide_by_initial=dice.random() < 0.5, partition=partition, ddp=views)
    return compare(uneven, drawn(seed, hook), Join, may_refuse=True)


@pytest.mark.ranks(3, backend="gloo")
@EVERY_HOOK
def test_loops_that_were_drawn(world_size: int, hook: str) -> None:
    # The last has found a window given up in place while all ranks had data.
    for seed in (*range(3), 181):
        check_drawn(world_size, hook, seed)


@pytest.mark.exhaustive
@pytest.mark.ranks(2, 3, 4, backend="gloo", timeout=240)
@EVERY_HOOK
@pytest.mark.parametrize("first", range(0, 200, 10))
def test_more_loops_that_were_drawn(world_size: int, hook: str, first: int) -> None:
    for seed in range(first, first + 10):
        check_drawn(world_size, hook, seed)


@pytest.mark.ranks(2, 3, backend="gloo")
@EVERY_MEAN
def test_a_scaler_that_leaves_out_steps(rank: int, world_size: int, divide: bool) -> None:
    for numbers in lengths_of(world_size):
        uneven = Uneven(numbers, "none", divide_by_initial=divide)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        overflows = {3, max(numbers) - 1}
        with Join([uneven.ddp, uneven.optimizer], divide_by_initial_world_size=divide):
            for number in range(numbers[rank]):
                uneven.optimizer.zero_grad()
                loss = uneven.loss(uneven.ddp, inputs(number, rank))
                scaler.scale(loss * torch.inf if number in overflows else loss).backward()
                if number % 2:
                    scaler.unscale_(uneven.optimizer)
                    nn.utils.clip_grad_norm_(uneven.ddp.parameters(), 0.1)
                scaler.step(uneven.optimizer)
                scaler.update()
        for number in sorted(set(range(max(numbers))) - overflows):
            running = [other for other in range(world_size) if number < numbers[other]]
            share = world_size if divide else len(running)
            uneven.plain.zero_grad()
            for other in running:
                (uneven.loss(uneven.plain_model, inputs(number, other)) / share).backward()
            if number % 2:
                nn.utils.clip_grad_norm_(uneven.plain_model.parameters(), 0.1)
            uneven.plain.step()
        assert uneven.distance() < 1e-12, numbers


@pytest.mark.ranks(2, 3, backend="gloo")
def test_two_optimizers_of_one_model_that_step_at_different_rates(rank: int, world_size: int) -> None:
    for numbers in lengths_of(world_size):
        uneven = Uneven(numbers, "none")
        halves = [list(model.parameters()) for model in (uneven.ddp, uneven.plain_model)]
        sharded = [ZeroRedundancyOptimizer(halves[0][each::2], optim.Adam, lr=1e-2) for each in range(2)]
        plain = [optim.Adam(halves[1][each::2], lr=1e-2) for each in range(2)]
        with Join([uneven.ddp, *sharded]):
            for number in range(numbers[rank]):
                sharded[0].zero_grad()
                uneven.loss(uneven.ddp, inputs(number, rank)).backward()
                sharded[0].step()
                if number % 3 == 2:
                    sharded[1].step()
                    sharded[1].zero_grad()
        for number in range(max(numbers)):
            plain[0].zero_grad()
            for other in range(world_size):
                if number < numbers[other]:
                    (uneven.loss(uneven.plain_model, inputs(number, other)) / world_size).backward()
            plain[0].step()
            if number % 3 == 2:
                plain[1].step()
                plain[1].zero_grad()
        assert uneven.distance() < 1e-12, numbers


@pytest.mark.pairwise
@pytest.mark.ranks(2, 3, backend="gloo")
@EVERY_HOOK
@EVERY_MEAN
def test_an_encoder_and_a_decoder_in_two_models(rank: int, world_size: int, hook: str, divide: bool) -> None:
    for numbers in lengths_of(world_size):
        parts = [Uneven(numbers, hook, model=model, divide_by_initial=divide) for model in (Encoder, Decoder)]
        with Join(
            [part.ddp for part in parts] + [part.optimizer for part in parts], divide_by_initial_world_size=divide
        ):
            for number in range(numbers[rank]):
                for part in parts:
                    part.optimizer.zero_grad()
                parts[1].ddp(parts[0].ddp(inputs(number, rank))).square().mean().backward()
                for part in parts:
                    part.optimizer.step()
        for number in range(max(numbers)):
            running = [other for other in range(world_size) if number < numbers[other]]
            for part in parts:
                part.plain.zero_grad()
            for other in running:
                output = parts[1].plain_model(parts[0].plain_model(inputs(number, other)))
                (output.square().mean() / (world_size if divide else len(running))).backward()
            for part in parts:
                part.plain.step()
        assert max(part.distance() for part in parts) < 1e-12, numbers


class Encoder(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 30))


class Decoder(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 3))


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_forward_called_by_its_name(hook: str) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model.forward(batch).square().mean()
        return result

    for numbers in lengths_of(2):
        Uneven(numbers, hook, loss=loss).check(Join)


@pytest.mark.ranks(3, backend="gloo")
@EVERY_HOOK
def test_gradients_are_the_same_on_all_ranks_behind_the_block(world_size: int, hook: str) -> None:
    def zeroed(loop: Loop, number: int) -> None:
        usual(loop, number)
        loop.zero()

    for script in (usual, zeroed, *([never_zero_but_clip] if hook == "none" else [])):
        for numbers in lengths_of(world_size):
            uneven = Uneven(numbers, hook)
            compare(uneven, script, Join)
            grads = [param.grad for param in uneven.ddp.parameters()]
            assert all((grad is None) is (script is zeroed) for grad in grads)
            if hook == "none" and script is not zeroed:
                assert_replicas_equal([grad for grad in grads if grad is not None])


@pytest.mark.pairwise
@pytest.mark.ranks(2, 3, backend="gloo")
@EVERY_HOOK
@pytest.mark.parametrize("to", [0, 1])
def test_states_are_consolidated_inside_the_block(rank: int, world_size: int, hook: str, to: int) -> None:
    for numbers in lengths_of(world_size):
        uneven = Uneven(numbers, hook)
        with Join([uneven.ddp, uneven.optimizer]):
            for number in range(numbers[rank]):
                uneven.optimizer.zero_grad()
                uneven.loss(uneven.ddp, inputs(number, rank)).backward()
                uneven.optimizer.step()
                if number == max(numbers) - 1:
                    uneven.optimizer.consolidate_state_dict(to=to)
        uneven.reference()
        if rank != to:
            continue
        ours, plain = uneven.optimizer.state_dict()["state"], uneven.plain.state_dict()["state"]
        assert ours.keys() == plain.keys()
        for key, entries in plain.items():
            torch.testing.assert_close(ours[key]["exp_avg"], entries["exp_avg"], rtol=1e-12, atol=1e-14)
            assert ours[key]["step"] == max(numbers)
