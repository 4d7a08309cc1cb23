"""Draws training loops: a loop is plain data, computed by a pure function from its seed and its family.

An act is a word, usually with an argument:

- ``zero``: ``none`` and ``zeros`` call the optimizer's ``zero_grad(set_to_none=...)``, ``model`` the model's; ``all``,
  ``trainable`` and ``used`` set ``param.grad = None`` for all parameters, for those that are not frozen, or for those
  that the next forward uses.
- ``forward``: the forward of the next ``backward``. ``local``: forward and backward under ``no_sync()``.
- ``step``, ``schedule``: call ``step()`` of the optimizer and of the scheduler.
- ``freeze``, ``unfreeze``: call ``requires_grad_()`` of a layer.
- ``lr``, ``decay``, ``add``: change hyperparameters of a param group, or add a group.
- ``delete``, ``pop``, ``assign``, ``clear``, ``scale``: edit the state, of one parameter or of all.
- ``rebind``, ``write``: halve the values of a parameter, by ``param.data = ...`` or in place.

Some acts belong to one family only. The loops of a family do one thing on purpose that users have done:

- ``mul``: doubles an attribute of a parameter, which the optimizer class reads.
- ``grad``: assigns ``param.grad.data`` between backward and ``step()``.
- ``closure``: ``step(closure)``, where the closure makes the backward.
- ``resume``: builds everything again, and loads the consolidated state.
- ``data``, ``clamp``: write through ``param.data``.
- ``rate``: writes a learning rate to the dict of a param group that the script has kept.

What is documented as not checked is not drawn: with a hook that steps during backward, edits of state or parameters
between that backward and its ``step()``, and a loop without its last ``step()``; sets of ``id(param)`` for parts of
tensors, master weights and hooks that step bucket by bucket; without a hook, parameters that DDP ignores and that
differ between ranks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

STEPPING = ("hook_with_zero_step", "hook_with_zero_step_interleaved")
MODES = ("no hook", "reduce_to_owner", *STEPPING)
SHARDED = "shard_gradients"
"""The mode that is not drawn, but replaces the drawn one. DDP is not built then."""
SCHEDULERS = ("", "ExponentialLR", "StepLR", "LambdaLR", "CosineAnnealingLR", "OneCycleLR", "ReduceLROnPlateau")
FLAGS = ("parameters_as_bucket_view", "master_weights", "gradient_as_bucket_view", "two groups")
STEM, HEADS = ("stem0", "stem1"), ("head0", "head1")
LAYERS = STEM + HEADS
# Optimizer classes of each family; () are those of torch.
FAMILIES: dict[str, tuple[str, ...]] = {
    "attributes": ("ByAttribute", "ByType", "ById"),
    "kept": (),
    "grad data": (),
    "closures": ("Twice", "Twice", "Simple", "SGD"),
    "counters": ("Counting",),
    "data": (),
    "ignored": (),
    "dicts": (),
    "coupled": ("ClipAll", "ClipEach"),
}
_EDITS = {
    "attributes": ("mul {}",),
    "kept": ("freeze stem0", "unfreeze stem0", "freeze stem1"),
    "counters": ("resume",),
    "data": ("data {}", "clamp {}"),
    "dicts": ("rate {}",),
}


@dataclass(frozen=True)
class Loop:
    """A training loop.

    Attributes:
        seed: the seed from which it was drawn.
        mode, partition, optimizer, scheduler: how it is built; see `draw`.
        heads: which heads a forward uses: ``"both"``, one ``"in turn"``, or one ``"by rank"``, in turn too.
        flags: some of `FLAGS`, ``"find_unused_parameters"``, ``"a group each"``, and of what DDP ignores ``"equal"`` or
            ``"experts"``, which differ between ranks.
        frozen: layers that are frozen before the optimizer is built, and after DDP is.
        iterations: the acts of each iteration.
        family: what the loop does on purpose, one of `FAMILIES`, or empty.
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
    family: str = ""

    def heads_of(self, number: int, *ranks: int) -> list[str]:
        """Return the heads that the backward of this number uses on some ranks."""
        first = {(number + rank * (self.heads == "by rank")) % 2 for rank in ranks}
        return [head for place, head in enumerate(HEADS) if self.heads == "both" or place in first]

    def layer_of(self, number: int) -> str:
        """Return the layer of the parameter with this number, as long as no parameter was added."""
        return LAYERS[number % 8 // 2 if self.optimizer != "Muon" else number % 4]

    def __str__(self) -> str:
        """Return the loop on one line."""
        head = [self.family, self.mode, self.partition, self.optimizer, self.scheduler, f"heads {self.heads}"]
        head += [*self.flags, *(f"{layer} frozen" for layer in self.frozen)]
        return " | ".join([", ".join(filter(None, head)), *map(", ".join, self.iterations)])


def draw(seed: int, family: str = "") -> Loop:
    """Draw a loop. In two of five loops without a family, one or two iterations are unusual, and may be refused."""
    rng = random.Random(f"{family} {seed}" if family else seed)  # noqa: S311 - the same loop for a seed, everywhere
    mode = rng.choice((*MODES, "reduce_to_owner", "reduce_to_owner"))
    optimizer = rng.choice(FAMILIES.get(family) or ("SGD", "Adam", "AdamW", "Muon"))
    # "level" may leave all tensors of a type whole, or not.
    two = {"ByType": ("whole", "split"), **dict.fromkeys(("Muon", "ClipAll", "ClipEach"), ("whole", "level"))}
    partition = rng.choice(two.get(optimizer, ("whole", "split", "level")))
    heads = rng.choices(("both", "in turn", "by rank"), (6, 4, 1))[0]
    scheduler, freezes = rng.choice(SCHEDULERS), rng.random() < 0.4
    flags = [flag for flag in FLAGS if rng.random() < 0.5]
    heads = {"kept": "in turn", "grad data": "both"}.get(family, heads)
    if optimizer == "ById":
        mode, partition, flags = rng.choice(MODES[:3]), "whole", [flag for flag in flags if flag != "master_weights"]
    elif family == "data" and "master_weights" not in flags:
        flags.append("master_weights")
    elif family == "counters":
        flags = [flag for flag in flags if flag != "two groups"] + ["a group each"]
    elif family == "ignored":
        # Without a hook nothing is compared.
        flags.append("equal" if mode == "no hook" else rng.choice(("equal", "experts")))
    flags += ["find_unused_parameters"] * (freezes or heads != "both")
    usual_zero, zeros_first = rng.choice(("none", "zeros", "model", "all")), rng.random() < 0.75

    def zero() -> str:
        return f"zero {usual_zero if rng.random() < 0.9 else rng.choice(('none', 'zeros', 'trainable'))}"

    def edit(*, between: bool) -> str:
        if family:
            return rng.choice(_EDITS[family]).format(rng.randrange(8))
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
        has_edits = not first and (not family or family in _EDITS)
        edits = [edit(between=False) for _ in range(2) if has_edits and rng.random() < (0.6 if family else 0.3)]
        window = ["local"] * rng.randint(1, 2) if rng.random() < 0.25 else []
        begin, backward, step, end = [zero()] * zeros_first, ["backward"], ["step"], [zero()] * (not zeros_first)
        if begin and not window and rng.random() < 0.15:
            begin = ["forward", *begin]
        kind = rng.choice(("backwards", "between", "steps", "zeros")) if odd else family
        if kind == "backwards":
            unreduced = [["local"], [zero(), "local"]] * (mode != "no hook")
            backward += rng.choice([["backward"], ["local", "backward"], *unreduced])
        elif kind == "between":
            step = [edit(between=True), *step]
        elif kind == "steps":
            step = rng.choice(([], ["step", "step"], [zero(), "step"], ["step", zero(), "step"]))
        elif kind in ("zeros", "kept"):
            way = rng.choice(([], ["zero trainable"], ["zero used"]))
            begin, end = way * zeros_first, way * (not zeros_first)
        elif kind == "grad data":
            step = [f"grad {rng.randrange(8)}"] * rng.randint(0, 1) + step
        elif kind == "closures":
            begin, window, backward, step, end = [], [], [], ["closure"], []
        return (*edits, *begin, *window, *backward, *step, *end, *["schedule"] * bool(scheduler))

    count = rng.randint(3, 6)
    odd_ones = {rng.randrange(count - 1) for _ in range(2)} if rng.random() < 0.4 and not family else set()
    iterations = tuple(iteration(odd=number in odd_ones, first=number == 0) for number in range(count))
    frozen = tuple(layer for layer in STEM if freezes and rng.random() < 0.4)
    return Loop(seed, mode, partition, optimizer, scheduler, heads, tuple(flags), frozen, iterations, family)
