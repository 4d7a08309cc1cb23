"""One step: look at the model, agree with the other ranks, update this rank's shards, broadcast them, agree once more.

The order is fixed: this rank looks at its parameters; all ranks agree that they are in the same step of the same
optimizer with the same layout, and that no rank has an error; each updates its shards and broadcasts them; and they
agree that this has succeeded everywhere. A hook that steps each bucket as soon as it is reduced has agreed, updated and
broadcast during backward, in :mod:`zeroshard.grads.exchange`; the step then ends that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.profiler import record_function
from zeroshard_comm import DifferentCallsError, PeerLostError, check_config, explain_configs

from zeroshard.local.optimizer import sync_groups
from zeroshard.param_buffers import broadcast_all
from zeroshard.plan.layout import Layout

if TYPE_CHECKING:
    from zeroshard.engine import Engine
    from zeroshard.grads.exchange import GradExchange


@dataclass(frozen=True, slots=True)
class Seen:
    """What a rank sees before a step.

    Attributes:
        layout: fits the model now.
        error: what is wrong on this rank, if something is.
        is_agreed: whether all ranks have agreed, during backward, to step with the layout that they have.
    """

    layout: Layout
    error: Exception | None = None
    is_agreed: bool = False


def look(engine: Engine, *, in_backward: bool = False) -> Seen:
    """Look at what the user did since the last step. Not collective; an error is returned, to be told to all."""
    try:
        if engine.exchange is not None and not in_backward:
            engine.exchange.check()
        layout = engine.update_layout()
        engine.local.check_gradients()
        if engine.refused:
            raise RuntimeError(engine.refused)
    except Exception as error:  # noqa: BLE001 - every rank must hear of it, whatever it is
        return Seen(engine.layout, error)
    return Seen(layout)


def step(engine: Engine, arguments: Mapping[str, Any], error: Exception | None = None, seen: Seen | None = None) -> Any:  # noqa: ANN401 - what the inner step returns
    """Make a step. Collective.

    Args:
        engine: of the optimizer. Hyperparameters of its groups are handed to the local optimizer and back.
        arguments: keyword arguments of the inner step.
        error: of this rank before the step, which every rank raises.
        seen: what :func:`look` has returned at the begin of the backward that may have stepped some buckets.

    Returns:
        What the inner step returned.

    Raises:
        DisagreementError: if ranks follow different changes of their models, or step with different hyperparameters
            (numbers, strings, lists and dicts of them).
        PeerLostError: if a rank is gone.
        Exception: an error of any rank, on every rank. Replicas are equal then, except parameters that a rank has
            converted or exchanged.
    """
    under_way, coordinator = engine.exchange if seen is not None else None, engine.coordinator
    before = look(engine) if seen is None else seen
    digest, error, failure, result = None, error or before.error, None, None
    try:
        digest = engine.hyperparameters.update(engine.groups)
    except Exception as raised:  # noqa: BLE001 - every rank must hear of it, whatever it is
        error = error or raised
    if not before.is_agreed:
        _agree_to_begin(engine, under_way, before.layout, error)
        error = None
    if coordinator.position is not None:
        coordinator.position = replace(coordinator.position, steps=coordinator.position.steps + 1)
    if engine.exchange is not None:
        engine.exchange.operations.agreed()
    if engine.debugging is not None and seen is None:
        engine.debugging.before_update()
    engine.adopt(before.layout)
    engine.metadata.drop_consolidated()
    try:
        if error is not None:
            raise error
        result = _update(engine, under_way, arguments)
    except Exception as raised:  # noqa: BLE001 - peers wait for this rank's values, and must learn of the error
        failure = raised
    _broadcast(engine, under_way, digest, failure)
    engine.local.masters.record_written()
    sync_groups(engine.local.optim.param_groups, engine.groups)
    engine.hyperparameters.record_written(engine.groups)
    if engine.debugging is not None:
        engine.debugging.after_step()
    return result


def _agree_to_begin(engine: Engine, under_way: GradExchange | None, layout: Layout, error: Exception | None) -> None:
    coordinator, exchange = engine.coordinator, engine.exchange
    done = exchange.operations.to_text if exchange is not None else None
    try:
        with record_function("zeroshard::agree"):
            check_config(coordinator, "step()", layout.config, error=error, once=done)
    except (PeerLostError, DifferentCallsError) as lost:
        if under_way is not None:
            # Messages sent early will not be waited for.
            engine.mark_broken(lost)
        # The others may be lost because of this rank's error, e.g. in collectives of a closure that raised here.
        if error is not None and isinstance(lost, PeerLostError):
            raise error from lost
        raise
    except Exception:
        # A hook may have stepped and sent buckets on some ranks; the others wait for the rest of them.
        if under_way is not None:
            _broadcast(engine, under_way, None, None)
        raise


def _update(engine: Engine, under_way: GradExchange | None, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401 - as the inner step
    local, exchange = engine.local, engine.exchange
    if under_way is not None and local.may_step_in_parts:
        return under_way.step_rest(arguments)
    with record_function("zeroshard::update"):
        return local.step(arguments, exchange.buckets.bind() if exchange is not None else None)


def _broadcast(engine: Engine, under_way: GradExchange | None, digest: int | None, failure: Exception | None) -> None:
    """Broadcast all parameters, even after a failure, and learn whether any rank had an error. Collective.

    Args:
        engine: of the optimizer.
        under_way: has sent some buckets during backward; None if nothing was sent.
        digest: of this rank's hyperparameters; None agrees with all.
        failure: of this rank's update.

    Raises:
        DisagreementError: if ranks have stepped with different hyperparameters.
        PeerLostError: if a rank is gone, and this one's update has not failed.
        Exception: an error of any rank's update, on every rank.
    """
    coordinator, metadata, error, found = engine.coordinator, engine.metadata, failure, None
    broadcasts = [engine.buffers.broadcast] if under_way is None else under_way.broadcasts
    try:
        try:
            with record_function("zeroshard::share"):
                broadcast_all(broadcasts)
        except PeerLostError as lost:
            error = error or lost
        # Even if this rank has nothing to wait for: others may still be reading its shards.
        with record_function("zeroshard::agree"):
            try:
                coordinator.agree(
                    "the end of step()",
                    digest,
                    error=error,
                    detail=engine.to_text,
                    explain=explain_configs,
                    flag=metadata.has_changed(),
                )
            except Exception as raised:  # noqa: BLE001 - the metadata is exchanged before it is raised
                found = raised
        if coordinator.flagged and not isinstance(found, PeerLostError):
            try:
                metadata.exchange("the state after step()")
            except ValueError:
                if found is None:
                    raise
        if found is not None:
            raise found
    except Exception as raised:
        if engine.exchange is not None and (isinstance(raised, PeerLostError) or raised is not found):
            engine.mark_broken(raised)
        if failure is not None and isinstance(raised, PeerLostError):
            raise failure from raised
        raise
