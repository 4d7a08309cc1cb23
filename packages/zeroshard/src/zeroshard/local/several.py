"""Presents local optimizers of several classes as one, with the public order of groups and the state of all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import optim

from zeroshard.plan.groups import ParamGroup, pack_groups


class JoinedState(MutableMapping[Any, Any]):
    """The state of several optimizers, by parameter. Each keeps a dict of its own, which it may look through."""

    def __init__(self, members: Sequence[optim.Optimizer]) -> None:
        self._members = members

    def _of(self, key: object) -> MutableMapping[Any, Any]:
        """Return the state that has a key, or would have it."""
        for member in self._members:
            if key in member.state:
                return member.state
        # Search the parameters only for a new key.
        for member in self._members:
            if any(key is param for group in member.param_groups for param in group["params"]):
                return member.state
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return any(key in member.state for member in self._members)

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401 - state holds anything
        return self._of(key)[key]

    def __setitem__(self, key: Any, value: Any) -> None:  # noqa: ANN401 - state holds anything
        self._of(key)[key] = value

    def __delitem__(self, key: Any) -> None:  # noqa: ANN401 - state holds anything
        del self._of(key)[key]

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable([*member.state] for member in self._members)

    def __len__(self) -> int:
        return sum(len(member.state) for member in self._members)

    def get(self, key: Any, default: Any = None) -> Any:  # noqa: ANN401 - state holds anything
        """Return the value of a key, or ``default``; adds nothing."""
        return next((member.state[key] for member in self._members if key in member.state), default)

    def pop(self, key: Any, *default: Any) -> Any:  # noqa: ANN401 - state holds anything
        """Remove and return the value of a key, or return ``default``."""
        return self._of(key).pop(key, *default)


class SeveralOptimizers:
    """Has what :class:`~zeroshard.local.optimizer.LocalOptimizer` and the modules of state use of one optimizer.

    Args:
        members: the optimizers.
        assignment: for each group, the number of the member that has it.

    Attributes:
        defaults: the defaults of the first member that all members have.
    """

    def __init__(self, members: Sequence[optim.Optimizer], assignment: Sequence[int]) -> None:
        self._members, self._assignment = members, assignment
        first, *others = members
        self.defaults = {
            key: value for key, value in first.defaults.items() if all(key in other.defaults for other in others)
        }
        self._state = JoinedState(members)
        self._checked: list[int] = []

    @property
    def state(self) -> MutableMapping[Any, Any]:
        """The state of all members. Assigning it sets each member's part."""
        return self._state

    @state.setter
    def state(self, state: Mapping[Any, Any]) -> None:
        for member in self._members:
            own = [param for group in member.param_groups for param in group["params"] if param in state]
            member.state = defaultdict(dict, {param: state[param] for param in own})

    def check_keys(self) -> None:
        """Raise a RuntimeError if a member keeps state of no parameter, because a checkpoint could not say whose."""
        counts = [len(member.state) for member in self._members]
        if counts == self._checked:
            return
        for member in self._members:
            for key in member.state:
                if not isinstance(key, torch.Tensor):
                    raise RuntimeError(
                        f"{type(member).__name__} keeps state under the key {key!r}, which belongs to no parameter: "
                        f"that is not supported with several optimizer classes"
                    )
        self._checked = counts

    @property
    def param_groups(self) -> list[ParamGroup]:
        """The members' groups, in the order of the public ones; replacing them replaces the members'."""
        rest = [iter(member.param_groups) for member in self._members]
        return [next(rest[number]) for number in self._assignment]

    @param_groups.setter
    def param_groups(self, groups: Sequence[ParamGroup]) -> None:
        for number, member in enumerate(self._members):
            pairs = zip(groups, self._assignment, strict=True)
            member.param_groups = [group for group, own in pairs if own == number]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let each member load its groups and their state."""
        state, groups = state_dict["state"], state_dict["param_groups"]
        for number, member in enumerate(self._members):
            own = [group for group, owner in zip(groups, self._assignment, strict=True) if owner == number]
            places = [place for group in own for place in group["params"]]
            part = {position: state[place] for position, place in enumerate(places) if place in state}
            member.load_state_dict({"state": part, "param_groups": pack_groups(own)})

    def __getattr__(self, name: str) -> Callable[[], Any]:
        """Return ``train`` or ``eval`` of all members that have it."""
        found = [getattr(member, name) for member in vars(self).get("_members", ()) if hasattr(member, name)]
        if name not in ("train", "eval") or not found:
            raise AttributeError(f"no local optimizer has {name!r}")

        def call_all() -> None:
            for call in found:
                call()

        return call_all
