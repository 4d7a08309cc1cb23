"""Parameters that ranks with data have changed since a step, brought to those that have run out."""

from __future__ import annotations

import zlib

from zeroshard.joining.attendance import Attendance, Call
from zeroshard.joining.fingerprint import fingerprint
from zeroshard.joining.handover import give_parameters, take_parameters
from zeroshard.memory import lies_flat
from zeroshard.sharding import Sharding


def bring_parameters(sharding: Sharding, attendance: Attendance) -> None:
    """Let ranks that have run out have the parameters of the others, if these have changed theirs since a step.

    Weights are clipped, or normalized, by training loops; nothing tells of it. Collective.

    Args:
        sharding: of the optimizer.
        attendance: who has run out.
    """
    if not attendance.joined or attendance.call not in (Call.STEP, Call.BACKWARD):
        return
    control, rank = sharding.control, sharding.control.ranks.rank
    active = zip(sharding.params, sharding.layout.active, strict=True)
    params = [param for param, is_active in active if is_active and lies_flat(param)]
    # One of another dtype or shape has been converted, which the step itself tells of.
    forms = zlib.crc32(repr([(param.dtype, param.shape) for param in params]).encode())
    told = control.all_gather_ints([forms, fingerprint(params)], "a step inside Join")
    form, print_ = told[attendance.giver]
    stale = [peer for peer in attendance.joined if told[peer][0] == form and told[peer][1] != print_]
    if stale and rank == attendance.giver:
        give_parameters(control, stale, params)
    elif rank in stale:
        take_parameters(control, attendance.giver, params)
