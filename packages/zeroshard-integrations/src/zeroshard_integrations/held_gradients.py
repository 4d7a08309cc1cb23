"""What has become of a model's gradients between two backwards: kept, dropped, or changed.

A rank that has run out of data has the gradients of the last backward, and contributes them to the next if the others
add to theirs. Whether they do is seen where they are, without a call that would tell: from the identity of the tensors
in ``.grad``, and from their version counters, which every write in place increments.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from operator import attrgetter, is_, is_not

import torch
from zeroshard.handover import is_nonzero

from zeroshard_integrations.announcements import Held

_grad_of, _version_of, _is_there = attrgetter("grad"), attrgetter("_version"), partial(is_not, None)


class HeldGradients:
    """Remembers the gradients of some parameters, and compares. It keeps none of them alive.

    Args:
        params: the parameters.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = params
        self.record()

    def record(self) -> None:
        """Remember what there is."""
        grads = [*map(_grad_of, self._params)]
        self._places = [*map(_is_there, grads)]
        held = [*filter(_is_there, grads)]
        self._refs, self._versions = [*map(weakref.ref, held)], [*map(_version_of, held)]

    def are_gone(self) -> bool:
        """Whether all of them are None; cheap, and says nothing of zeros."""
        return not any(map(_is_there, map(_grad_of, self._params)))

    def now(self) -> Held:
        """Tell what has become of them since :meth:`record`. Values are read only if something has."""
        grads = [*map(_grad_of, self._params)]
        held = [*filter(_is_there, grads)]
        if (
            [*map(_is_there, grads)] == self._places
            and all(map(is_, [ref() for ref in self._refs], held))
            and [*map(_version_of, held)] == self._versions
        ):
            return Held.KEPT
        return Held.CHANGED if is_nonzero(held) else Held.DROPPED

    def are_finite(self) -> bool:
        """Whether there is neither an infinity nor a NaN among their values."""
        held = [*filter(_is_there, map(_grad_of, self._params))]
        return all(bool((grad._values() if grad.is_sparse else grad).isfinite().all()) for grad in held)
