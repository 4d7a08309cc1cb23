"""Uneven inputs end where a single process would have ended, with our context manager and with torch's."""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
from typing import Any

import pytest
from join_training import HOOKS, Uneven
from torch.distributed.algorithms.join import Join as TorchJoin
from zeroshard_integrations.join import Join

CONTEXTS: dict[str, Any] = {"torchs": TorchJoin, "ours": Join}
EVERY_CONTEXT = pytest.mark.parametrize("context", CONTEXTS)
EVERY_HOOK = pytest.mark.parametrize("hook", HOOKS)
GAPS = (0, 1, 3, 10)


def lengths(world_size: int, gap: int, first: int = 3) -> list[int]:
    """Rank 0 has the fewest batches, the last rank the most."""
    return [first + gap * rank // max(world_size - 1, 1) for rank in range(world_size)]


@pytest.mark.ranks(2, 3, 4, backend="gloo")
@EVERY_CONTEXT
@EVERY_HOOK
@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
def test_as_a_single_process(world_size: int, context: str, hook: str, optimizer: str) -> None:
    for gap in GAPS:
        Uneven(lengths(world_size, gap), hook, optimizer=optimizer).check(CONTEXTS[context])


@pytest.mark.ranks(2, 3, backend="gloo")
@EVERY_CONTEXT
@EVERY_HOOK
@pytest.mark.parametrize("partition", ["split", "hybrid"])
def test_tensors_cut_and_the_mean_of_those_that_run(world_size: int, context: str, hook: str, partition: str) -> None:
    for divide in (True, False):
        for numbers in (lengths(world_size, 3), lengths(world_size, 5)[::-1], [0, *[4] * (world_size - 1)]):
            Uneven(numbers, hook, partition=partition, divide_by_initial=divide).check(CONTEXTS[context])
