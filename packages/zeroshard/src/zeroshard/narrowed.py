"""Stepping some pieces of the local optimizer at a time: on a copy of it that is narrowed to them.

The copy shares the inner optimizer's state and has param groups of its own, so nobody ever sees the real ones narrowed.
An optimizer that counts in its param groups (schedule-free ones do) would count once per portion: that is noticed at
the first portion. Its change is not seen by the other portions of the same step, which are stepped from the same values
as the first, and applied once behind them; from the next step on such an optimizer is stepped whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import optim

from zeroshard.local import NOT_SYNCED, LocalOptimizer, Piece, unwrapped_step
from zeroshard.parameters import ParamGroup

_PLAIN = (int, float, str, bool, type(None))


class Portion:
    """Some pieces of a local optimizer, and the copy of the inner optimizer that steps them.

    Made once per plan and bucket. One thread steps it.

    Args:
        local: the local optimizer.
        pieces: those of its pieces that are stepped together; each in place of its parameter, see
            :meth:`LocalOptimizer.set_apart`.
    """

    def __init__(self, local: LocalOptimizer, pieces: Sequence[Piece]) -> None:
        self.pieces = tuple(pieces)
        self._inner = local.optim
        chosen = {piece.tensor for piece in pieces}
        self._groups: list[tuple[int, ParamGroup]] = []
        for number, group in enumerate(self._inner.param_groups):
            members = [tensor for tensor in group["params"] if tensor in chosen]
            if members:
                narrowed: ParamGroup = {"params": members}
                if "param_names" in group:
                    names = zip(group["params"], group["param_names"], strict=True)
                    narrowed["param_names"] = [name for tensor, name in names if tensor in chosen]
                self._groups.append((number, narrowed))
        self._copy: optim.Optimizer = object.__new__(type(self._inner))

    def step(self, arguments: Mapping[str, Any]) -> Change:
        """Step the pieces that have a gradient, with the hyperparameters that the inner optimizer has now.

        Args:
            arguments: keyword arguments of the inner step.

        Returns:
            What the step has written to the groups and to the optimizer itself, for :meth:`Change.apply`.
        """
        if not self._groups:
            return Change()
        inner, copied = self._inner, self._copy
        for number, narrowed in self._groups:
            for key, value in inner.param_groups[number].items():
                if key not in NOT_SYNCED:
                    narrowed[key] = value
        vars(copied).update(vars(inner))
        copied.param_groups = [narrowed for _, narrowed in self._groups]
        # In a thread of our own gradients would be recorded.
        with torch.no_grad():
            unwrapped_step(type(inner))(copied, **arguments)
        return Change(
            {
                number: {
                    key: value
                    for key, value in narrowed.items()
                    if key not in NOT_SYNCED and _differs(value, inner.param_groups[number].get(key, _ABSENT))
                }
                for number, narrowed in self._groups
            },
            {
                key: value
                for key, value in vars(copied).items()
                if key != "param_groups" and _differs(value, vars(inner).get(key, _ABSENT))
            },
        )


class Change:
    """What stepping portions has written beside parameters and state.

    Args:
        groups: by number of the param group, what is new there.
        attributes: what is new in the optimizer itself.
    """

    def __init__(
        self, groups: Mapping[int, Mapping[str, Any]] | None = None, attributes: Mapping[str, Any] | None = None
    ) -> None:
        self._groups = {number: dict(values) for number, values in (groups or {}).items()}
        self._attributes = dict(attributes or {})

    @property
    def counts(self) -> bool:
        """Whether there is anything: the optimizer then keeps counters that all its tensors share."""
        return bool(self._attributes) or any(self._groups.values())

    def join(self, other: Change) -> None:
        """Take in what another portion of the same step has written.

        Raises:
            RuntimeError: if two portions have written different values: they depend on the tensors.
        """
        for number, values in other._groups.items():
            mine = self._groups.setdefault(number, {})
            for key, value in values.items():
                self._check(key, mine.get(key, value), value)
                mine[key] = value
        for key, value in other._attributes.items():
            self._check(key, self._attributes.get(key, value), value)
            self._attributes[key] = value

    def apply(self, inner: optim.Optimizer) -> None:
        """Write it to the inner optimizer, once per step."""
        for number, values in self._groups.items():
            inner.param_groups[number].update(values)
        vars(inner).update(self._attributes)

    def _check(self, key: str, mine: object, other: object) -> None:
        if _differs(mine, other):
            raise RuntimeError(
                f"the optimizer keeps {key!r} for all its tensors together, and it came out as {mine!r} for some of "
                f"them and {other!r} for others: it cannot be stepped bucket by bucket. Use it without a DDP hook"
            )


_ABSENT = object()


def _differs(value: object, before: object) -> bool:
    if value is before:
        return False
    if isinstance(value, _PLAIN) and isinstance(before, _PLAIN):
        # NaN is no change either.
        return value != before and not (value != value and before != before)
    return True


def steps_by_itself(inner: optim.Optimizer) -> bool:
    """Tell whether the inner optimizer's step was replaced on the object, so that it cannot be run on a copy."""
    return "step" in vars(inner)
