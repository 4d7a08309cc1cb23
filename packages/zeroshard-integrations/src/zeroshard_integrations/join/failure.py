"""How a rank that fails in a Join block tells the others, wherever they are."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch.distributed as dist
from zeroshard.joining.attendance import Call
from zeroshard_comm import PeerLostError

from zeroshard_integrations.join.announcements import Announcement, Held, Kind, Status
from zeroshard_integrations.join.backward_watch import Phase
from zeroshard_integrations.join.block import JoinBlock
from zeroshard_integrations.join.call_order import Made


def fail(block: JoinBlock, error: Exception) -> None:
    """Tell the others of this rank's error.

    Args:
        block: of this rank.
        error: which it is going to raise.

    Raises:
        RuntimeError: if another rank has failed before, and this one has lost it because of that.
    """
    block.is_shadow = True
    block.note.leave(error)
    try:
        if _is_lost(error) or any(model.watch.phase is Phase.BACKWARD for model in block.models.values()):
            # Messages may be under way that nobody waits for. The others find the note.
            _blame(block, error)
            return
        try:
            _tell(block, error)
        except PeerLostError:
            _blame(block, error)
    finally:
        block.is_shadow = False
        del error


def early_leaving(block: JoinBlock) -> Exception | None:
    """Return what is wrong, if this rank has left its loop in the middle of an iteration, or cannot shadow the others.

    While all ranks have data, a backward or step that the others make next is not announced: they would wait in it.

    Args:
        block: of this rank.
    """
    for model in block.models.values():
        problem = model.problem()
        if problem is not None:
            return problem
    last = block.order.last
    if block.joined or last is None:
        return None
    following = block.order.expected()
    if following:
        missing: Made | None = following[0]
    elif last.kind is Kind.FORWARD and last.reduces:
        missing = Made(Kind.BACKWARD, last.joinable, reduces=True)
    else:
        missing = next((Made(Kind.CALL, place, Call.STEP) for place in block.steps if _awaits_step(block, place)), None)
    if missing is None or missing.kind is Kind.FORWARD:
        return None
    if missing.kind is Kind.BACKWARD:
        return RuntimeError(
            "this rank has left the Join block behind a forward whose backward() is missing, as with break inside an "
            "iteration: leave the loop before the forward or behind the step, or compute what is not to be trained "
            "under torch.no_grad()"
        )
    if missing.joinable in block.steps and block.has_announcers and _awaits_step(block, missing.joinable):
        return RuntimeError(
            "this rank has left the Join block behind a backward() whose step() is missing, as with break inside an "
            "iteration: leave the loop behind the step, or set gradients to zero where a step is left out"
        )
    return None


def _awaits_step(block: JoinBlock, place: int) -> bool:
    """Whether the others are going to step an optimizer that this rank has not stepped behind its last backward.

    Not in windows, which may be incomplete; not if gradients are gone, or not finite, so that steps are left out.
    """
    return not block.steps[place].steps_in_backward and any(
        model.awaits_step
        and not model.has_windows
        and model.held.now() not in (Held.NONE, Held.ZERO)
        and (model.takes_buckets or model.held.are_finite())
        for model in block.models_of[place]
    )


def _tell(block: JoinBlock, error: Exception) -> None:
    """Come to where the others can be told, and tell them.

    Raises:
        PeerLostError: if a rank is gone.
    """
    for come in (block.answered, lambda: _finish_iteration(block, error)):
        try:
            if not block.is_told:
                come()
        except PeerLostError:
            raise
        except Exception:  # noqa: BLE001, S110 - others have errors of their own; this rank keeps the one it has
            pass
    if not block.is_told:
        block.is_told = True
        block.board.post(Announcement(Status.FAILED))
        block.board.answers()
        block.control.inconsistency("leaving Join", error=error)


def _blame(block: JoinBlock, error: Exception) -> None:
    """Raise, if a rank has failed before this one has lost it."""
    first = block.note.read()
    if first is not None and first[0] != block.rank:
        raise RuntimeError(f"rank {first[0]} has failed inside the Join block: {first[1]}") from error


def _finish_iteration(block: JoinBlock, error: Exception) -> None:
    """Make the calls with the others that they make before they can be told, as far as that is known."""
    if block.joined or _is_known_to_all(block):
        # Where somebody has run out, all calls are announced.
        return
    for made in _expected(block):
        hook = block.steps.get(made.joinable)
        if made.kind is Kind.BACKWARD:
            if made.reduces:
                block.models[made.joinable].shadow_backward(block.running)
                block.models[made.joinable].end_backward()
        elif made.kind is not Kind.CALL or hook is None or not block.has_announcers:
            return
        elif made.call is not None:
            # Raises.
            hook.report(error, made.call)


def _is_known_to_all(block: JoinBlock) -> bool:
    """Whether the error has left a call in which all ranks have raised it."""
    last = block.order.last
    hook = block.steps.get(last.joinable) if last is not None and last.kind is Kind.CALL else None
    return hook is not None and hook.calling is not None


def _expected(block: JoinBlock) -> Sequence[Made]:
    """The calls that the others make next, as this rank did the last time, or as any loop does the first time."""
    found = block.order.expected()
    called = block.order.places
    if found or not called or any(place not in called for place in block.models):
        return found
    backwards = [
        Made(Kind.BACKWARD, place, reduces=model.reduces)
        for place, model in block.models.items()
        if model.watch.phase is Phase.FORWARD
    ]
    steps = [
        Made(Kind.CALL, place, Call.STEP)
        for place, hook in block.steps.items()
        if place not in called and not hook.steps_in_backward and all(model.reduces for model in block.models_of[place])
    ]
    return [*backwards, *steps]


def _is_lost(error: Exception) -> bool:
    """Whether an error is that of a backend: another rank is gone, or has not come."""
    # gloo raises what its sources' macros write: the file, and what has happened.
    return isinstance(error, (PeerLostError, dist.DistError)) or (
        isinstance(error, RuntimeError) and re.match(r"\[\S*gloo/\S+:\d+\]", str(error)) is not None
    )
