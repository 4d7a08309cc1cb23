"""The table of refusals: says from what a loop does whether it is refused, and by which error."""

from __future__ import annotations

import re
from dataclasses import dataclass

from drawn_loops.loop import LAYERS, STEM, STEPPING, Loop


@dataclass(frozen=True)
class Outcome:
    """What became of a loop: it is ``equal``, ``refused`` by an act, ``differs`` from plain DDP, or is ``other``."""

    kind: str
    act: str = ""
    text: str = ""


@dataclass(frozen=True)
class Row:
    """Why loops are refused, the pattern of the error, and outcomes that are accepted instead until that is settled."""

    name: str
    pattern: str
    others: tuple[str, ...] = ()


USED = Row("with a hook: backward after step() without zero_grad()", "still has the gradient of the last step")
UNREDUCED = Row("with a hook: step() after no_sync()", r"has not been reduced|was replaced after backward\(\)")
STEPS_EARLY = Row("a hook that steps: not backward and step() in turn", r"exactly one backward outside of no_sync\(\)")
# To be refused. Plain DDP rounds the sum of several backwards in another way.
SEVERAL = Row("with a hook: several synchronized backwards", "synchronize only the last backward", ("equal", "differs"))
USED_ELSEWHERE = Row("the first, of an unused or frozen parameter", USED.pattern, ("equal", "differs"))
HIDDEN = Row("the first two, after a rebuild of buckets", f"{USED.pattern}|{UNREDUCED.pattern}", ("equal", "differs"))
# To be allowed.
GROWS = Row("with a hook: more parameters before step()", r"added or unfrozen after a backward\(\)", ("equal",))
OTHERS_STATE = Row("state deleted on ranks that do not own it", "belongs to other ranks", ("equal",))


def expected(loop: Loop) -> list[Row]:
    """Return the rows that a loop is on, in the order of its acts, up to the first that is certain."""
    rows: list[Row] = []
    # Of each layer: "absent", "zero", "reduced", or "used" by a step.
    reduced = dict.fromkeys(LAYERS, "absent")
    # Layers with gradients that are not reduced, frozen ones, and those that no backward or step has seen trainable.
    local, frozen, unseen = set[str](), {*loop.frozen}, {*loop.frozen}
    number = reductions = backwards = 0  # forwards, synchronized backwards, and those since the last step
    is_changed, steps_early = False, loop.mode in STEPPING
    # DDP then rebuilds its buckets in the second iteration, and gradients that are views of them are tensors again.
    rebuilds = "gradient_as_bucket_view" in loop.flags and "find_unused_parameters" not in loop.flags
    for word, _, argument in (act.partition(" ") for act in sum(loop.iterations, ())):
        row, is_hidden = None, rebuilds and reductions == 1
        trained = {*STEM, *loop.heads_of(number, 0, 1)}
        if word == "zero":
            chosen = {"trainable": {*LAYERS} - frozen, "used": trained}.get(argument, {*LAYERS})
            is_changed |= any(reduced[layer] == "used" for layer in chosen)
            for layer in chosen:
                is_there = reduced[layer] != "absent" or layer in local
                reduced[layer] = "zero" if argument == "zeros" and is_there else "absent"
            local -= chosen
        elif word in ("local", "backward"):
            number, local = number + 1, local | (trained - frozen)
            row = USED if any(reduced[layer] == "used" for layer in trained - frozen) else None
            if word == "backward":
                row = row or (SEVERAL if "reduced" in reduced.values() else None)
                row = row or (USED_ELSEWHERE if "used" in reduced.values() else None)
                reduced.update(dict.fromkeys(local, "used" if steps_early else "reduced"))
                local, is_changed, unseen = set(), False, unseen & frozen
                reductions, backwards = reductions + 1, backwards + 1
        elif word == "step":
            is_repeated = backwards == 0 and not {"used", "zero"}.isdisjoint(reduced.values())
            is_wrong = steps_early and (is_repeated or backwards > 1 or (is_changed and backwards == 1))
            row = UNREDUCED if local else STEPS_EARLY if is_wrong else None
            reduced = {layer: "used" if state == "reduced" else state for layer, state in reduced.items()}
            backwards, unseen = 0, unseen & frozen
        elif word in ("lr", "decay", "schedule"):
            is_changed = True
        elif word == "freeze":
            frozen.add(argument)
        elif word in ("unfreeze", "add"):
            frozen.discard(argument)
            row = GROWS if "reduced" in reduced.values() and (word == "add" or argument in unseen) else None
        elif word in ("delete", "pop"):
            row = OTHERS_STATE
        row = HIDDEN if row in (USED, UNREDUCED) and is_hidden else row
        if row is not None and (loop.mode != "no hook" or row is OTHERS_STATE):
            rows.append(row)
            if not row.others:
                break
    return rows


def problem(loop: Loop, outcome: Outcome) -> str:
    """Say what is wrong with an outcome; empty if it is equal, or refused as a row says."""
    rows = expected(loop)
    if outcome.kind == "refused":
        return "" if any(re.search(row.pattern, outcome.text) for row in rows) else "refused, and on no row"
    if rows and not rows[-1].others:
        return f"not refused: {rows[-1].name}"
    return "" if outcome.kind in {"equal"}.union(*(row.others for row in rows)) else outcome.kind
