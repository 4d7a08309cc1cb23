"""What stepping toy tensors together and apart tells of an optimizer."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from zeroshard import OptimizerCheck, check_optimizer
from zeroshard.plan.optimizer_check import _STEPS

Step = Callable[["Toy", list[nn.Parameter], Any], None]


class Toy(optim.Optimizer):
    """Calls a function to step."""

    def __init__(self, params: Any, step_with: Step, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.step_with, self.steps = step_with, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        self.step_with(self, self.param_groups[0]["params"], closure)


def descend(params: list[nn.Parameter], factor: Any = 0.01) -> None:
    for param in params:
        param.data -= factor * param.grad  # type: ignore[operator]


def norm_of(params: list[nn.Parameter]) -> torch.Tensor:
    return torch.stack([param.grad.norm() for param in params]).norm()  # type: ignore[union-attr]


def clip(self: Toy, params: list[nn.Parameter], closure: Any) -> None:
    descend(params, 0.01 / norm_of(params))


def clip_late(self: Toy, params: list[nn.Parameter], closure: Any) -> None:
    descend(params, 0.01 / norm_of(params) if self.steps == _STEPS else 0.01)


def clip_large(self: Toy, params: list[nn.Parameter], closure: Any) -> None:
    descend(params, 1e-6 / norm_of(params) if norm_of(params) > 500 else 1e-6)


def follow_a_direction(self: Toy, params: list[nn.Parameter], closure: Any) -> None:
    """Makes larger steps for all tensors, once a tensor's gradients have gone in one direction for long."""
    for param in params:
        self.state[param]["sum"] = self.state[param].get("sum", 0) + param.grad / param.grad.norm()  # type: ignore[union-attr, operator]
    descend(params, 1e-5 * (len(params) if self.state[params[0]]["sum"].norm() > 35 else 1))


def sharpen(self: Toy, params: list[nn.Parameter], closure: Any) -> None:
    with torch.no_grad():
        for param in params:
            param += 0.5
        closure()
        for param in params:
            param -= 0.5
    descend(params)


def by_itself(self: Toy, params: list[nn.Parameter], closure: Any) -> None:
    for param in params:
        descend([param], 0.01 / norm_of([param]))


def with_noise(self: Toy, params: list[nn.Parameter], closure: Any) -> None:
    for param in params:
        param.data += torch.randn_like(param)


def with_a_generator(self: Toy, params: list[nn.Parameter], closure: Any) -> None:
    generator = torch.Generator()
    for param in params:
        param.data += torch.rand(param.shape, generator=generator)


def now_and_then(self: Toy, params: list[nn.Parameter], closure: Any) -> None:
    if random.random() < 0.5:
        descend(params)


def round_otherwise(self: Toy, params: list[nn.Parameter], closure: Any) -> None:
    descend(params)
    for param in params:
        param.data *= 1 + torch.finfo(param.dtype).eps * (len(params) == 1)


def do_nothing(self: Toy, params: list[nn.Parameter], closure: Any) -> None: ...


def explode(self: Toy, params: list[nn.Parameter], closure: Any) -> None:
    descend(params, float("inf"))


def want_a_closure(self: Toy, params: list[nn.Parameter], closure: Any) -> None:
    if closure is None:
        raise RuntimeError("this one wants a closure\nand says so in two lines")
    descend(params, 0.01 * closure())


def always_raise(self: Toy, params: list[nn.Parameter], closure: Any) -> None:
    raise RuntimeError("not without a closure" if closure is None else "never")


@pytest.mark.parametrize(
    ("step_with", "verdict", "first_step"),
    [
        (by_itself, "equal", None),
        (want_a_closure, "equal", None),
        (clip, "coupled", 1),
        (clip_late, "coupled", _STEPS),
        (clip_large, "coupled", 1),
        (follow_a_direction, "coupled", None),
        (sharpen, "coupled", 1),
        (with_noise, "draws random numbers", None),
        (with_a_generator, "draws random numbers", None),
        (now_and_then, "draws random numbers", None),
    ],
)
def test_a_verdict(step_with: Step, verdict: str, first_step: int | None) -> None:
    found = check_optimizer(Toy, step_with=step_with)
    assert found.verdict == verdict, found
    assert (found.first_step is not None) == (verdict == "coupled")
    assert first_step in (None, found.first_step)


@pytest.mark.parametrize(
    ("step_with", "reason"),
    [
        (do_nothing, "in 50 steps no tensor took a value that is new and finite"),
        (explode, "in 50 steps no tensor took a value that is new and finite"),
        (always_raise, "RuntimeError: not without a closure"),
    ],
)
def test_what_cannot_be_told_has_a_reason(step_with: Step, reason: str) -> None:
    assert check_optimizer(Toy, step_with=step_with) == OptimizerCheck("cannot tell", None, reason)


def test_rounding_is_no_coupling() -> None:
    assert check_optimizer(Toy, step_with=round_otherwise) == OptimizerCheck("equal", None, "but for rounding")


def test_arguments_and_tensors_are_those_given() -> None:
    seen: list[Any] = []

    def note(self: Toy, params: list[nn.Parameter], closure: Any) -> None:
        seen.extend((tuple(param.shape), param.dtype, self.defaults["lr"]) for param in params)
        descend(params)

    given = [torch.zeros((), dtype=torch.float64), torch.zeros(2, 3, dtype=torch.bfloat16)]
    assert check_optimizer(Toy, given, step_with=note, lr=0.25).verdict == "equal"
    assert set(seen) == {((), torch.float64, 0.25), ((2, 3), torch.bfloat16, 0.25)}
    assert not any(tensor.any() for tensor in given)


def test_one_tensor_cannot_be_coupled() -> None:
    with pytest.raises(ValueError, match="two tensors or more, which may be coupled, but it has 1"):
        check_optimizer(optim.SGD, [torch.zeros(1)])


def test_random_generators_are_left_as_they_were() -> None:
    before = torch.get_rng_state(), random.getstate()
    check_optimizer(Toy, step_with=with_noise)
    check_optimizer(Toy, step_with=always_raise)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


def test_nothing_is_compiled_in_it_but_is_again_afterwards() -> None:
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph

    @torch.compile(backend=backend)
    def moved(values: torch.Tensor) -> torch.Tensor:
        return values - 0.01

    def compile_it(self: Toy, params: list[nn.Parameter], closure: Any) -> None:
        for param in params:
            param.data.copy_(moved(param.detach()))

    assert check_optimizer(Toy, step_with=compile_it).verdict == "equal"
    assert not compiled
    moved(torch.ones(2))
    assert compiled


def test_one_that_has_modes_is_put_into_training() -> None:
    class InModes(Toy):
        trains = False

        def train(self) -> None:
            self.trains = True

    def step(self: Any, params: list[nn.Parameter], closure: Any) -> None:
        assert self.trains
        descend(params)

    assert check_optimizer(InModes, step_with=step).verdict == "equal"


def test_toy_tensors_lie_on_the_cpu_whatever_the_default_device() -> None:
    with torch.device("meta"):
        assert check_optimizer(optim.SGD).verdict == "equal"
