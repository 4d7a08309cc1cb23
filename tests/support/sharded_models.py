"""Models and loops that use autograd in many ways; `sharded_training` trains them beside one process.

A model says what happens before an iteration, and which backwards are in it. The sharded training runs this on every
rank with that rank's data. The reference runs it in one process, once for each rank, and averages the gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, optim
from torch.autograd.graph import save_on_cpu
from torch.func import functional_call
from torch.nn.functional import linear
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import cached
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Named = list[tuple[str, nn.Parameter]]
Add = Callable[[Named], None]
"""Adds a group to the optimizer."""


@dataclass
class Rank:
    """One iteration on one rank.

    Attributes:
        model, call: the model, and what is called in its place, as the compiled one.
        rank, number: the rank, and the number of the iteration.
        no_sync: a context in which backwards are not reduced.
    """

    model: Any
    call: Callable[..., Any]
    rank: int
    number: int
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext

    def batch(self, micro: int = 0) -> torch.Tensor:
        """Return the batch of this rank, iteration and micro-batch; no two batches are equal."""
        generator = torch.Generator().manual_seed(1000 * self.number + 100 * micro + self.rank)
        return torch.randn(6, 12, dtype=torch.float64, generator=generator)

    def output(self, micro: int = 0) -> Any:
        return self.call(self.batch(micro))

    def loss(self, micro: int = 0) -> torch.Tensor:
        loss: torch.Tensor = self.output(micro).square().mean()
        return loss


class Plain(nn.Module):
    """Three layers, one forward and one backward in each iteration.

    Attributes:
        rank, number: those of the iteration that runs; the training sets them.
        is_exact: whether gradients are added in the order of the reference, so that two ranks are bitwise equal to it.
        bound: the largest relative difference where they are not.
        zeroes: whether gradients are set to zero after a step, and not to None.
        ends_itself: whether a backward ends before it returns. If not, only the optimizer can clip.
        optimizes_all: whether the optimizer has frozen parameters too.
    """

    is_exact = ends_itself = optimizes_all = True
    zeroes = False
    bound = 1e-12
    rank = number = 0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 64), nn.Linear(64, 64), nn.Linear(64, 12)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.b(torch.tanh(self.a(x))))

    def forward(self, x: torch.Tensor) -> Any:
        return self.c(self.hidden(x))

    def begin(self) -> None:
        """Prepare the model before the optimizer is built."""

    def called(self) -> Callable[..., Any]:
        """Return what the loop calls."""
        return self

    def prepare(self, number: int, add: Add) -> None:
        """Change the model before an iteration; ``add`` adds a group to the optimizer."""

    def backward(self, on: Rank) -> None:
        """Make the backwards of an iteration."""
        on.loss().backward()


# ---------------------------------------------------------------------- backwards of several kinds


def twice(on: Rank) -> None:
    """Make two synchronized backwards: the owner adds the second mean, where the reference adds sums of ranks."""
    on.loss(0).backward()
    on.loss(1).backward()


def local_first(on: Rank) -> None:
    """Accumulate under no_sync() twice, and reduce the sum."""
    with on.no_sync():
        on.loss(0).backward()
        on.loss(1).backward()
    on.loss(2).backward()


def in_turn(on: Rank) -> None:
    """Accumulate and reduce in turn: a backward under no_sync() adds to what is reduced already."""
    for micro in range(4):
        with on.no_sync() if micro % 2 == 0 and micro else nullcontext():
            on.loss(micro).backward()


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


# ---------------------------------------------------------------------- which parameters have gradients


class Unused(Plain):
    """Other branches on other ranks; one that no rank uses, one only sometimes."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(12, 12) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x) + self.branches[self.rank](x)
        return y + self.branches[4](x) if self.number % 2 and self.rank == 0 else y


