"""Parses optimizers from text, such as ``Muon(lr=0.02):matrices+AdamW:rest``, and assigns parameters to each class.

The text is a list of choices. A choice is a class, keyword arguments that are literals, and the parameters that it
takes: a glob over their names, ``matrices`` or ``rest``. Parsing imports and evaluates nothing.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from zeroshard_core import STRATEGIES

from zeroshard.plan.eligibility import STEPPED_IN_PARTS

PARTITIONS = (*STRATEGIES, "level")
MATRICES, REST = "matrices", "rest"
_CLASS = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_PLAIN = r"""[^()'"]|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_ARGUMENTS = rf"\((?:{_PLAIN}|\((?:{_PLAIN})*\))*\)"
_CHOICE = re.compile(rf"\s*({_CLASS})\s*({_ARGUMENTS})?\s*(?::\s*([^\s:+]+))?\s*")


@dataclass(frozen=True, slots=True)
class Choice:
    """A class of ``torch.optim``, or ``package.Class``, its keyword arguments, and the parameters that it takes."""

    name: str
    arguments: tuple[tuple[str, Any], ...] = ()
    pattern: str = REST


def parse(text: str) -> tuple[Choice, ...]:
    """Parse choices separated by ``+``; raise a ValueError that shows the first text that is not a choice.

    A choice without a pattern takes the rest. Arguments may have only one more level of parentheses inside.

    >>> [choice.pattern for choice in parse("SGD(momentum=0.9):*.bias + AdamW")]
    ['*.bias', 'rest']
    >>> parse("Muon(lr=0.02):matrices")
    (Choice(name='Muon', arguments=(('lr', 0.02),), pattern='matrices'),)
    """
    choices = []
    start = 0
    while start <= len(text):
        found = _CHOICE.match(text, start)
        if found is None:
            raise ValueError(f"expected a class such as AdamW or SGD(momentum=0.9):*.bias, but got {text[start:]!r}")
        if found.end() < len(text) and text[found.end()] != "+":
            raise ValueError(f"expected (ARGUMENTS), :PATTERN or + after a class, but got {text[found.end() :]!r}")
        name, arguments, pattern = found.groups(default="")
        choices.append(Choice(name, _literals(name, arguments or "()"), pattern or REST))
        start = found.end() + 1
    return tuple(choices)


def assign(choices: Sequence[Choice], names: Sequence[str], matrices: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """Return the names of the parameters that each choice takes. The first match gets a parameter; ``rest`` comes last.

    A ValueError names a choice without parameters, or parameters without a choice.

    >>> assign(parse("AdamW:rest+Muon:matrices"), ["embedding", "linear", "bias"], {"linear"})
    (('embedding', 'bias'), ('linear',))
    """
    left = list(names)
    taken: list[tuple[str, ...]] = [()] * len(choices)
    for index, choice in sorted(enumerate(choices), key=lambda numbered: numbered[1].pattern == REST):
        pattern = "*" if choice.pattern == REST else choice.pattern
        matching = matrices if pattern == MATRICES else {name for name in names if fnmatchcase(name, pattern)}
        taken[index] = tuple(name for name in left if name in matching)
        if not taken[index]:
            why = "takes no parameter: other choices take all that it matches" if matching else "matches no parameter"
            raise ValueError(f"{choice.name}:{choice.pattern} {why}; there are {listed(names)}")
        left = [name for name in left if name not in matching]
    if left:
        raise ValueError(f"no class takes {listed(left)}; add one for the rest, such as +AdamW:rest")
    return tuple(taken)


def matrix_names(model: nn.Module, head: torch.Tensor | None = None) -> frozenset[str]:
    """Return the names of the 2-D parameters that belong to no :class:`torch.nn.Embedding` and are not the head.

    If the output head's weight is None, any parameter with as many rows as the largest embedding counts as a head.
    """
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    outer = {head, *(module.weight for module in embeddings)}
    # The largest embedding is the embedding of tokens.
    rows = max([module.num_embeddings for module in embeddings], default=0) if head is None else 0
    matrices = [(name, param) for name, param in model.named_parameters() if param.ndim == 2 and param not in outer]
    return frozenset(name for name, param in matrices if len(param) != rows)


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return a class of ``torch.optim``, or of another package by its full name; a ValueError suggests another name."""
    module, _, last = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module or "torch.optim"), last, None)
    except Exception as error:  # noqa: BLE001 - a module may raise any exception
        raise ValueError(f"{name} cannot be imported ({type(error).__name__}: {error}); is it installed?") from None
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer:
        return found
    known = {cls.__name__.lower(): cls.__name__ for cls in STEPPED_IN_PARTS}
    close = difflib.get_close_matches(last.lower(), known, n=1)
    meant = f"; did you mean {known[close[0]]}?" if close and not module else ""
    raise ValueError(f"{module or 'torch.optim'} has no optimizer {last!r}{meant}")


def listed(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others, as text."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _literals(name: str, arguments: str) -> tuple[tuple[str, Any], ...]:
    """Evaluate keyword arguments in parentheses."""
    call = None
    with suppress(SyntaxError, RecursionError, MemoryError):
        call = ast.parse(f"call{arguments}", mode="eval").body
    if not isinstance(call, ast.Call):
        raise ValueError(f"{name + arguments!r} is not a call: write arguments as {name}(lr=0.01)")
    if call.args:
        raise ValueError(f"{name}({ast.unparse(call.args[0])}) has no name: write arguments as {name}(lr=0.01)")
    found: dict[str, Any] = {}
    for keyword in call.keywords:
        written = f"{name}({ast.unparse(keyword)})"
        if keyword.arg is None or keyword.arg in found:
            raise ValueError(f"{written} is {'not supported' if keyword.arg is None else 'given twice'}")
        try:
            found[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, RecursionError, MemoryError):
            raise ValueError(f"{written} is not a literal: write a number, a string or a tuple") from None
    return tuple(found.items())
