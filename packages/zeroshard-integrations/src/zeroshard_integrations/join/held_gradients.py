"""What has become of a model's gradients between two backwards: kept, dropped, or changed.

A rank that has run out of data has the gradients of the last backward, and contributes them to the next if the others
add to theirs. Whether they do is seen where they are, without a call that would tell: from the identity of the tensors
in ``.grad``, and from their version counters, which writes in place increment. Those through ``.data`` do not; of them,
only that all are zero is seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from operator import attrgetter, is_, is_not

import torch
from zeroshard._torch_private import sparse_values, version_of
from zeroshard.joining.handover import is_nonzero

from zeroshard_integrations.join.announcements import Held

_grad_of, _is_there = attrgetter("grad"), partial(is_not, None)


class HeldGradients:
    """Remembers the gradients of some parameters, and compares. It keeps none of them alive.

    Args:
        params: the parameters.
        at_owners: whether a communication hook keeps the values, so that they are not in ``.grad``.
    """

    def __init__(self, params: Sequence[torch.Tensor], *, at_owners: bool) -> None:
        self._params, self._at_owners = params, at_owners
        self._expected: tuple[Held, frozenset[int]] = Held.KEPT, frozenset()
        self.record()

    def record(self) -> None:
        """Remember what there is."""
        grads = [*map(_grad_of, self._params)]
        self._places = [*map(_is_there, grads)]
        held = [*filter(_is_there, grads)]
        self._refs, self._versions = [*map(weakref.ref, held)], [*map(version_of, held)]
        self._before, self._gone, self._is_rebuilt = Held.KEPT, frozenset[int](), False
        self._is_known = True

    def forget(self) -> None:
        """As :meth:`record`, for less: gradients that are there the next time are taken for changed."""
        self._is_known = self._is_rebuilt = False

    def expect_rebuild(self) -> None:
        """Look at what there is before DDP may exchange the tensors in ``.grad`` for views of new buckets."""
        now = self.now()
        self._expected = now, frozenset[int].union(*self.gone()) if self._at_owners else frozenset[int]()

    def rebuilt(self) -> None:
        """Take note that it has."""
        self.record()
        (self._before, self._gone), self._is_rebuilt = self._expected, True

    def are_none(self) -> bool:
        """Whether all of them are None; cheap, and says nothing of zeros."""
        return not any(map(_is_there, map(_grad_of, self._params)))

    def now(self) -> Held:
        """Tell what has become of them since :meth:`record`; behind :meth:`forget`, what is there counts as changed.

        Reads values until it finds one that is not zero.
        """
        held = [*filter(_is_there, map(_grad_of, self._params))]
        untouched = self._are_untouched()
        if untouched and (not held or self._before is not Held.KEPT):
            return self._before
        if not held:
            return Held.NONE
        # Also of those that seem untouched: writes through `.data` increment no version.
        if not (untouched and self._at_owners) and not is_nonzero(held):
            return Held.ZERO
        return Held.KEPT if untouched else Held.CHANGED

    def gone(self) -> tuple[frozenset[int], frozenset[int]]:
        """Return the indices of those that are None, and of those that are zero.

        Raises:
            RuntimeError: if that cannot be told.
        """
        grads = [*map(_grad_of, self._params)]
        none = frozenset([index for index, grad in enumerate(grads) if grad is None])
        if not (self._is_rebuilt and self._at_owners):
            held = [(index, grad) for index, grad in enumerate(grads) if grad is not None]
            return none, frozenset([index for index, grad in held if not is_nonzero([grad])])
        if not self._are_untouched() and not none:
            raise RuntimeError(
                "gradients were written to between the forward in which DistributedDataParallel rebuilds its buckets "
                "and its backward, and a rank has run out of data: set them to None, or before the forward"
            )
        # Views of new buckets: values are there at owners alone, so that zeros mean nothing.
        return none, self._gone - none

    def are_finite(self) -> bool:
        """Whether there is neither an infinity nor a NaN among their values."""
        held = [*filter(_is_there, map(_grad_of, self._params))]
        return all(bool((sparse_values(grad) if grad.is_sparse else grad).isfinite().all()) for grad in held)

    def _are_untouched(self) -> bool:
        if not self._is_known:
            return False
        grads = [*map(_grad_of, self._params)]
        held = [*filter(_is_there, grads)]
        return (
            [*map(_is_there, grads)] == self._places
            and all(map(is_, [ref() for ref in self._refs], held))
            and [*map(version_of, held)] == self._versions
        )
