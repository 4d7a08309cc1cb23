"""Holds the state of every gradient that is sent in buckets. Only :class:`GradTable` changes it.

Reductions, placeholders and clipping write the values, which lie in buckets. The entry of a gradient is a pair:
``reduced``, which is equal on all ranks between backwards, and ``local``, the values that this rank has added since and
no backward has reduced. The thread that runs backward and the thread that trains call methods; the thread that finishes
reductions never does.

``param.grad`` belongs to the training loop, which may set it to None or assign another tensor at any time. The table
compares its entries with it when a backward begins and before a step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter, is_

import torch
from zeroshard_core import Plan

from zeroshard._torch_private import queue_callback
from zeroshard.grads.bucket import OwnedGradients
from zeroshard.grads.norms import GradNorms
from zeroshard.grads.placeholder import GradPlaceholder, Reduced
from zeroshard.local.optimizer import bound_gradients
from zeroshard.local.shard import LocalShard
from zeroshard.plan.layout import label_in

_grad_of = attrgetter("grad")

# Loops over all tensors use these names, because looking up a member of an enum costs more.
_ABSENT, _ZERO, _REDUCING, _REDUCED, _USED = Reduced


@dataclass(frozen=True)
class Advice:
    """The ends of messages, which depend on the source of gradients."""

    held: str
    """What to do if nothing can be added to a reduced gradient."""
    unreduced: str
    """Why a gradient may have values of only one rank, and what to do."""
    used: str = ""
    """What else to do if the gradient of the last step is still there."""


class GradTable:
    """Holds an entry for each parameter, and sets ``param.grad`` to a placeholder when a gradient is reduced.

    Autograd adds only to an entry that is ABSENT (``param.grad`` is then this rank's own tensor) or whose state is
    among ``addable``. Values for any other entry are left out, and that backward raises. (USED, local) cannot occur.
    """

    def __init__(self, norms: GradNorms, addable: Collection[Reduced], advice: Advice) -> None:
        self.norms, self._addable, self._advice = norms, frozenset(addable), advice
        self._params: Sequence[torch.Tensor] = ()
        self._placeholders: list[GradPlaceholder] = []
        self._reduced: list[Reduced] = []
        self._expected: list[GradPlaceholder | None] = []
        """``param.grad`` of each parameter, unless the loop has changed it since the last backward."""
        self._local: dict[int, torch.Tensor] = {}
        """The values that this rank has added to placeholders, and no backward has reduced."""
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._bucket_of: dict[int, OwnedGradients] = {}
        self.left_out = self._to_leave_out = ""
        """Why this backward leaves out values of this rank: from its first bucket on, and before its first bucket."""

    def rebuild(self, params: Sequence[torch.Tensor], plan: Plan) -> None:
        """Make slots for norms, and placeholders for parameters that were added or converted; entries are unchanged."""
        self._params, self._plan = params, plan
        self.norms.rebuild(plan)
        self._placeholders = [GradPlaceholder(p, i, plan.tensors[i].name, self) for i, p in enumerate(params)]
        self._reduced += [_ABSENT] * (len(params) - len(self._reduced))
        self._expected += [None] * (len(params) - len(self._expected))
        for tensor, param in enumerate(params):
            if type(param.grad) is GradPlaceholder:
                self._expected[tensor] = param.grad = self._placeholders[tensor]

    def locate(self, state: OwnedGradients) -> None:
        """Record that the parameters of a bucket are in it; other parameters keep their bucket."""
        self._bucket_of.update(dict.fromkeys(state.tensors, state))

    def reduced(self, tensor: int) -> Reduced:
        """Return the state of a gradient that all ranks know."""
        return self._reduced[tensor]

    def local(self, tensor: int) -> torch.Tensor | None:
        """Return the values that this rank has added and no backward has reduced; None without any."""
        grad = self._params[tensor].grad
        return self._local.get(tensor) if type(grad) is GradPlaceholder else grad

    def steppable(self, tensors: Sequence[int]) -> tuple[bool, ...]:
        """Return for each tensor whether a step uses its gradient, as of the last :meth:`refresh`."""
        reduced = self._reduced
        return tuple([reduced[tensor] is not _ABSENT for tensor in tensors])

    def owned(self, tensor: int) -> torch.Tensor | None:
        """Return this rank's part of a reduced gradient; None if it owns none of it."""
        return self._bucket_of[tensor].owned_gradients().get(tensor)

    def is_grad(self, placeholder: GradPlaceholder) -> bool:
        """Return True if a placeholder is the gradient of its parameter now."""
        return self._params[placeholder._tensor].grad is placeholder

    def assign(self, tensor: int, values: torch.Tensor) -> None:
        """Assign ``param.grad``, which :meth:`refresh` refuses before the next step."""
        self._params[tensor].grad = values

    def changed(self) -> str:
        """Return the name of a tensor whose reduced gradient the loop has removed or set to zero; empty if none."""
        for tensor, (expected, reduced) in enumerate(zip(self._expected, self._reduced, strict=True)):
            if expected is not None and (self._params[tensor].grad is None or reduced is _ZERO):
                return label_in(self._plan, tensor)
        return ""

    def waiting(self) -> str:
        """Return the name of a gradient that was reduced and waits for a step; empty if there is none."""
        found = [tensor for tensor, reduced in enumerate(self._reduced) if reduced is _REDUCED]
        return label_in(self._plan, found[0]) if found else ""

    def begin(self) -> None:
        """Begin a backward, before its first bucket is sent. Set ``left_out`` if it can add nothing to a gradient."""
        self.left_out, self._to_leave_out = self._to_leave_out, ""
        grads = list(map(_grad_of, self._params))
        is_waiting = _REDUCED in self._reduced or _ZERO in self._reduced
        if not is_waiting and GradPlaceholder not in set(map(type, grads)):
            self._reduced, self._expected = [_ABSENT] * len(grads), [None] * len(grads)
            self._local.clear()
            return
        for tensor, grad in enumerate(grads):
            if type(grad) is not GradPlaceholder:
                self.remove(tensor)
            elif self._reduced[tensor] not in self._addable:
                self.left_out = self.left_out or self._why_held(tensor)

    def launch(self, tensors: Sequence[int]) -> None:
        """Mark gradients as REDUCING, before their bucket is sent with the local values."""
        for tensor in tensors:
            self._reduced[tensor] = _REDUCING
            self._local.pop(tensor, None)

    def replace(self, tensors: Sequence[int]) -> None:
        """Set ``param.grad`` to a placeholder unless it is None, because its bucket has the values from now on."""
        for tensor in tensors:
            if self._params[tensor].grad is not None:
                self._expected[tensor] = self._params[tensor].grad = self._placeholders[tensor]

    def lost_in_backward(self, tensors: Sequence[int], are_sent: Sequence[bool]) -> RuntimeError | None:
        """Return the error for a gradient that was sent and whose placeholder a hook has replaced; None if none is."""
        for tensor, is_sent in zip(tensors, are_sent, strict=True):
            if is_sent and self._params[tensor].grad is not self._placeholders[tensor]:
                return RuntimeError(
                    f"a hook has changed .grad of {label_in(self._plan, tensor)} inside of backward(), after its "
                    f"gradient was sent: do that after backward(), or in a tensor hook"
                )
        return None

    def record_reduced(self, state: OwnedGradients, computed: Sequence[bool]) -> None:
        """Put placeholders for gradients that any rank has ``computed``, after all ranks have ended a backward."""
        for tensor, param, is_computed in zip(state.tensors, state.params, computed, strict=True):
            if is_computed:
                self._reduced[tensor] = _REDUCED
                self._expected[tensor] = param.grad = self._placeholders[tensor]
            else:
                self._drop(tensor)

    def add_local(self, tensor: int, values: torch.Tensor) -> None:
        """Add values of this rank to a placeholder, as autograd does; leave them out if it accepts none."""
        if self._reduced[tensor] not in self._addable:
            self._leave_out(tensor)
        elif tensor in self._local:
            self._local[tensor].add_(values)
        else:
            self._local[tensor] = torch.empty_like(self._params[tensor]).copy_(values)

    def copy_local(self, tensor: int, place: torch.Tensor) -> torch.Tensor:
        """Copy the local values, or zeros, to a place in a bucket, as DDP does."""
        if self._reduced[tensor] is not _ZERO:
            self._leave_out(tensor)
        return place.copy_(self._local[tensor]) if tensor in self._local else place.zero_()

    def hide(self) -> None:
        """Set ``param.grad`` to None if it is a placeholder, because DDP would copy it to rebuild its buckets."""
        self._hidden = [(param, param.grad) for param in self._params if type(param.grad) is GradPlaceholder]
        for param, _ in self._hidden:
            param.grad = None

    def show(self) -> None:
        """Undo :meth:`hide`."""
        for param, placeholder in self._hidden:
            if param.grad is None:
                param.grad = placeholder
        self._hidden = []

    def zero(self, tensor: int) -> None:
        """Set a gradient to zero."""
        self._local.pop(tensor, None)
        owned = self.owned(tensor) if tensor in self._bucket_of else None
        if owned is not None:
            owned.zero_()
        self._reduced[tensor] = _ZERO
        self.norms.record(tensor, "zero_()", erases=True)

    def refresh(self) -> None:
        """Mark gradients that the loop has set to None as absent; raise if one has values of only this rank."""
        grads = map(_grad_of, self._params)
        if not self._local and all(map(is_, grads, self._expected)):
            return
        for tensor in self._bucket_of:
            param, reduced = self._params[tensor], self._reduced[tensor]
            if param.grad is None:
                self.remove(tensor)
            elif not isinstance(param.grad, GradPlaceholder) or tensor in self._local or reduced is _ABSENT:
                raise self.unreduced(tensor)
            elif param.grad._tensor != tensor:
                raise RuntimeError(
                    f"the gradient of {label_in(self._plan, tensor)} was replaced by {param.grad!r}, which belongs to "
                    f"another gradient: change gradients in place, or in a tensor hook"
                )

    def remove(self, tensor: int) -> None:
        """Mark a gradient that the loop has removed as absent, and record the removal."""
        # Ranks compare frozen parameters separately.
        if self._reduced[tensor] in (_ZERO, _REDUCED) and self._params[tensor].requires_grad:
            self.norms.record(tensor, "set to None", erases=True)
        self._drop(tensor)

    def _drop(self, tensor: int) -> None:
        self._reduced[tensor], self._expected[tensor] = _ABSENT, None
        self._local.pop(tensor, None)

    def use(self) -> None:
        """Mark reduced gradients as USED when a step begins."""
        self._reduced = [_USED if each is _REDUCED else each for each in self._reduced]

    @contextmanager
    def bound(self, states: Sequence[OwnedGradients], rest: Sequence[LocalShard] = ()) -> Iterator[None]:
        """Set the gradients of this rank's shards to the reduced ones, in the block.

        ``rest`` are shards of parameters that are in no bucket, and are not parameters themselves.
        """
        self.refresh()
        params = [param for state in states for param in state.owned_params]
        before = [param.grad for param in params]
        try:
            for state in states:
                state.set_grads(self.steppable(state.tensors))
            with bound_gradients(rest):
                yield
        finally:
            for param, grad in zip(params, before, strict=True):
                param.grad = grad

    def _leave_out(self, tensor: int) -> None:
        """Record that values for a reduced gradient are left out. A backward without buckets raises this at its end."""
        if not (self._to_leave_out or self.left_out):
            self._to_leave_out = self._why_held(tensor)
            queue_callback(self._raise_left_out)

    def _raise_left_out(self) -> None:
        error, self._to_leave_out = self._to_leave_out, ""
        if error:
            raise RuntimeError(error)

    def _why_held(self, tensor: int) -> str:
        """Return the error for adding to a gradient that was reduced."""
        if self._reduced[tensor] is not _USED:
            why = (
                f"has a gradient that an earlier backward() has reduced, and nothing can be added to it: "
                f"{self._advice.held}"
            )
        else:
            used = self._advice.used
            why = f"still has the gradient of the last step: call optimizer.zero_grad() before backward(){used}"
        return f"{label_in(self._plan, tensor)} {why}"

    def unreduced(self, tensor: int) -> RuntimeError:
        """Return the error for a gradient with values of only this rank."""
        if self._reduced[tensor] is _REDUCED:
            why = (
                "was replaced after backward() had reduced it: .grad or .grad.data was assigned, or made by a backward "
                "under no_sync(). Multiply or clamp the gradient in place, or change it in a tensor hook"
            )
        else:
            why = f"has not been reduced by backward(): {self._advice.unreduced}"
        return RuntimeError(f"the gradient of {label_in(self._plan, tensor)} {why}")
