"""Combinations of context, hook, partition, mean, model, optimizer and gap end as one process would.

Every two values together by default, with one gap each; all of them with ``-m exhaustive``.
"""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with the types themselves.
from collections.abc import Callable, Sequence
from itertools import cycle, islice, product
from typing import Any

import pytest
from join_training import HOOKS, Branches, Normed, Uneven
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin
from training import small_model
from zeroshard_integrations.join import Join
from zeroshard_testing import assert_replicas_equal

CONTEXTS: dict[str, Any] = {"ours": Join, "torchs": TorchJoin}
PARTITIONS = ("whole", "split", "hybrid")
MEANS = {"of all": True, "of those that run": False}
OPTIMIZERS = ("Adam", "SGD")
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "all parameters used": (small_model, {}),
    "unused parameters": (Branches, {"find_unused_parameters": True}),
    "module buffers": (Normed, {}),
}
GAPS: dict[str, Callable[[int], list[int]]] = {
    "none": lambda ranks: [3] * ranks,
    "1": lambda ranks: [3 + (rank == ranks - 1) for rank in range(ranks)],
    "3": lambda ranks: [3 * (ranks - 1 - rank) // (ranks - 1) + 2 for rank in range(ranks)],
    "10": lambda ranks: [1 + 10 * rank // (ranks - 1) for rank in range(ranks)],
    "one rank without any": lambda ranks: [0, *[3 + rank for rank in range(1, ranks)]],
}


COMBINATIONS = list(product(CONTEXTS, HOOKS, PARTITIONS, MEANS))


def check(context: str, hook: str, partition: str, mean: str, lengths: Sequence[Sequence[int]]) -> None:
    """Try all models and optimizers, each with one of the lengths."""
    numbers = cycle(lengths)
    for (model, options), optimizer in product(MODELS.values(), OPTIMIZERS):
        uneven = Uneven(
            next(numbers),
            hook,
            model=model,
            optimizer=optimizer,
            partition=partition,
            divide_by_initial=MEANS[mean],
            ddp=options,
        )
        uneven.check(CONTEXTS[context])
        if model is Normed:
            assert_replicas_equal(uneven.ddp.module.buffers())
            assert uneven.ddp.module.seen == max(uneven.lengths)


@pytest.mark.ranks(2, 3, 4, backend="gloo")
@pytest.mark.pairwise
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("context", CONTEXTS)
def test_as_a_single_process(world_size: int, context: str, hook: str, partition: str, mean: str) -> None:
    first = COMBINATIONS.index((context, hook, partition, mean)) + world_size
    gaps = islice(cycle(GAPS.values()), first, first + len(GAPS))
    check(context, hook, partition, mean, [gap(world_size) for gap in gaps])


@pytest.mark.exhaustive
@pytest.mark.ranks(2, 3, 4, backend="gloo", timeout=240)
@pytest.mark.parametrize(("context", "hook", "partition", "mean"), COMBINATIONS)
@pytest.mark.parametrize("gap", GAPS)
def test_every_combination(world_size: int, context: str, hook: str, partition: str, mean: str, gap: str) -> None:
    check(context, hook, partition, mean, [GAPS[gap](world_size)])
