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

PARTITIONS = (*STRATEGIES, "level")
MATRICES, REST = "matrices", "rest"
_CLASS = re.compile(r"\s*([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\s*")
_PATTERN = re.compile(r"\s*(?::\s*([^\s:+]+))?\s*")


@dataclass(frozen=True, slots=True)
class Choice:
    """An optimizer class for some parameters.

    Attributes:
        name: the name of a class of ``torch.optim``, or ``package.Class``.
        arguments: names and values of keyword arguments.
        pattern: a glob over names of parameters, ``"matrices"``, or ``"rest"`` for all that no other choice takes.
    """

    name: str
    arguments: tuple[tuple[str, Any], ...] = ()
    pattern: str = REST


def parse(text: str) -> tuple[Choice, ...]:
    """Parse choices, which ``+`` separates. A choice without a pattern takes the rest.

    >>> [choice.pattern for choice in parse("SGD(momentum=0.9):*.bias + AdamW")]
    ['*.bias', 'rest']
    >>> parse("Muon(lr=0.02):matrices")
    (Choice(name='Muon', arguments=(('lr', 0.02),), pattern='matrices'),)

    Raises:
        ValueError: if a part of the text is no choice; the error names the part.
    """
    choices = []
    end = -1
    while end < len(text):
        choice, end = _read(text, end + 1)
        choices.append(choice)
    return tuple(choices)


def class_names(text: str) -> str:
    """Return the classes of choices, without arguments and patterns, as text for people.

    >>> class_names("Muon(lr=0.02):matrices+AdamW:rest")
    'Muon + AdamW'
    """
    return " + ".join(dict.fromkeys(choice.name.rpartition(".")[-1] for choice in parse(text)))


def assign(choices: Sequence[Choice], names: Sequence[str], matrices: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """Return the names of the parameters that each choice takes. The first match takes one; ``rest`` is matched last.

    >>> assign(parse("AdamW:rest+Muon:matrices"), ["embedding", "linear", "bias"], {"linear"})
    (('embedding', 'bias'), ('linear',))

    Args:
        choices: the choices, as :func:`parse` returns them.
        names: the names of all parameters.
        matrices: the names of the parameters that ``matrices`` means.

    Raises:
        ValueError: if a choice takes no parameter, or no choice takes a parameter.
    """
    left = list(names)
    taken: list[tuple[str, ...]] = [()] * len(choices)
    for index in sorted(range(len(choices)), key=lambda index: choices[index].pattern == REST):
        choice = choices[index]
        found = [name for name in left if _matches(choice.pattern, name, matrices)]
        if not found:
            fitting = any(_matches(choice.pattern, name, matrices) for name in names)
            why = "takes no parameter: others take all that it matches" if fitting else "matches no parameter"
            raise ValueError(f"{choice.name}:{choice.pattern} {why}; there are {listed(names)}")
        taken[index], chosen = tuple(found), set(found)
        left = [name for name in left if name not in chosen]
    if left:
        raise ValueError(f"no class takes {listed(left)}; add one for the rest, such as +AdamW:rest")
    return tuple(taken)


def matrix_names(model: nn.Module, head: torch.Tensor | None = None) -> frozenset[str]:
    """Return the names of the 2-D parameters that belong to no :class:`torch.nn.Embedding` and are not the head.

    Args:
        model: the model, whose ``named_parameters`` list a tied parameter once.
        head: weight of the output head; if None, a parameter with as many rows as the largest embedding counts as one.
    """
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    outer = {head, *(module.weight for module in embeddings)}
    # The largest embedding is the embedding of tokens.
    rows = max([module.num_embeddings for module in embeddings], default=0) if head is None else 0
    named = model.named_parameters()
    return frozenset(name for name, p in named if p.ndim == 2 and p not in outer and p.shape[0] != rows)


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return a class of ``torch.optim``, or of another package by its full name.

    Raises:
        ValueError: if it is no optimizer; the error names the class of ``torch.optim`` that the caller may mean.
    """
    module, _, last = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module or "torch.optim"), last, None)
    except Exception as error:  # noqa: BLE001 - a module may raise any exception
        raise ValueError(f"{name} cannot be imported ({type(error).__name__}: {error}); is it installed?") from None
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer:
        return found
    known = {
        each.lower(): each for each in torch.optim.__all__ if each not in ("Optimizer", "lr_scheduler", "swa_utils")
    }
    close = difflib.get_close_matches(last.lower(), known, n=1)
    meant = f"; did you mean {known[close[0]]}?" if close and not module else ""
    raise ValueError(f"{module or 'torch.optim'} has no optimizer {last!r}{meant}")


def listed(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others, as text."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _read(text: str, start: int) -> tuple[Choice, int]:
    """Parse the choice that begins at ``start``. Return it with the place of the ``+`` after it, or of the end."""
    named = _CLASS.match(text, start)
    if named is None:
        raise ValueError(f"a class such as AdamW or SGD(momentum=0.9):*.bias is expected, but got {text[start:]!r}")
    end, call = named.end(), None
    if text[end : end + 1] == "(":
        call, end = _call(text, named.start(1), end)
    matched = _PATTERN.match(text, end)
    pattern, end = (matched[1], matched.end()) if matched else (None, end)
    if text[end : end + 1] not in ("", "+"):
        raise ValueError(f"after a class come :PATTERN and + with another class, but got {text[end:]!r}")
    return Choice(named[1], () if call is None else _literals(named[1], call), pattern or REST), end


def _call(text: str, start: int, opening: int) -> tuple[ast.Call, int]:
    """Parse the call that begins at ``start``. Return it with the place after it."""
    # The call ends at the first parenthesis that completes an expression: others are within strings or tuples.
    for closing in (place for place in range(opening, len(text)) if text[place] == ")"):
        with suppress(SyntaxError, RecursionError, MemoryError):
            found = ast.parse(text[start : closing + 1], mode="eval").body
            if isinstance(found, ast.Call):
                return found, closing + 1
    raise ValueError(f"{text[start:]!r} is no call: write arguments in parentheses, such as SGD(momentum=0.9)")


def _literals(name: str, call: ast.Call) -> tuple[tuple[str, Any], ...]:
    found: dict[str, Any] = {}
    if call.args:
        raise ValueError(f"{name}({ast.unparse(call.args[0])}) has no name: write arguments as {name}(lr=0.01)")
    for keyword in call.keywords:
        written = ast.unparse(keyword.value)
        if keyword.arg is None or keyword.arg in found:
            why = "is not supported" if keyword.arg is None else "is given twice"
            raise ValueError(f"{name}({keyword.arg or '**'}{'=' if keyword.arg else ''}{written}) {why}")
        try:
            found[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, RecursionError, MemoryError):
            raise ValueError(
                f"{name}({keyword.arg}={written}) is no literal: write a number, text, or a tuple"
            ) from None
    return tuple(found.items())


def _matches(pattern: str, name: str, matrices: Collection[str]) -> bool:
    return pattern == REST or (name in matrices if pattern == MATRICES else fnmatchcase(name, pattern))
