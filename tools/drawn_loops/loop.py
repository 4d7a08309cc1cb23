"""Draws training loops: a loop is a value of plain data, and a pure function of its seed.

An act is a word, mostly with an argument:

- ``zero``: ``none`` and ``zeros`` call the optimizer's ``zero_grad(set_to_none=...)``, ``model`` the model's; ``all``,
  ``trainable`` and ``used`` set ``param.grad = None`` for all parameters, for those that are not frozen, or for those
  that the next forward uses.
- ``forward``: the forward of the next ``backward``. ``local``: forward and backward under ``no_sync()``.
- ``step``, ``schedule``: call ``step()`` of the optimizer and of the scheduler.
- ``freeze``, ``unfreeze``: call ``requires_grad_()`` of a layer.
- ``lr``, ``decay``, ``add``: change hyperparameters of a param group, or add a group.
- ``delete``, ``pop``, ``assign``, ``clear``, ``scale``: edit the state, of one parameter or of all.
- ``rebind``, ``write``: halve the values of a parameter, by ``param.data = ...`` or in place.

Documented as not checked, and not drawn: with a hook that steps during backward, edits of state or parameters between
that backward and its ``step()``, and a loop without its last ``step()``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

STEPPING = ("hook_with_zero_step", "hook_with_zero_step_interleaved")
MODES = ("no hook", "reduce_to_owner", *STEPPING)
SCHEDULERS = ("", "ExponentialLR", "StepLR", "LambdaLR", "CosineAnnealingLR", "OneCycleLR", "ReduceLROnPlateau")
FLAGS = ("parameters_as_bucket_view", "master_weights", "gradient_as_bucket_view", "two groups")
STEM, HEADS = ("stem0", "stem1"), ("head0", "head1")
LAYERS = STEM + HEADS


@dataclass(frozen=True)
class Loop:
    """A training loop.

    Attributes:
        seed: the seed that it was drawn from.
        mode, partition, optimizer, scheduler: how it is built; see `draw`.
        heads: which heads a forward uses: ``"both"``, one ``"in turn"``, or one ``"by rank"``, in turn too.
        flags: some of `FLAGS`, and ``"find_unused_parameters"``.
        frozen: layers that are frozen before the optimizer is built, and after DDP is.
        iterations: the acts of each iteration.
    """

    seed: int
    mode: str
    partition: str
    optimizer: str
    scheduler: str
    heads: str
    flags: tuple[str, ...]
    frozen: tuple[str, ...]
    iterations: tuple[tuple[str, ...], ...]

    def heads_of(self, number: int, *ranks: int) -> list[str]:
        """Return the heads that the backward of this number uses on some ranks."""
        first = {(number + rank * (self.heads == "by rank")) % 2 for rank in ranks}
        return [head for place, head in enumerate(HEADS) if self.heads == "both" or place in first]

    def __str__(self) -> str:
        """Return the loop on one line."""
        head = [self.mode, self.partition, self.optimizer, self.scheduler, f"heads {self.heads}", *self.flags]
        head += [f"{layer} frozen" for layer in self.frozen]
        return " | ".join([", ".join(filter(None, head)), *map(", ".join, self.iterations)])


def draw(seed: int) -> Loop:
    """Draw a loop. In two loops of five one or two iterations are odd: they do what may be refused."""
    rng = random.Random(seed)  # noqa: S311 - the same loop for a seed, everywhere
    mode = rng.choice((*MODES, "reduce_to_owner", "reduce_to_owner"))
    optimizer = rng.choice(("SGD", "Adam", "AdamW", "Muon"))
    partition = rng.choice(("whole", "level") if optimizer == "Muon" else ("whole", "split", "level"))
    heads = rng.choices(("both", "in turn", "by rank"), (6, 4, 1))[0]
    scheduler, freezes = rng.choice(SCHEDULERS), rng.random() < 0.4
    flags = [flag for flag in FLAGS if rng.random() < 0.5]
    flags += ["find_unused_parameters"] * (freezes or heads != "both")
    usual_zero, zeros_first = rng.choice(("none", "zeros", "model", "all")), rng.random() < 0.75

    def zero() -> str:
        return f"zero {usual_zero if rng.random() < 0.9 else rng.choice(('none', 'zeros', 'trainable'))}"

    def edit(*, between: bool) -> str:
        # With other schedulers no group can be added without sharding either.
        kinds = ["groups", *["add"] * (scheduler in SCHEDULERS[:3]), *["layers"] * 2 * freezes]
        kind = rng.choice(kinds if between and mode in STEPPING else [*kinds, "state", "values"])
        if kind == "layers":
            return f"{rng.choice(('freeze', 'unfreeze'))} {rng.choice(STEM)}"
        state = ("delete", "pop", *("assign", "clear", "scale") * 3)
        words = {"groups": ("lr", "decay"), "add": ("add",), "state": state, "values": ("rebind", "write")}
        word = rng.choice(words[kind])
        return f"{word} {rng.randrange(8)}" if word in ("delete", "pop", "assign", "rebind", "write") else word

    def iteration(*, odd: bool, first: bool) -> tuple[str, ...]:
        edits = [edit(between=False) for _ in range(2) if not first and rng.random() < 0.3]
        window = ["local"] * rng.randint(1, 2) if rng.random() < 0.25 else []
        begin, backward, step, end = [zero()] * zeros_first, ["backward"], ["step"], [zero()] * (not zeros_first)
        if begin and not window and rng.random() < 0.15:
            begin = ["forward", *begin]
        kind = rng.choice(("backwards", "between", "steps", "zeros")) if odd else ""
        if kind == "backwards":
            unreduced = [["local"], [zero(), "local"]] * (mode != "no hook")
            backward += rng.choice([["backward"], ["local", "backward"], *unreduced])
        elif kind == "between":
            step = [edit(between=True), *step]
        elif kind == "steps":
            step = rng.choice(([], ["step", "step"], [zero(), "step"], ["step", zero(), "step"]))
        elif kind == "zeros":
            way = rng.choice(([], ["zero trainable"], ["zero used"]))
            begin, end = way * zeros_first, way * (not zeros_first)
        return (*edits, *begin, *window, *backward, *step, *end, *["schedule"] * bool(scheduler))

    count = rng.randint(3, 6)
    odd_ones = {rng.randrange(count - 1) for _ in range(2)} if rng.random() < 0.4 else set()
    iterations = tuple(iteration(odd=number in odd_ones, first=number == 0) for number in range(count))
    frozen = tuple(layer for layer in STEM if freezes and rng.random() < 0.4)
    return Loop(seed, mode, partition, optimizer, scheduler, heads, tuple(flags), frozen, iterations)
