"""Noticing where a model's forwards and backwards are, on the thread that trains.

A backward is noticed where its first gradient comes, before it is added to anything: ``torch.autograd.grad`` is none,
which adds nothing, and what a model returns need not be known. Its end is that of the outermost task of autograd, which
hooks of the model's output tell of: activation checkpointing runs tasks inside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from operator import attrgetter

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

_requires_grad = attrgetter("requires_grad")


class Phase(Enum):
    """Where a rank is with a model."""

    IDLE = "no backward is due"
    FORWARD = "a forward has begun, its backward has not"
    BACKWARD = "in backward"


class BackwardWatch:
    """Watches one model.

    Args:
        module: the model itself, not its wrapper: hooks of a wrapper do not see calls of its ``forward``.
        params: whose gradients are watched.
        behind_forward: called behind the module's forward.
        begins: called before the first gradient of the backward of a forward is added.
        ends: called at the end of a backward, with whether it was that of a forward that was expected.
        settled: called behind that, when callbacks of autograd of two further generations have been called: those of
            DDP, which write gradients, and those of communication hooks, which follow them.

    Attributes:
        phase: where this rank is.
    """

    def __init__(
        self,
        module: nn.Module,
        params: Sequence[torch.Tensor],
        *,
        behind_forward: Callable[[], None],
        begins: Callable[[], None],
        ends: Callable[[bool], None],
        settled: Callable[[], None],
    ) -> None:
        self._params, self._behind_forward = params, behind_forward
        self._begins, self._ends, self._settled = begins, ends, settled
        self.phase = Phase.IDLE
        self._is_called = self._is_followed = self._has_begun = False
        self._on_module = module.register_forward_hook(self._after_forward)
        self._on_params: list[RemovableHandle] = []
        self._trained: list[bool] = []

    def leave(self) -> None:
        """Stop watching; safe to call repeatedly."""
        for handle in (self._on_module, *self._on_params):
            handle.remove()

    def expect(self, *, with_grad: bool) -> None:
        """Expect the module's forward to be called.

        Args:
            with_grad: whether a backward may follow.
        """
        self._is_called = True
        if with_grad:
            self.phase = Phase.FORWARD
            # Whatever an exception has left.
            self._is_followed = self._has_begun = False
            trained = [*map(_requires_grad, self._params)]
            if trained != self._trained:
                self._watch_params(trained)

    def _watch_params(self, trained: list[bool]) -> None:
        for handle in self._on_params:
            handle.remove()
        self._trained = trained
        self._on_params = [p.register_hook(self._first_gradient) for p in self._params if p.requires_grad]

    def _after_forward(self, module: nn.Module, inputs: object, output: object) -> None:  # noqa: ARG002 - torch's signature
        if not self._is_called:
            # Somebody has called the module without its wrapper.
            return
        self._is_called = False
        self._behind_forward()
        if torch.is_grad_enabled():
            for tensor in _tensors(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._reached)

    def _reached(self, gradient: torch.Tensor) -> None:  # noqa: ARG002 - torch's signature
        if not self._is_followed:
            self._is_followed = True
            torch.autograd.Variable._execution_engine.queue_callback(self._task_ends)

    def _first_gradient(self, gradient: torch.Tensor) -> None:
        if self._has_begun:
            return
        self._reached(gradient)
        self._has_begun = True
        if self.phase is Phase.FORWARD:
            self.phase = Phase.BACKWARD
            try:
                self._begins()
            except BaseException:
                # Nothing is under way.
                self.phase, self._has_begun = Phase.IDLE, False
                raise

    def _task_ends(self) -> None:
        self._is_followed = False
        if not self._has_begun:
            return
        of_forward = self.phase is Phase.BACKWARD
        self.phase, self._has_begun = Phase.IDLE, False
        self._ends(of_forward)
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(self._settled))


def _tensors(output: object) -> Iterator[torch.Tensor]:
    """The tensors in what a model returned."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for item in output.values():
            yield from _tensors(item)
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from _tensors(item)
    elif hasattr(output, "__dataclass_fields__"):
        for name in output.__dataclass_fields__:
            yield from _tensors(getattr(output, name))
