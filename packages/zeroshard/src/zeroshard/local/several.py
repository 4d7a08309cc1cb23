"""Local optimizers of several classes as one: their groups in the order of the public ones, and one state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import optim

from zeroshard.plan.groups import ParamGroup, pack_groups


class SeveralOptimizers:
    """What :class:`~zeroshard.local.optimizer.LocalOptimizer` and the modules of state use of one optimizer.

    Args:
        members: the optimizers, which share one dict of state from now on.
        assignment: for each group the number of the member that has it.

    Attributes:
        defaults: of the first member, as far as all have them.
    """

    def __init__(self, members: Sequence[optim.Optimizer], assignment: Sequence[int]) -> None:
        self._members, self._assignment = members, assignment
        first, *others = members
        self.defaults = {
            key: value for key, value in first.defaults.items() if all(key in other.defaults for other in others)
        }
        self.state = self._joined()

    @property
    def state(self) -> Any:  # noqa: ANN401 - as torch annotates it
        """The state of all members; replacing it replaces theirs."""
        return self._members[0].state

    @state.setter
    def state(self, state: Any) -> None:  # noqa: ANN401 - as torch annotates it
        for member in self._members:
            member.state = state

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
        others = {key: value for key, value in state.items() if not isinstance(key, int)}
        self.state = self._joined() | others

    def _joined(self) -> Any:  # noqa: ANN401 - as torch annotates it
        joined: defaultdict[Any, Any] = defaultdict(dict)
        for member in self._members:
            joined.update(member.state)
        return joined

    def __getattr__(self, name: str) -> Callable[[], Any]:
        """Return ``train`` or ``eval`` of all members that have it."""
        found = [getattr(member, name) for member in vars(self).get("_members", ()) if hasattr(member, name)]
        if name not in ("train", "eval") or not found:
            raise AttributeError(f"no local optimizer has {name!r}")

        def call_all() -> None:
            for call in found:
                call()

        return call_all
