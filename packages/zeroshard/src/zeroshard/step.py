"""One step: look at the model, agree with the other ranks, update this rank's shards, broadcast them, agree once more.

The order is fixed: this rank looks at its parameters; all ranks agree that they are in the same step of the same
optimizer with the same layout, and that no rank has an error; each updates its shards and broadcasts them; and they
agree that this has succeeded everywhere. :meth:`zeroshard.engine.Engine.apply_step` calls the functions of this module
in that order. A hook that steps each bucket as soon as it is reduced has agreed, updated and broadcast during backward,
in :mod:`zeroshard.grads.exchange`; the step then ends that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.profiler import record_function
from zeroshard_comm import Coordinator, PeerLostError, check_config, explain_configs

from zeroshard.grads.exchange import GradExchange
from zeroshard.local.optimizer import LocalOptimizer
from zeroshard.param_buffers import ParamBroadcast, broadcast_all
from zeroshard.plan.layout import Layout
from zeroshard.state.metadata import StateMetadata


def agree_to_begin(
    coordinator: Coordinator, layout: Layout, exchange: GradExchange | None, error: Exception | None
) -> None:
    """Return if all ranks are about to make the same step, and none has an error. Collective.

    Args:
        coordinator: the channel of the ranks' agreements.
        layout: the layout with which this rank will step.
        exchange: has the checksum of operations on reduced gradients; None without a communication hook.
        error: the error of this rank; None without one.

    Raises:
        DisagreementError: if layouts, or operations on gradients, differ between ranks.
        PeerLostError: if a rank is gone.
        Exception: the error of any rank, on every rank.
    """
    done = None
    if exchange is not None:
        done = {"the checksum of what was done to gradients after backward()": exchange.table.norms.checksum}
    with record_function("zeroshard::agree"):
        check_config(coordinator, "step()", layout.config, error=error, once=done)


def update(
    local: LocalOptimizer, exchange: GradExchange | None, arguments: Mapping[str, Any], *, in_backward: bool
) -> Any:  # noqa: ANN401 - what the inner step returns
    """Update the shards that backward has not updated. Return the result of the local optimizer's step."""
    if exchange is not None and in_backward and local.may_step_in_parts:
        return exchange.step_rest(arguments)
    with record_function("zeroshard::update"):
        return local.step(arguments, exchange.buckets.bind() if exchange is not None else None)


def broadcast_and_agree(
    coordinator: Coordinator,
    broadcasts: Sequence[ParamBroadcast],
    metadata: StateMetadata,
    digest: int | None,
    detail: Callable[[], str],
    failure: Exception | None,
) -> Exception | None:
    """Broadcast all parameters, even after a failure, and return the error of any rank. Collective.

    Args:
        coordinator: the channel of the ranks' agreements.
        broadcasts: the broadcasts of the parameters; some may have been sent during backward.
        metadata: lists the state; ranks exchange it if it has changed on any rank since the last exchange.
        digest: a checksum of this rank's hyperparameters; None agrees with all.
        detail: returns the text of the checksum.
        failure: the error of this rank's update; None without one.

    Returns:
        The error that all ranks raise, after a complete exchange; None if no rank has one.

    Raises:
        PeerLostError: if a rank is gone.
        Exception: an error in the exchange itself, which is left incomplete.
    """
    error, found = failure, None
    try:
        with record_function("zeroshard::broadcast"):
            broadcast_all(broadcasts)
    except PeerLostError as lost:
        error = error or lost
    # Agree even if this rank waits for nothing, because others may still be reading its shards.
    with record_function("zeroshard::agree"):
        try:
            coordinator.agree(
                "the end of step()",
                digest,
                error=error,
                detail=detail,
                explain=explain_configs,
                flag=metadata.has_changed(),
            )
        except PeerLostError:
            raise
        except Exception as raised:  # noqa: BLE001 - the metadata is exchanged before it is raised
            found = raised
    if coordinator.flagged:
        try:
            metadata.exchange("the state after step()")
        except ValueError:
            if found is None:
                raise
    return found
