"""Models with unusual forwards: checkpoints of activations, outputs of all kinds, copies, and compiled ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from support.sharded_model import Plain, Rank
from torch import optim
from torch.autograd.graph import save_on_cpu
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import cached
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

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