class OnOneRank(Plain):
    """Most of the model is used by one rank, and not always by the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.a(x))
        return self.c(torch.tanh(self.b(y))) if self.rank == self.number % 2 else y


class OnlyLocal(Unused):
    """Some gradients come from backwards under no_sync() alone."""

    def backward(self, on: Rank) -> None:
        with on.no_sync():
            on.loss(0).backward()
        on.loss(1).backward(inputs=[self.a.weight])


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.c.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(self.hidden(x), self.c.weight.t(), self.c.bias)


class Repeated(Plain):
    """A layer that is called several times in one forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.b(self.hidden(x))))))


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.b.weight.requires_grad_(False)
        self.c.bias.requires_grad_(False)


class FrozenAndNotOptimized(Frozen):
    optimizes_all = False


class FreezesAndUnfreezes(Plain):
    """Layers are frozen and unfrozen between iterations."""

    def prepare(self, number: int, add: Add) -> None:
        self.b.requires_grad_(number not in (1, 2))
        self.a.requires_grad_(number != 2)


class FreezesBetween(Plain):
    """A layer is frozen between two backwards, and keeps the gradient of the first."""

    is_exact = False

    def backward(self, on: Rank) -> None:
        on.loss(0).backward()
        self.b.requires_grad_(False)
        on.loss(1).backward()
        self.b.requires_grad_(True)


class BeginsFrozen(Plain):
    """A layer that is frozen first. The first backward after it was unfrozen goes through a part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.b.requires_grad_(False)

    def prepare(self, number: int, add: Add) -> None:
        self.b.requires_grad_(number >= 2)

    def backward(self, on: Rank) -> None:
        (self.hidden(on.batch()).square().mean() if on.number == 2 else on.loss()).backward()


class LoRA(Plain):
    """Adapters over a frozen model; the optimizer has the adapters alone."""

    optimizes_all = False

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        sizes = (64, 4), (4, 64), (12, 40), (40, 12)
        self.down, self.up, self.down2, self.up2 = (nn.Linear(*size, bias=False) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.a(x))
        return self.c(torch.tanh(self.b(y) + self.up(self.down(y)))) + self.up2(self.down2(x))


class AddsFrozen(Plain):
    """Parameters that the model had frozen are unfrozen, and added to the optimizer."""

    optimizes_all = False

    def __init__(self) -> None:
        super().__init__()
        self.b.requires_grad_(False)

    def prepare(self, number: int, add: Add) -> None:
        if number == 2:
            self.b.requires_grad_(True)
            add(list(self.b.named_parameters("b")))


class AddsNew(Plain):
    """A layer is added to the model, and to the optimizer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.hidden(x)
        return self.c(self.d(y) if "d" in self._modules else y)

    def prepare(self, number: int, add: Add) -> None:
        if number == 2:
            torch.manual_seed(5)
            self.d = nn.Linear(64, 64).double()
            add(list(self.d.named_parameters("d")))


class BatchNorm(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.norm(torch.tanh(self.a(x))))


class EvalBatchNorm(BatchNorm):
    """The outputs depend on buffers, of which all ranks have rank 0's."""

    def backward(self, on: Rank) -> None:
        on.output(3)
        self.eval()
        on.loss(0).backward()
        self.train()


# ---------------------------------------------------------------------- checkpoints of activations


class Checkpointed(Plain):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(checkpoint(lambda y: torch.tanh(self.b(torch.tanh(y))), self.a(x), use_reentrant=self.reentrant))


class Reentrant(Checkpointed):
    reentrant = True


class ReentrantShared(Plain):
    """A parameter in two reentrant segments: its hook is called twice in one backward."""

    is_exact = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def segment(y: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.b(y))

        y = checkpoint(segment, torch.tanh(self.a(x)), use_reentrant=True)
        return self.c(checkpoint(segment, y, use_reentrant=True))


class ReentrantAll(Plain):
    """All of the model in one reentrant segment: no hook is called in the outer backward."""

    ends_itself = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: self.c(self.hidden(y)), x.requires_grad_(), use_reentrant=True)


