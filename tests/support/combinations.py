"""Parameters of tests, and which of their combinations run by default."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def each_of(name: str, values: Iterable[Any], **others: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize by all combinations; by default each of ``values`` is tested once, with values of ``others`` in turn.

    The first of ``values`` meets the first value of each other parameter, the second one the second, and so on. An id
    names the values, and a flag by its parameter if it is set.
    """
    cases = []
    for number, value in enumerate(values):
        usual = tuple(other[number % len(other)] for other in others.values())
        for rest in itertools.product(*others.values()):
            marks = [] if rest == usual else [pytest.mark.exhaustive]
            cases.append(
                pytest.param(
                    value, *rest, id=_id_of({name: value, **dict(zip(others, rest, strict=True))}), marks=marks
                )
            )
    return pytest.mark.parametrize((name, *others), cases)


def _id_of(values: dict[str, Any]) -> str:
    texts = [name if value is True else getattr(value, "__name__", str(value)) for name, value in values.items()]
    return "-".join(text for text, value in zip(texts, values.values(), strict=True) if value is not False)


WHERE = ("on all ranks", "on rank 1")
"""Where something goes wrong."""

FLAG = (False, True)
PARTITIONS = pytest.mark.parametrize("partition", ["whole", "split"])
VIEWS = pytest.mark.parametrize("as_bucket_view", FLAG, ids=["params", "views"])
LAYOUTS = each_of("partition", ["whole", "split"], as_bucket_view=FLAG)
"""Whole tensors apart, and cut ones as views of flat buffers; not by default, the other way round."""
