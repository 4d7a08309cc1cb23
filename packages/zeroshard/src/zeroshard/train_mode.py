"""``train()`` and ``eval()`` of the local optimizer: schedule-free optimizers exchange averages for parameters there.

Each rank calls its local optimizer's method; the parameters and groups that it has changed are sent to all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from zeroshard_comm import agreed

from zeroshard._torch_private import version_of
from zeroshard.local_optimizer import NOT_SYNCED, sync_groups
from zeroshard.param_groups import settings_of
from zeroshard.sharding import Sharding
from zeroshard.state.serialization import receive_value, send_value

_PLAIN = (bool, int, float, str)


class TrainMode:
    """Calls the local optimizer's train() and eval().

    Args:
        sharding: has the local optimizer.
    """

    def __init__(self, sharding: Sharding) -> None:
        self._sharding, self._last = sharding, ""

    def check(self, name: str) -> None:
        """Raise an AttributeError if the local optimizer has no such method: frameworks use hasattr()."""
        inner = self._sharding.local.optim
        if not callable(getattr(inner, name, None)):
            raise AttributeError(f"the local optimizer, of class {type(inner).__name__}, has no method {name}()")

    def call(self, name: str) -> Any:  # noqa: ANN401 - what the local optimizer's returns
        """Call ``train`` or ``eval``; replicas are equal even after an error. Collective.

        Raises:
            DisagreementError, PeerLostError: if ranks call different methods, or one is gone.
            Exception: an error of any rank, on every rank.
        """
        sharding, groups, control = self._sharding, self._sharding.groups, self._sharding.control
        layout, inner = sharding.layout, sharding.local.optim
        with agreed(control, f"{name}()") as declared:
            layout = sharding.update_layout(groups)
            declared.set(layout.declaration)
        if layout is not sharding.layout:
            sharding.adopt(layout, groups)
        sharding.hyperparameters.follow(groups)
        last, self._last = self._last, ""
        before = self._seen()
        with agreed(control, f"the end of {name}()"):
            try:
                result = getattr(inner, name)()
                self._last = name
            finally:
                sharding.local.masters.round()
                # Frameworks call train() before every batch. Writes to ``.data`` are not seen.
                is_alike = last == name == self._last and before == self._seen()
                if control.agree(f"what {name}() has changed", flag=not is_alike) and not control.is_single_rank:
                    sharding.share_now()
                    self._share_groups()
                sync_groups(inner.param_groups, groups)
                sharding.hyperparameters.written(groups)
        return result

    def _seen(self) -> object:
        """A value that differs if something was changed."""
        local = self._sharding.local
        versions = [version_of(shard.tensor) for shard in local.shards.values()]
        return versions, settings_of(local.optim.param_groups, {}, in_step=True)

    def _share_groups(self) -> None:
        """Send what an owner's optimizer wrote to a group, e.g. train_mode, to ranks without parameters of it."""
        control, plan = self._sharding.control, self._sharding.layout.plan
        rank, owners = control.ranks.rank, defaultdict[int, set[int]](set)
        for spec, ranks in zip(plan.tensors, plan.owners, strict=True):
            owners[spec.group].update(ranks)
        for number, owning in sorted(owners.items()):
            group = self._sharding.local.optim.param_groups[number]
            if rank == min(owning):
                written = {key: group[key] for key in group.keys() - NOT_SYNCED if isinstance(group[key], _PLAIN)}
                for peer in set(control.ranks.peers) - owning:
                    send_value(control, peer, written)
            elif rank not in owning:
                group.update(receive_value(control, min(owning)))
