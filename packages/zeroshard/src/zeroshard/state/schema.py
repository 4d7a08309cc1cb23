"""Which state entries an optimizer class keeps per tensor, and whether what is loaded has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import optim
from zeroshard_core import StateEntry, TensorSpec, probe

from zeroshard.local.extra_state import ADVICE
from zeroshard.plan.eligibility import class_of, is_elementwise
from zeroshard.plan.groups import hyperparameters_of
from zeroshard.plan.layout import Policy
from zeroshard.state.placeholder import StatePlaceholder

_STATEFUL: dict[str, Any] = {"momentum": 0.9, "amsgrad": True, "centered": True}
"""Hyperparameters of torch's optimizers that may be off, at values with which the optimizer keeps all its state."""
_MAY_BE_SPARSE = frozenset({"momentum_buffer"})
"""Entries that have the layout of the gradient."""


class StateSchema:
    """Which state an optimizer class keeps, by its hyperparameters and the shape and dtype of a tensor.

    Known for elementwise classes and torch.optim; other classes are not checked, nor are classes that cannot be probed.
    """

    def __init__(self, policy: Policy, defaults: Mapping[str, Any]) -> None:
        self._build = lambda params, **group: policy.factory([{**group, "params": params}], **defaults)
        self._applies = is_elementwise(policy.factory, declared=policy.elementwise)
        self._applies |= class_of(policy.factory) in vars(optim).values()
        self._known: dict[str, dict[tuple[tuple[int, ...], torch.dtype], Mapping[str, StateEntry] | None]] = {}

    def check(self, entries: Mapping[str, Any], spec: TensorSpec, group: Mapping[str, Any], where: str) -> None:
        """Raise a ValueError that names an entry of a tensor that is missing, extra or misshapen."""
        required = self._entries(group, spec)
        if required is None:
            return
        # Some state outlives the setting that it belongs to: SGD keeps its buffers when momentum becomes 0.
        switched_on = {key: value for key, value in _STATEFUL.items() if key in group}
        allowed = {**(self._entries({**group, **switched_on}, spec) or {}), **required}
        missing = sorted(required.keys() - entries.keys())
        extra = sorted(str(key) for key, value in entries.items() if key not in allowed and value is not None)
        if missing or extra:
            what = f"missing entry {missing[0]!r}" if missing else f"extra entry {extra[0]!r}"
            advice = f"; to take it, {ADVICE[extra[0]]}" if extra and extra[0] in ADVICE and not missing else ""
            raise ValueError(f"{where}: {what}; expected the entries {sorted(required)}{advice}")
        for key, entry in allowed.items():
            value: Any = entries.get(key)
            if entry.shape is None or (value is None and key not in required):
                continue
            is_tensor = isinstance(value, torch.Tensor)
            found = f"has shape {tuple(value.shape)}" if is_tensor else f"is a {type(value).__name__}"
            if not entry.shape:
                fits = value.numel() == 1 if is_tensor else isinstance(value, (int, float))
                wanted = "a single number"
            else:
                fits, wanted = is_tensor and value.shape == entry.shape, f"{entry.shape}" if is_tensor else "a tensor"
            is_known = key in _MAY_BE_SPARSE or isinstance(value, StatePlaceholder)
            if fits and spec.shape and entry.shape == spec.shape and value.layout != torch.strided and not is_known:
                fits, found, wanted = False, f"is a {value.layout} tensor", "torch.strided"
            if not fits:
                raise ValueError(f"{where}: entry {key!r} {found}, expected {wanted}")

    def _entries(self, group: Mapping[str, Any], spec: TensorSpec) -> Mapping[str, StateEntry] | None:
        """The entries for a tensor; None if nothing is known."""
        if not self._applies:
            return None
        settings = hyperparameters_of(group)
        known = self._known.setdefault(repr(sorted((key, repr(value)) for key, value in settings.items())), {})
        key = (spec.shape, spec.dtype)
        if key not in known:
            try:
                known[key] = probe(self._build, settings, [spec])[key]
            except Exception:  # noqa: BLE001 - an unsupported class may raise any exception
                known[key] = None
        return known[key]
