"""Noticing where a model's forwards and backwards are, on the thread that trains.

A backward is noticed at the model's output, if autograd is about to add to the gradients of its parameters then:
``torch.autograd.grad`` adds to none. Where that cannot be seen, since a model returns what nobody knows, or
checkpointing hides parameters in tasks of autograd of their own, and where it must be known in what order models come,
it is noticed at the first gradient, by hooks of all parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from operator import attrgetter

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from zeroshard_integrations._torch_private import queue_callback, will_execute

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
        begins: called when a backward of a forward that was expected begins; behind :meth:`watch_params`, directly
            before its first gradient is added.
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
        self._is_called = self._is_followed = self._has_begun = self._has_left = False
        self._on_module = module.register_forward_hook(self._after_forward)
        self._on_params: list[RemovableHandle] = []
        self._trained: list[bool] = []
        self._watches_params = False
        self._nodes: list[Node | None] = [None] * len(params)

    def leave(self) -> None:
        """Stop watching; safe to call repeatedly. Hooks of outputs stay, and do nothing."""
        self._has_left = True
        for handle in (self._on_module, *self._on_params):
            handle.remove()

    def expect(self, *, with_grad: bool) -> None:
        """Expect the module's forward to be called.

        Args:
            with_grad: whether a backward may follow.
        """
        self._is_called = True
        if with_grad:
            if self.phase is Phase.FORWARD:
                # The last one had no backward that was noticed: perhaps it was of something that is not returned.
                self.watch_params()
            self.phase = Phase.FORWARD
            # Whatever an exception has left.
            self._is_followed = self._has_begun = False
            if self._watches_params:
                self.watch_params()

    def watch_params(self) -> None:
        """Notice all further backwards at their first gradients."""
        self._watches_params = True
        trained = [*map(_requires_grad, self._params)]
        if trained != self._trained:
            for handle in self._on_params:
                handle.remove()
            self._trained = trained
            self._on_params = [p.register_hook(partial(self._gradient_of, p)) for p in self._params if p.requires_grad]

    def _after_forward(self, module: nn.Module, inputs: object, output: object) -> None:  # noqa: ARG002 - torch's signature
        if not self._is_called:
            # Somebody has called the module without its wrapper.
            return
        self._is_called = False
        self._behind_forward()
        if not torch.is_grad_enabled():
            return
        found = list(_tensors(output))
        known = [tensor for tensor in found if tensor is not None and tensor.grad_fn is not None]
        for tensor in known:
            tensor.register_hook(self._reached)
        if not known or None in found:
            self.watch_params()

    def _reached(self, gradient: torch.Tensor) -> None:  # noqa: ARG002 - torch's signature
        if self._has_left:
            return
        self._follow()
        if self._watches_params or self._has_begun:
            return
        if any(map(_is_due, self._adders())):
            self._begin()
        else:
            self.watch_params()

    def _adders(self) -> Iterator[Node]:
        """What adds to the gradients of parameters, in autograd's graph."""
        for place, param in enumerate(self._params):
            if param.requires_grad:
                node = self._nodes[place] = self._nodes[place] or get_gradient_edge(param).node
                yield node

    def _follow(self) -> None:
        if not self._is_followed:
            self._is_followed = True
            queue_callback(self._task_ends)

    def _gradient_of(self, param: torch.Tensor, gradient: torch.Tensor) -> None:  # noqa: ARG002 - torch's signature
        # `torch.autograd.grad` with respect to a parameter calls its hooks, too.
        if not self._has_begun and _is_due(get_gradient_edge(param).node):
            self._follow()
            self._begin()

    def _begin(self) -> None:
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
        if not self._has_begun or self._has_left:
            return
        of_forward = self.phase is Phase.BACKWARD
        self.phase, self._has_begun = Phase.IDLE, False
        self._ends(of_forward)
        queue_callback(lambda: queue_callback(self._settled))


def _is_due(adder: Node) -> bool:
    """Whether autograd is about to add to a gradient, as far as it tells."""
    try:
        return will_execute(adder)
    except RuntimeError:
        # Not of a parameter to which `torch.autograd.grad` differentiates.
        return False


_WITHOUT_TENSORS = (int, float, complex, str, bytes, type(None))


def _tensors(output: object) -> Iterator[torch.Tensor | None]:
    """The tensors in what a model returned, and None for each part that may have some inside."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, _WITHOUT_TENSORS):
        return
    elif isinstance(output, Mapping):
        for item in output.values():
            yield from _tensors(item)
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from _tensors(item)
    elif hasattr(output, "__dataclass_fields__"):
        for name in output.__dataclass_fields__:
            yield from _tensors(getattr(output, name))
    else:
        yield None
