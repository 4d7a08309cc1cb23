"""Which gradients the last step has used, to know what a rank has accumulated when it runs out of data."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from operator import attrgetter, is_not

import torch

from zeroshard._torch_private import version_of

_grad_of, _is_there = attrgetter("grad"), partial(is_not, None)


class SteppedGradients:
    """Remembers gradients, by identity and version, and keeps none of them alive."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[torch.Tensor]] = []
        self._versions: list[int] = []

    def record(self, params: Sequence[torch.Tensor]) -> None:
        """Remember the gradients of parameters, which have been used."""
        grads = [*filter(_is_there, map(_grad_of, params))]
        self._known, self._versions = [*map(weakref.ref, grads)], [*map(version_of, grads)]

    def differ(self, params: Sequence[torch.Tensor]) -> bool:
        """Whether there are other gradients than those."""
        grads = [*filter(_is_there, map(_grad_of, params))]
        if len(grads) != len(self._known):
            return bool(grads)
        same = all(ref() is grad for ref, grad in zip(self._known, grads, strict=True))
        return not same or [*map(version_of, grads)] != self._versions
