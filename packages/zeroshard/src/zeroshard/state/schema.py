"""Which state entries an optimizer class keeps per tensor, found by stepping it on a few elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import optim
from zeroshard_core import TensorSpec

from zeroshard.local.extra_state import ADVICE
from zeroshard.local.optimizer import NOT_SYNCED, unwrapped_step
from zeroshard.plan.eligibility import class_of, is_elementwise
from zeroshard.plan.layout import Policy
from zeroshard.state.placeholder import StatePlaceholder
from zeroshard.state.serialization import copy_value

_Form = str | tuple[int | None, ...]
"""What a state entry is: one of the words below, or per axis the parameter's axis of its size, None for size 1."""
_NUMBER, _ANYTHING = "a single number", "anything"
_STATEFUL: dict[str, Any] = {"momentum": 0.9, "amsgrad": True, "centered": True}
"""Hyperparameters of torch's optimizers that may be off, at values with which the optimizer keeps all its state."""
_IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")
"""Hyperparameters that choose how a step is computed, and not what it keeps."""
_MAY_BE_SPARSE = frozenset({"momentum_buffer"})
"""Entries that have the layout of the gradient."""
_MOST_AXES = 7
"""A probe with more axes, of 2, 3, 4 ... elements each, would no longer be small."""


class StateSchema:
    """Which state an optimizer class keeps, by its hyperparameters and the number of dimensions of a tensor.

    Known for elementwise classes and torch.optim; other classes are not checked, nor are classes that cannot step a few
    elements.

    Args:
        policy: has the optimizer class.
        defaults: the user's keyword arguments for the class.
    """

    def __init__(self, policy: Policy, defaults: Mapping[str, Any]) -> None:
        self._factory = policy.factory
        self._defaults = {key: value for key, value in defaults.items() if key not in _IMPLEMENTATIONS}
        self._applies = is_elementwise(policy.factory, declared=policy.elementwise)
        self._applies |= class_of(policy.factory) in vars(optim).values()
        self._known: dict[tuple[str, int], dict[str, _Form] | None] = {}

    def check(self, entries: Mapping[str, Any], spec: TensorSpec, group: Mapping[str, Any], where: str) -> None:
        """Check the state of one tensor.

        Args:
            entries: its state.
            spec: the tensor.
            group: the hyperparameters of its group.
            where: names the tensor in errors.

        Raises:
            ValueError: naming the entry that is missing, extra or misshapen.
        """
        axes = len(spec.shape)
        required = self._forms(group, axes)
        if required is None:
            return
        # Some state outlives the setting that it belongs to: SGD keeps its buffers when momentum becomes 0.
        switched_on = {key: value for key, value in _STATEFUL.items() if key in group}
        allowed = {**(self._forms({**group, **switched_on}, axes) or {}), **required}
        missing = sorted(required.keys() - entries.keys())
        extra = sorted(str(key) for key, value in entries.items() if key not in allowed and value is not None)
        if missing or extra:
            what = f"missing entry {missing[0]!r}" if missing else f"extra entry {extra[0]!r}"
            advice = f"; to take it, {ADVICE[extra[0]]}" if extra and extra[0] in ADVICE and not missing else ""
            raise ValueError(f"{where}: {what}; expected the entries {sorted(required)}{advice}")
        for key, form in allowed.items():
            value: Any = entries.get(key)
            if value is None and key not in required:
                continue
            found = (
                f"has shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"is a {type(value).__name__}"
            )
            if isinstance(form, str):
                fits, wanted = form == _ANYTHING or _is_number(value), form
            else:
                shape = tuple(1 if axis is None else spec.shape[axis] for axis in form)
                fits = isinstance(value, torch.Tensor) and value.shape == shape
                wanted = f"{shape}" if isinstance(value, torch.Tensor) else "a tensor"
            is_known = key in _MAY_BE_SPARSE or isinstance(value, StatePlaceholder)
            if fits and form == tuple(range(axes)) and value.layout != torch.strided and not is_known:
                fits, found, wanted = False, f"is a {value.layout} tensor", "torch.strided"
            if not fits:
                raise ValueError(f"{where}: entry {key!r} {found}, expected {wanted}")

    def _forms(self, group: Mapping[str, Any], axes: int) -> dict[str, _Form] | None:
        """Per entry, its form for a tensor of that many axes; None if nothing is known."""
        if not self._applies or axes > _MOST_AXES:
            return None
        attributes = {
            key: value if key not in _IMPLEMENTATIONS else False
            for key, value in group.items()
            if key not in NOT_SYNCED
        }
        known_by = (repr(sorted((key, repr(value)) for key, value in attributes.items())), axes)
        if known_by not in self._known:
            self._known[known_by] = self._probe(attributes, axes)
        return self._known[known_by]

    def _probe(self, attributes: Mapping[str, Any], axes: int) -> dict[str, _Form] | None:
        # Sizes that differ and are not 1, so that an entry's axes can be told from its shape.
        probe = torch.zeros(tuple(range(2, 2 + axes)), requires_grad=True, device="cpu")
        probe.grad = torch.ones_like(probe)
        group = {key: copy_value(value) for key, value in attributes.items()}
        try:
            built = self._factory([{**group, "params": [probe]}], **self._defaults)
            unwrapped_step(type(built))(built)
        except Exception:  # noqa: BLE001 - an unsupported class may raise any exception
            return None
        return {key: _form_of(value, probe) for key, value in built.state[probe].items()}


def _form_of(value: object, probe: torch.Tensor) -> _Form:
    sizes = list(probe.shape)
    if _is_number(value):
        return _NUMBER
    if not isinstance(value, torch.Tensor) or not {1, *sizes}.issuperset(value.shape):
        return _ANYTHING
    return tuple(None if size == 1 else sizes.index(size) for size in value.shape)


def _is_number(value: object) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, (int, float))
