"""``train()`` and ``eval()`` of the local optimizer: schedule-free optimizers exchange averages for parameters there.

Each rank calls its local optimizer's method; the parameters and groups that it has changed are sent to all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from zeroshard_comm import agreed

from zeroshard._torch_private import version_of
from zeroshard.local.optimizer import sync_groups
from zeroshard.plan.groups import hyperparameters_of
from zeroshard.plan.hyperparameters import settings_of
from zeroshard.state.serialization import PLAIN, receive_value, send_value

if TYPE_CHECKING:
    from zeroshard.engine import Engine


def call_on_all_ranks(engine: Engine, name: str) -> Any:  # noqa: ANN401 - what the local optimizer's returns
    """Call ``train`` or ``eval`` of the local optimizer; replicas are equal even after an error. Collective."""
    coordinator, inner = engine.coordinator, engine.local.optim
    with agreed(coordinator, f"{name}()") as proposal:
        layout = engine.update_layout()
        proposal.set(layout.config)
    engine.adopt(layout)
    engine.hyperparameters.update(engine.groups)
    last, engine.last_mode = engine.last_mode, ""
    before = _versions(engine)
    with agreed(coordinator, f"the end of {name}()"):
        try:
            result = getattr(inner, name)()
            engine.last_mode = name
        finally:
            engine.local.masters.round()
            # Frameworks call train() before every batch. Writes to ``.data`` are not seen.
            is_alike = last == name == engine.last_mode and before == _versions(engine)
            if coordinator.agree(f"what {name}() has changed", flag=not is_alike) and not coordinator.is_single_rank:
                engine.broadcast_params()
                _send_groups(engine)
            sync_groups(inner.param_groups, engine.groups)
            engine.hyperparameters.record_written(engine.groups)
    return result


def _versions(engine: Engine) -> object:
    """A value that differs if something was changed."""
    local = engine.local
    versions = [version_of(shard.tensor) for shard in local.shards.values()]
    return versions, settings_of(local.optim.param_groups, {}, in_step=True)


def _send_groups(engine: Engine) -> None:
    """Send what an owner's optimizer wrote to a group, e.g. train_mode, to ranks without parameters of it."""
    coordinator, plan = engine.coordinator, engine.layout.plan
    rank, owners = coordinator.ranks.rank, defaultdict[int, set[int]](set)
    for spec, ranks in zip(plan.tensors, plan.owners, strict=True):
        owners[spec.group].update(ranks)
    for number, owning in sorted(owners.items()):
        group = engine.local.optim.param_groups[number]
        if rank == min(owning):
            written = {key: value for key, value in hyperparameters_of(group).items() if isinstance(value, PLAIN)}
            for peer in set(coordinator.ranks.peers) - owning:
                send_value(coordinator, peer, written)
        elif rank not in owning:
            group.update(receive_value(coordinator, min(owning)))
