"""The table of refusals: decides from what a loop does whether it is refused, and by which error."""

from __future__ import annotations

import re
from dataclasses import dataclass

from drawn_loops.loop import LAYERS, SHARDED, STEM, STEPPING, Loop


@dataclass(frozen=True)
class Outcome:
    """The outcome of a loop: it is ``equal``, ``refused`` by an act, ``differs`` from plain DDP, or is ``other``."""

    kind: str
    act: str = ""
    text: str = ""


@dataclass(frozen=True)
class Row:
    """Why loops are refused, and the pattern of the error."""

    name: str
    pattern: str


USED = Row("with a hook: backward after step() without zero_grad()", "still has the gradient of the last step")
UNREDUCED = Row("with a hook: step() after no_sync()", r"has not been reduced|was replaced after backward\(\)")
STEPS_EARLY = Row("a hook that steps: not backward and step() in turn", r"exactly one backward outside of no_sync\(\)")
SEVERAL = Row("with a hook: a backward after one that reduced", "synchronize only the last backward")
TYPE = Row("a type of parameter, where the class gets another tensor", "would get a plain Parameter in its place")
EXPERTS = Row("with a hook: parameters that DDP ignores and that differ", "an optimizer of their own")
COUPLED = Row("a class that couples tensors", "couples tensors")
AGAIN = Row("a class that calls its closure again", "called its closure again in one step")
UNFROZEN = Row(
    "sharded: freezing or unfreezing where a gradient waits", "were frozen or unfrozen while the gradient of"
)
CLOSURE = Row("a hook that steps: a closure", "takes neither a closure nor arguments")


def expected(loop: Loop) -> Row | None:
    """Return the row by which a loop is refused; None if it is not."""
    steps_early = loop.mode in STEPPING
    if loop.optimizer == "ClipAll":
        return COUPLED
    has_others = loop.partition != "whole" or "master_weights" in loop.flags or loop.mode == STEPPING[1]
    if loop.optimizer == "ByType" and has_others:
        return TYPE
    if loop.family == "closures" and (steps_early or loop.optimizer == "Twice"):
        return CLOSURE if steps_early else AGAIN
    if loop.mode == "no hook":
        return None
    is_sharded = loop.mode == SHARDED
    if "experts" in loop.flags or (is_sharded and "equal" in loop.flags):
        return EXPERTS
    # Of each layer: "absent", "zero", "reduced", or "used" by a step.
    reduced = dict.fromkeys(LAYERS, "absent")
    # Layers with gradients that are not reduced, and frozen ones.
    local, frozen = set[str](), {*loop.frozen}
    # The layers in buckets of shard_gradients().
    in_buckets = {*LAYERS} - frozen
    number = backwards = 0  # forwards, and synchronized backwards since the last step
    is_changed = is_replaced = False
    for word, _, argument in (act.partition(" ") for act in sum(loop.iterations, ())):
        row = None
        trained = {*STEM, *loop.heads_of(number, 0, 1)}
        active = {*LAYERS} - frozen | local | {layer for layer in LAYERS if reduced[layer] != "absent"}
        if word == "zero":
            chosen = {"trainable": {*LAYERS} - frozen, "used": trained}.get(argument, {*LAYERS})
            is_changed |= any(reduced[layer] == "used" for layer in chosen)
            for layer in chosen:
                is_there = reduced[layer] != "absent" or layer in local
                reduced[layer] = "zero" if argument == "zeros" and is_there else "absent"
            local -= chosen
        elif word in ("local", "backward"):
            number, local = number + 1, local | (trained - frozen)
            # A backward that reduces checks all gradients; any other backward checks those to which it adds.
            held = {reduced[layer] for layer in (LAYERS if word == "backward" else trained - frozen)}
            row = USED if "used" in held else SEVERAL if "reduced" in held and not is_sharded else None
            if is_sharded and word == "backward" and row is None and active != in_buckets:
                row, in_buckets = UNFROZEN if "reduced" in reduced.values() else None, active
            if word == "backward":
                reduced.update(dict.fromkeys(local, "used" if steps_early else "reduced"))
                local, is_changed, backwards = set(), False, backwards + 1
        elif word == "step":
            is_repeated = backwards == 0 and not {"used", "zero"}.isdisjoint(reduced.values())
            is_wrong = steps_early and (is_repeated or backwards > 1 or (is_changed and backwards == 1))
            row = UNREDUCED if local or is_replaced else STEPS_EARLY if is_wrong else None
            reduced = {layer: "used" if state == "reduced" else state for layer, state in reduced.items()}
            backwards = 0
        elif word in ("lr", "decay", "schedule"):
            is_changed = True
        elif word == "resume":
            reduced, in_buckets = dict.fromkeys(LAYERS, "absent"), {*LAYERS} - {*loop.frozen}
        elif word == "grad":
            is_replaced |= reduced[loop.layer_of(int(argument))] != "absent"
        elif word == "freeze":
            frozen.add(argument)
        elif word == "unfreeze":
            frozen.discard(argument)
        elif word == "add":
            in_buckets = active
        if row is not None:
            return row
    return None


def problem(loop: Loop, outcome: Outcome) -> str:
    """Return what is wrong with an outcome; empty if it is equal, or refused as a row says."""
    row = expected(loop)
    if outcome.kind == "refused":
        return "" if row is not None and re.search(row.pattern, outcome.text) else "refused, and on no row"
    if row is not None:
        return f"not refused: {row.name}"
    return "" if outcome.kind == "equal" else outcome.kind
