"""Models whose iterations have backwards of several kinds, and loops, hooks and zero_grad() that change gradients."""

from __future__ import annotations

import torch
from support.sharded_model import Plain, Rank
from torch import nn
from torch.func import functional_call

# ---------------------------------------------------------------------- backwards of several kinds


class PartsInTurn(Plain):
    """Each backward has gradients of other parameters, and one parameter in all of them."""

    is_exact = False

    def backward(self, on: Rank) -> None:
        x = torch.tanh(self.a(on.batch()))
        on.loss(1).backward(inputs=[self.a.weight, self.c.bias])
        x.square().mean().backward()
        on.loss(2).backward(inputs=[self.b.weight, self.a.weight])


class SeveralForwards(Plain):
    """Several forwards before one backward, and one whose output nobody uses."""

    def backward(self, on: Rank) -> None:
        first, second = on.loss(0), on.loss(1)
        on.output(2)
        (first + second).backward()


class ForwardsThenBackwards(Plain):
    """Backwards in another order than forwards, one of them twice through its graph."""

    is_exact = False

    def backward(self, on: Rank) -> None:
        first, second = on.loss(0), on.loss(1)
        second.backward(retain_graph=True)
        first.backward()
        second.backward()


class ForwardsWithoutGradients(Plain):
    """An evaluation on rank 0 alone, before backward and between it and the step."""

    def backward(self, on: Rank) -> None:
        self._evaluate(on)
        on.loss().backward()
        self._evaluate(on)

    def _evaluate(self, on: Rank) -> None:
        if on.rank == 0:
            self.eval()
            with torch.no_grad():
                on.output(5)
            with torch.inference_mode():
                on.output(6)
            self.train()


class InputsOfBackward(Plain):
    """Gradients of some parameters alone; others on each second iteration."""

    def backward(self, on: Rank) -> None:
        on.loss().backward(inputs=[self.a.bias, self.c.weight] if on.number % 2 else [self.b.weight, self.a.weight])


class AutogradGrad(Plain):
    """torch.autograd.grad() begins no backward, before one and after one."""

    def backward(self, on: Rank) -> None:
        loss = on.loss()
        torch.autograd.grad(loss, [self.a.weight, self.c.bias], retain_graph=True)
        loss.backward()
        torch.autograd.grad(on.loss(1), [*self.parameters()])


class GradientPenalty(Plain):
    """The gradient of a norm of gradients, of the input and of parameters."""

    def backward(self, on: Rank) -> None:
        x = on.batch().requires_grad_()
        loss = on.call(x).square().mean()
        grads = torch.autograd.grad(loss, [x, self.b.weight, self.c.weight], create_graph=True)
        (loss + sum(grad.square().sum() for grad in grads)).backward()


class InnerStep(Plain):
    """A step along gradients within the graph, through which the backward goes."""

    def backward(self, on: Rank) -> None:
        weight, bias = torch.autograd.grad(on.loss(1), [self.c.weight, self.c.bias], create_graph=True)
        moved = {"weight": self.c.weight - 0.1 * weight, "bias": self.c.bias - 0.1 * bias}
        functional_call(self.c, moved, self.hidden(on.batch())).square().mean().backward()


class NestedBackward(Plain):
    """A hook of a tensor runs a backward of its own, which adds to the gradients of the same model."""

    is_exact = False

    def backward(self, on: Rank) -> None:
        extra, y = on.loss(1), on.output(0)
        y.register_hook(lambda _: extra.backward())
        y.square().mean().backward()


class LossFromInside(Plain):
    """The loss is computed from tensors inside of the model, and the output takes no part."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inside = self.hidden(x)
        return self.c(self.inside.detach()).detach()

    def backward(self, on: Rank) -> None:
        on.output()
        inside = self.inside
        del self.inside
        (inside.square().mean() + self.c.weight.square().sum()).backward()


class PartOfTheModel(Plain):
    """The loop calls a part of the model, so that hooks of the model see no forward."""

    def backward(self, on: Rank) -> None:
        (self.hidden(on.batch()).square().mean() if on.number % 2 else on.loss()).backward()


class AnotherModel(Plain):
    """A module that is not sharded takes part in the graph."""

    def backward(self, on: Rank) -> None:
        torch.manual_seed(7)
        other = nn.Linear(12, 3).double()
        other(on.output()).square().mean().backward()
        assert type(other.weight.grad) is torch.Tensor


# ---------------------------------------------------------------------- what zero_grad(), hooks and the loop do


class ZeroToZero(Plain):
    zeroes = True


class ZeroToZeroUnused(ZeroToZero):
    """A gradient that was set to zero, and to which nothing is added afterwards, still moves momentum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.a(x))
        return self.c(torch.tanh(self.b(y)) if self.number % 2 == 0 else y)


class Discarded(Plain):
    """A backward whose gradients are set to None before another one."""

    def backward(self, on: Rank) -> None:
        on.loss(1).backward()
        self.zero_grad()
        on.loss(0).backward()


class OneDiscarded(Plain):
    """One gradient is set to None, and the others are added up."""

    is_exact = False

    def backward(self, on: Rank) -> None:
        on.loss(1).backward()
        self.b.weight.grad = None
        on.loss(0).backward()


class TensorHooks(Plain):
    """Hooks of parameters, before they accumulate, change the gradients of this rank."""

    def begin(self) -> None:
        self.a.weight.register_hook(lambda grad: grad * 2)
        self.b.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        self.c.weight.register_hook(torch.zeros_like)


class ModuleHooks(Plain):
    def begin(self) -> None:
        self.b.register_full_backward_hook(lambda _, inputs, __: (inputs[0] * 0.5,))
        self.register_full_backward_pre_hook(lambda _, outputs: (outputs[0] * 2,))


class PostAccumulateHook(Plain):
    """A hook that was registered earlier sees the gradient of this rank, and may write to it."""

    def begin(self) -> None:
        self.b.weight.register_post_accumulate_grad_hook(_halve)

    def backward(self, on: Rank) -> None:
        # After a backward that reduced, the hook would write to the sum of both, and is refused.
        on.loss().backward()


def _halve(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)