class ReentrantOutside(Plain):
    """The loop calls the model in a reentrant segment of its own."""

    ends_itself = False

    def backward(self, on: Rank) -> None:
        checkpoint(on.call, on.batch().requires_grad_(), use_reentrant=True).square().mean().backward()


class CheckpointedOutside(Plain):
    def backward(self, on: Rank) -> None:
        checkpoint(on.call, on.batch(), use_reentrant=False).square().mean().backward()


class ReentrantNested(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(y: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.b(y))

        def outer(y: torch.Tensor) -> torch.Tensor:
            return torch.tanh(checkpoint(inner, torch.tanh(self.a(y)), use_reentrant=True))

        return self.c(checkpoint(outer, x.requires_grad_(), use_reentrant=True))


class MixedCheckpoints(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(lambda y: torch.tanh(self.a(y)), x.requires_grad_(), use_reentrant=True)
        y = checkpoint(lambda y: torch.tanh(self.b(y)), y, use_reentrant=False)
        return checkpoint(self.c, y, use_reentrant=True)


def _policy(_: object, op: object, *__: object, **___: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


class SelectiveCheckpoint(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def contexts() -> Any:
            return create_selective_checkpoint_contexts(_policy)

        with save_on_cpu():
            x = x + 0.1 * self.c(self.hidden(x))
        return self.c(checkpoint(self.hidden, x, use_reentrant=False, context_fn=contexts))


# ---------------------------------------------------------------------- how gradients lie in memory


class Aliased(Plain):
    """Parameters, small ones and ones that are buckets of their own, whose gradients are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.v = nn.Parameter(torch.randn(12)), nn.Parameter(torch.randn(12))
        self.w, self.x = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.hidden(x) @ (self.w + self.x)) * (self.u.view(12) + self.v.view(12))

    def backward(self, on: Rank) -> None:
        # Plain PyTorch adds a second gradient to the memory of both parameters, twice.
        on.loss().backward()


class _Halves(torch.autograd.Function):
    """Returns gradients that are halves of one storage."""

    @staticmethod
    def forward(ctx: Any, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return u * 2 + v

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.stack([grad * 2, grad])
        return both[0], both[1]


class HalvesOfOneStorage(Aliased):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.hidden(x) @ _Halves.apply(self.w, self.x)) * _Halves.apply(self.u, self.v)


class Expanded(Plain):
    """A gradient that is expanded, as of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.randn(64, 64))

    def backward(self, on: Rank) -> None:
        (on.loss() + self.u.sum() * (1 + on.rank) + self.b.weight.t().sum()).backward()


class ManyVectors(Plain):
    """Neighbours in a bucket of one owner, which travel as one range, and parameters of one element and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.ones(n, 64)) for n in (1, 6, 1, 1, 4, 3, 1, 8)])
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.hidden(x)
        for rows in self.rows:
            y = y * rows.mean(0)
        return self.c(y) * self.scale + self.empty.sum()


class TwoDtypes(Plain):
    bound = 1e-6

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(64, 64)

    def double(self) -> TwoDtypes:
        super().double().middle.float()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.middle(self.hidden(x).float()).double())


class ChannelsLast(Plain):
    """A convolution in channels_last, and parameters that are dense and permuted."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 64, 3), nn.Linear(64, 12)
        self.to(memory_format=torch.channels_last)
        self.a.weight = nn.Parameter(self.a.weight.detach().t().contiguous().t())
        self.cube = nn.Parameter(torch.randn(3, 4, 12).permute(2, 0, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.last(self.conv(x.view(-1, 3, 2, 2).repeat(1, 1, 2, 2)).mean((2, 3)))
        return y + super().forward(x) + (x @ self.cube.flatten(1) @ self.cube.flatten(1).t())


# ---------------------------------------------------------------------- outputs


class DictOutput(Plain):
    def forward(self, x: torch.Tensor) -> Any:
        return {"loss": super().forward(x).square().mean(), "nested": [{"x": x}, "text", None]}

    def backward(self, on: Rank) -> None:
        on.output()["loss"].backward()


@dataclass
class _Output:
    loss: torch.Tensor
    others: tuple[Any, ...] = ()


class DataclassOutput(Plain):
    def forward(self, x: torch.Tensor) -> Any:
        return _Output(super().forward(x).square().mean(), (x,))

    def backward(self, on: Rank) -> None:
        on.output().loss.backward()


class OpaqueOutput(Plain):
    """An output in which no tensor is found: the backward begins with the first parameter."""

    def forward(self, x: torch.Tensor) -> Any:
        return lambda: self.c(self.hidden(x))

    def backward(self, on: Rank) -> None:
        on.output()().square().mean().backward()


class ParameterOutput(Plain):
    """An output that is a parameter, and one that is an input."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.b.weight, x

    def backward(self, on: Rank) -> None:
        y, weight, _ = on.output()
        (y.square().mean() + weight.square().sum()).backward()


# ---------------------------------------------------------------------- copies, and other forwards of the model


class DeepCopied(Plain):
    """Copies of the model are trained and averaged in between, and their gradients stay their own."""

    def backward(self, on: Rank) -> None:
        copied, average, loss = copy.deepcopy(self), optim.swa_utils.AveragedModel(self), on.loss()
        copied(on.batch(1)).square().mean().backward()
        loss.backward()
        assert type(copied.b.weight.grad) is torch.Tensor
        average.update_parameters(self)
        with torch.no_grad():
            average(on.batch(1))


class CalledByFunction(Plain):
    """functional_call with the model's own parameters, or with functions of them."""

    def backward(self, on: Rank) -> None:
        params = {name: param * 2 if on.number % 2 else param for name, param in self.named_parameters()}
        functional_call(self, params, on.batch()).square().mean().backward()


class CalledByFunctionOfOthers(Plain):
    """functional_call with parameters of a teacher between forward and backward."""

    def backward(self, on: Rank) -> None:
        loss = on.loss()
        teacher = {name: param.detach() * 0.5 for name, param in self.named_parameters()}
        with torch.no_grad():
            wanted = functional_call(self, teacher, on.batch(1))
        (loss + (on.output(1) - wanted).square().mean()).backward()


class FunctionalGrad(Plain):
    """torch.func.grad and vmap of the model between forward and backward."""

    def backward(self, on: Rank) -> None:
        def loss_of(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = functional_call(self, params, x[None]).square().mean()
            return loss

        loss, params = on.loss(), {name: param.detach() for name, param in self.named_parameters()}
        grads = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(params, on.batch(1))
        assert grads["b.weight"].shape == (6, 64, 64)
        loss.backward()


class Parametrized(Plain):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.a)
        parametrizations.weight_norm(self.b)

    def backward(self, on: Rank) -> None:
        with cached():
            on.loss().backward()


# ---------------------------------------------------------------------- compiled


class CompiledModel(Plain):
    def called(self) -> Callable[..., Any]:
        torch._dynamo.reset()
        return torch.compile(self, backend="aot_eager")


class CompiledBlocks(Plain):
    def called(self) -> Callable[..., Any]:
        torch._dynamo.reset()
        for child in self.children():
            child.compile(backend="aot_eager")
        return self


class CompiledLoss(Plain):
    """A compiled function calls the model and computes the loss."""

    def called(self) -> Callable[..., Any]:
        torch._dynamo.reset()
        return torch.compile(lambda x: self(x).square().mean(), backend="aot_eager")

    def backward(self, on: Rank) -> None:
        on.output().backward()


MODELS = tuple(found for found in [*vars().values()] if isinstance(found, type) and issubclass(found, Plain))
