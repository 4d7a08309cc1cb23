"""Writes hyperparameters as text that ranks compare, and knows which of them must be equal on all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import torch

from zeroshard._torch_private import version_of
from zeroshard.plan.groups import MEMBERS


def settings_of(
    groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any], *, first: int = 0, in_step: bool = False
) -> dict[str, str]:
    """Write hyperparameters by :func:`to_text`: ``{"lr of group 0": "0.1"}``. ``first`` is the first group's number."""
    return {
        f"{key} of group {number}": to_text(value, in_step=in_step)
        for number, group in enumerate(groups, first)
        for key, value in {**defaults, **group}.items()
        if key not in MEMBERS
    }


def to_text(value: object, *, in_step: bool = False) -> str:
    """Write a value so that ranks can compare it: values with the same meaning give the same text."""
    # Other objects give only their type, because the text of two ranks' objects may differ. In a step, tensors and
    # containers of such values do so too, because reading a tensor may wait for a device.
    try:
        return _words(value, in_step)
    except TypeError:
        return type(value).__name__


class Hyperparameters:
    """Hyperparameters that must be equal on all ranks, because the user, and not a step, wrote them."""

    def __init__(self) -> None:
        # Excludes values that the inner optimizer writes, which may differ on a rank that owns no tensor of a group.
        self.agreed: dict[str, str] = {}
        self._seen: dict[str, str] = {}
        self._versions: dict[str, list[tuple[int, int, torch.Tensor]]] = {}

    def update(self, groups: Sequence[Mapping[str, Any]]) -> int:
        """Read the user's changes to the public param groups, and return a 32-bit checksum of :attr:`agreed`."""
        now = settings_of(groups, {}, in_step=True)
        if now != self._seen:
            agreed = self.agreed | dict(now.items() - self._seen.items())
            self.agreed = {name: agreed[name] for name in now if name in agreed}
            self._seen, self._versions = now, _versions(groups)
        return zlib.crc32(repr(sorted(self.agreed.items())).encode())

    def record_written(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Record the values that the inner optimizer wrote to the public param groups."""
        self._seen, self._versions = settings_of(groups, {}, in_step=True), _versions(groups)

    def unchanged(self, number: int, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a public param group that are unchanged since the last step, which may have set them."""
        texts, versions = settings_of([group], {}, first=number, in_step=True), _versions([group], first=number)
        names = {key: f"{key} of group {number}" for key in group if key not in MEMBERS}
        return {
            key: group[key]
            for key, name in names.items()
            if texts[name] == self._seen.get(name) and versions[name] == self._versions.get(name)
        }


def _versions(groups: Sequence[Mapping[str, Any]], *, first: int = 0) -> dict[str, list[tuple[int, int, torch.Tensor]]]:
    """List the tensors among hyperparameters with their versions, because in a step they have no text."""
    # The list keeps the tensors alive, so that no other tensor can have the id of one.
    return {
        f"{key} of group {number}": [(id(tensor), version_of(tensor), tensor) for tensor in _tensors(value)]
        for number, group in enumerate(groups, first)
        for key, value in group.items()
        if key not in MEMBERS
    }


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, (list, tuple)) else []


def _words(value: Any, in_step: bool) -> str:  # noqa: ANN401 - a hyperparameter
    if isinstance(value, torch.Tensor) and not in_step:
        if value.numel() != 1 or value.device.type == "meta":
            return f"a tensor of shape {tuple(value.shape)}"
        value = value.item()
    elif hasattr(value, "tolist") and not isinstance(value, (torch.Tensor, type)):
        # Convert NumPy's scalars and arrays to Python's numbers and lists.
        value = value.tolist()
    if isinstance(value, float):
        # Write an integral float as an integer, because 0 and 0.0 mean the same.
        return repr(int(value)) if value.is_integer() else float.__repr__(value)
    if isinstance(value, (int, str, torch.dtype, type(None), Number)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join([_words(part, in_step) for part in value])})"
    if isinstance(value, Mapping):
        parts = [f"{_words(key, in_step)}: {_words(part, in_step)}" for key, part in value.items()]
        return f"{{{', '.join(sorted(parts))}}}"
    if in_step:
        raise TypeError
    return type(value).__name__
