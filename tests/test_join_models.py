"""What models return, how losses are made of it, and what loops do to models: ranks end as one process would."""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
from collections.abc import Callable

import pytest
import torch
from join_loops import Loop, compare, lengths_of, refer
from join_training import HOOKS, Branches, Uneven, inputs
from torch import nn
from zeroshard_integrations.join import Join

EVERY_HOOK = pytest.mark.parametrize("hook", HOOKS)
UNUSED = {"find_unused_parameters": True, "broadcast_buffers": False}


def usual(loop: Loop, number: int) -> None:
    loop.zero()
    loop.backward(number)
    loop.step()


class Smooth(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(40, 10), nn.Tanh(), nn.Linear(10, 1))


def adversarial(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Of the fast gradient sign method: a forward whose gradient is that of the batch alone, and a second one."""
    batch = batch.clone().requires_grad_()
    [slope] = torch.autograd.grad(model(batch).square().mean(), batch)
    result: torch.Tensor = model(batch.detach() + 0.1 * slope.sign()).square().mean()
    return result


def with_gradient_penalty(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    batch = batch.clone().requires_grad_()
    output = model(batch)
    [slope] = torch.autograd.grad(output.sum(), batch, create_graph=True)
    result: torch.Tensor = output.square().mean() + (slope.norm(dim=1) - 1).square().mean()
    return result


def with_weight_penalty(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """With the norm of the gradient of the weights in it."""
    output = model(batch)
    slopes = torch.autograd.grad(output.sum(), list(model.parameters()), create_graph=True)
    result: torch.Tensor = output.square().mean() + sum(slope.square().mean() for slope in slopes)
    return result


@pytest.mark.pairwise
@pytest.mark.ranks(2, 3, backend="gloo")
@EVERY_HOOK
@pytest.mark.parametrize("loss", [adversarial, with_gradient_penalty, with_weight_penalty])
def test_gradients_of_other_things(
    world_size: int, hook: str, loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]
) -> None:
    for numbers in lengths_of(world_size):
        compare(Uneven(numbers, hook, model=Smooth, loss=loss), usual, Join)


class Distribution(nn.Module):
    """Returns something that nothing can look into, beside a tensor without gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mean = nn.Linear(40, 5)

    def forward(self, batch: torch.Tensor) -> tuple[torch.distributions.Normal, torch.Tensor]:
        mean = self.mean(batch)
        return torch.distributions.Normal(mean, 1.0), mean.detach()


class Keeper(nn.Module):
    """Keeps its loss, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(40, 5)

    def forward(self, batch: torch.Tensor) -> None:
        self.loss = self.out(batch).square().mean()


def of_distribution(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(batch)[0].mean.square().mean()
    return result


def kept(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    model(batch)
    inner = getattr(model, "module", model)
    result: torch.Tensor = inner.loss
    return result


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
@pytest.mark.parametrize(("model", "loss"), [(Distribution, of_distribution), (Keeper, kept)])
def test_losses_that_are_not_made_of_tensors_that_the_model_returns(
    hook: str, model: Callable[[], nn.Module], loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]
) -> None:
    for numbers in lengths_of(2):
        compare(Uneven(numbers, hook, model=model, loss=loss), usual, Join)


def clip_weights(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.clamp_(-0.05, 0.05)


def normalize_weights(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.div_(max(1.0, float(param.norm())))


@pytest.mark.pairwise
@pytest.mark.ranks(2, 3, backend="gloo")
@EVERY_HOOK
@pytest.mark.parametrize("act", [clip_weights, normalize_weights])
def test_weights_that_the_loop_changes(world_size: int, hook: str, act: Callable[[nn.Module], None]) -> None:
    def script(loop: Loop, number: int) -> None:
        usual(loop, number)
        if number % 3:
            loop.change(act)

    for numbers, partition in zip(lengths_of(world_size), ("whole", "split", "hybrid"), strict=True):
        compare(Uneven(numbers, hook, partition=partition), script, Join)


def zero_data(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.data.zero_()


@pytest.mark.ranks(2, backend="gloo")
def test_gradients_set_to_zero_behind_the_back_of_autograd() -> None:
    def script(loop: Loop, number: int) -> None:
        loop.change(zero_data)
        loop.backward(number)
        loop.step()

    for numbers in lengths_of(2):
        compare(Uneven(numbers, "none"), script, Join)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("frozen_before", [True, False])
def test_freezing_and_unfreezing(frozen_before: bool) -> None:
    def freeze(model: nn.Module, until: int, number: int) -> None:
        for param in list(model.parameters())[:2]:
            param.requires_grad_(number >= until)

    for numbers in ([3, 6], [5, 3], [3, 3]):
        uneven = Uneven(numbers, "none", ddp=UNUSED)
        if frozen_before:
            freeze(uneven.ddp.module, 2, 0)
            freeze(uneven.plain_model, 2, 0)

        def script(loop: Loop, number: int) -> None:
            loop.change(lambda model: freeze(model, 2, number))
            usual(loop, number)

        compare(uneven, script, Join)


class Switched(Branches):
    """Uses its second branch while it is told to."""

    uses_second = True

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.always(batch)
        return hidden + self.sometimes(hidden) if self.uses_second else hidden


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
@pytest.mark.parametrize("to_none", [True, False])
def test_unused_parameters_behind_the_block(rank: int, hook: str, to_none: bool) -> None:
    for numbers in lengths_of(2):
        uneven = Uneven(numbers, hook, model=Switched, ddp=UNUSED)

        def script(loop: Loop, number: int) -> None:
            loop.backward(number)
            loop.step()
            loop.zero(to_none=to_none)

        compare(uneven, script, Join)
        for model in (uneven.ddp.module, uneven.plain_model):
            model.uses_second = False
        for number in (20, 21):
            uneven.loss(uneven.ddp, inputs(number, rank)).backward()
            uneven.optimizer.step()
            uneven.optimizer.zero_grad(set_to_none=to_none)
            for other in range(2):
                (uneven.loss(uneven.plain_model, inputs(number, other)) / 2).backward()
            uneven.plain.step()
            uneven.plain.zero_grad(set_to_none=to_none)
        assert uneven.distance() < 1e-12


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("divide", [True, False])
def test_unused_parameters_whose_gradients_are_kept(divide: bool) -> None:
    def windows(loop: Loop, number: int) -> None:
        loop.backward(number)
        loop.backward(number + 50)
        loop.step()
        loop.zero()

    def never_zero(loop: Loop, number: int) -> None:
        loop.backward(number)
        loop.step()

    for script in (windows, never_zero):
        for numbers in lengths_of(3):
            compare(Uneven(numbers, "none", model=Branches, ddp=UNUSED, divide_by_initial=divide), script, Join)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("hook", HOOKS[:2])
@pytest.mark.parametrize("divide", [True, False])
def test_gradients_that_were_reduced_before_the_block(hook: str, divide: bool) -> None:
    # The first block ends within a window.
    def windows(loop: Loop, number: int) -> None:
        loop.backward(number)
        if number % 2:
            loop.step()
            loop.zero()

    def later(loop: Loop, number: int) -> None:
        windows(loop, number + 3)

    for numbers in ([0, 3], [3, 0], [1, 4]):
        uneven = Uneven([3, 3], hook, divide_by_initial=divide)
        compare(uneven, windows, Join)
        uneven.lengths = numbers
        held = [param.grad for param in uneven.plain_model.parameters()]
        assert all(grad is not None for grad in held)
        compare(uneven, later, Join)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("divide", [True, False])
def test_gradients_that_are_never_zero_and_then_accumulated(divide: bool) -> None:
    def never_zero(loop: Loop, number: int) -> None:
        loop.backward(number)
        loop.step()

    def windows(loop: Loop, number: int) -> None:
        loop.backward(number + 10, reduces=number % 2 == 1)
        if number % 2:
            loop.step()

    uneven = Uneven([3, 3], "none", divide_by_initial=divide)
    compare(uneven, never_zero, Join)
    uneven.lengths = [1, 4]
    compare(uneven, windows, Join)


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
@pytest.mark.parametrize("numbers", [[4, 4], [2, 5], [5, 0]], ids=str)
def test_adversaries_of_which_one_is_frozen_meanwhile(rank: int, hook: str, numbers: list[int]) -> None:
    def generator() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(40, 20), nn.Tanh(), nn.Linear(20, 20))

    def critic() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))

    made, judged = (Uneven(numbers, hook, model=model) for model in (generator, critic))

    def losses(make: nn.Module, judge: nn.Module, number: int, of: int, *, of_critic: bool) -> torch.Tensor:
        batch = inputs(number, of)
        if of_critic:
            result: torch.Tensor = judge(torch.cat([batch[:, :20], 1 - make(batch).detach()])).square().mean()
        else:
            result = judge(make(batch)).square().mean()
        return result

    with Join([made.ddp, judged.ddp, made.optimizer, judged.optimizer]):
        for number in range(numbers[rank]):
            judged.optimizer.zero_grad()
            losses(made.ddp.module, judged.ddp, number, rank, of_critic=True).backward()
            judged.optimizer.step()
            judged.ddp.requires_grad_(False)
            made.optimizer.zero_grad()
            losses(made.ddp, judged.ddp, number, rank, of_critic=False).backward()
            made.optimizer.step()
            judged.ddp.requires_grad_(True)
    for number in range(max(numbers)):
        for of_critic, part in ((True, judged), (False, made)):
            part.plain.zero_grad()
            for other in range(2):
                if number < numbers[other]:
                    loss = losses(made.plain_model, judged.plain_model, number, other, of_critic=of_critic)
                    for param in part.plain_model.parameters():
                        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                    params = list(part.plain_model.parameters())
                    for param, grad in zip(params, torch.autograd.grad(loss / 2, params), strict=True):
                        assert param.grad is not None
                        param.grad += grad
            part.plain.step()
    assert max(made.distance(), judged.distance()) < 1e-12


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_several_backwards_of_forwards_under_no_sync(rank: int, hook: str) -> None:
    for numbers in lengths_of(2):
        uneven = Uneven(numbers, hook)
        with Join([uneven.ddp, uneven.optimizer]):
            for number in range(numbers[rank]):
                uneven.optimizer.zero_grad()
                with uneven.ddp.no_sync():
                    losses = [uneven.loss(uneven.ddp, inputs(number + more, rank)) for more in (0, 50)]
                    for loss in losses:
                        loss.backward()
                uneven.loss(uneven.ddp, inputs(number + 90, rank)).backward()
                uneven.optimizer.step()

        def script(loop: Loop, number: int) -> None:
            loop.zero()
            for more in (0, 50):
                loop.backward(number + more, reduces=False)
            loop.backward(number + 90)
            loop.step()

        refer(uneven, script)
        assert uneven.distance() < 1e-12


@pytest.mark.ranks(2, backend="gloo")
def test_a_forward_behind_the_step_at_the_end_of_each_iteration(rank: int) -> None:
    for numbers in ([3, 3], [2, 4]):
        uneven = Uneven(numbers, "none")

        def script(loop: Loop, number: int) -> None:
            usual(loop, number)
            loop.forward(number + 50)

        compare(uneven, script, Join)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=str)
@EVERY_HOOK
def test_a_rank_that_has_few_batches_in_each_of_several_blocks(hook: str, options: dict[str, bool]) -> None:
    uneven = Uneven([1, 4], hook, ddp=options)
    for numbers in ([1, 4], [0, 3], [3, 1], [0, 2]):
        uneven.lengths = numbers
        compare(uneven, usual, Join)


@pytest.mark.ranks(2, backend="gloo")
@EVERY_HOOK
def test_a_window_that_is_set_to_zero_in_place_while_ranks_have_data(hook: str) -> None:
    def script(loop: Loop, number: int) -> None:
        loop.backward(number)
        loop.step()
        loop.zero(to_none=False)
        loop.backward(number + 50, reduces=False)
        loop.zero(to_none=number % 2 == 0)

    for numbers in lengths_of(2):
        compare(Uneven(numbers, hook), script, Join)


class TwoLosses(nn.Module):
    """Returns an output, and keeps a loss that is made of another one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out, self.other = nn.Linear(40, 5), nn.Linear(40, 5)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.loss = self.other(batch).square().mean() + self.out(batch).square().mean()
        result: torch.Tensor = self.out(batch)
        return result


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("divide", [True, False])
def test_a_loss_that_does_not_go_through_the_output(divide: bool) -> None:
    for numbers in ([3, 6], [6, 2], [2, 2]):
        uneven = Uneven(numbers, "none", model=TwoLosses, loss=kept, divide_by_initial=divide)
        compare(uneven, usual, Join)


@pytest.mark.ranks(2, backend="gloo")
def test_outputs_of_the_block_are_used_behind_it(rank: int) -> None:
    uneven = Uneven([3, 3], "none", model=lambda: nn.Linear(40, 5))
    batch = inputs(9, rank)
    with Join([uneven.ddp, uneven.optimizer]):
        for number in range(3):
            uneven.optimizer.zero_grad()
            uneven.loss(uneven.ddp, inputs(number, rank)).backward()
            uneven.optimizer.step()
        with uneven.ddp.no_sync():
            output = uneven.ddp(batch)
    uneven.optimizer.zero_grad()
    # It needs none of the weights, which DDP has brought from one of the last ranks.
    output.sum().backward()
    assert torch.equal(uneven.ddp.module.bias.grad, torch.full((5,), 8.0, dtype=torch.float64))
    assert all(not param._backward_hooks for param in uneven.ddp.parameters())
