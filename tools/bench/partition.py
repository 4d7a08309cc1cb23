"""Time the making of a plan against torch's own partition, on the same tensors.

Both are given what they work on: ours the specs, torch's a bare object with the parameters and the world size (the scan
needs no process group). Ours validates the plan and counts its loads within the time. Times are processor time: all of
this runs in one thread and waits for nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import asdict
from time import process_time
from typing import Any

import torch
from pairs import alternate
from torch.distributed.optim import ZeroRedundancyOptimizer
from zeroshard_core import TensorSpec, partition

FASTER_THAN_TORCH = 20
GROWTH_LIMIT = 15


def main() -> int:
    """Run the benchmark; the exit status is 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=10_000, help="number of tensors (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=4_096, help="number of ranks (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=15, help="alternating pairs, at least 6 (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    arguments = parser.parse_args()
    count, ranks = arguments.tensors, arguments.ranks

    sizes = _sizes(10 * count)
    few, many = _specs(sizes[:count]), _specs(sizes)
    bare = _bare_optimizer(sizes[:count], ranks)
    _check_same_owners(bare, few, ranks)

    print(f"{count} tensors, {ranks} ranks: ours against torch's, {arguments.pairs} pairs ...", file=sys.stderr)
    against_torch = alternate(
        lambda: partition(few, ranks), lambda: _torch_partition(bare), arguments.pairs, process_time
    )
    print(f"{10 * count} tensors against {count}, {arguments.pairs} pairs ...", file=sys.stderr)
    growth = alternate(lambda: partition(many, ranks), lambda: partition(few, ranks), arguments.pairs, process_time)

    met = against_torch.high <= 1 / FASTER_THAN_TORCH and growth.high <= GROWTH_LIMIT
    if arguments.json:
        result = {"tensors": count, "ranks": ranks, "pairs": arguments.pairs, "met": met}
        print(json.dumps({**result, "against_torch": asdict(against_torch), "growth": asdict(growth)}))
    else:
        print(
            f"ours / torch's: {against_torch.ratio:.5f} [{against_torch.low:.5f}, {against_torch.high:.5f}], at most "
            f"{1 / FASTER_THAN_TORCH} ({against_torch.median_a * 1e3:.1f} ms, {against_torch.median_b * 1e3:.0f} ms)"
        )
        print(
            f"{10 * count} / {count} tensors: {growth.ratio:.2f} [{growth.low:.2f}, {growth.high:.2f}], at most "
            f"{GROWTH_LIMIT} ({growth.median_a * 1e3:.0f} ms, {growth.median_b * 1e3:.1f} ms)"
        )
    return 0 if met else 1


def _sizes(count: int) -> list[int]:
    """Sizes of many magnitudes, as in a model: few large, many small, and repeated."""
    source = random.Random(0)  # noqa: S311 - test data
    return [2 ** source.randrange(4, 22) + source.randrange(3) for _ in range(count)]


def _specs(sizes: list[int]) -> list[TensorSpec]:
    return [TensorSpec(f"tensor.{i}", (size,), torch.float32) for i, size in enumerate(sizes)]


def _bare_optimizer(sizes: list[int], ranks: int) -> ZeroRedundancyOptimizer:
    bare = object.__new__(ZeroRedundancyOptimizer)
    bare.world_size = ranks
    # On the meta device tensors have sizes and no memory.
    bare.param_groups = [{"params": [torch.empty(size, device="meta") for size in sizes]}]
    return bare


def _torch_partition(bare: ZeroRedundancyOptimizer) -> list[list[dict[str, list[torch.Tensor]]]]:
    undeclared: Any = bare
    # Emptied, or a second call would return the first one's result.
    undeclared._partition_parameters_cache = []
    owners: list[list[dict[str, list[torch.Tensor]]]] = undeclared._partition_parameters()
    return owners


def _check_same_owners(bare: ZeroRedundancyOptimizer, specs: list[TensorSpec], ranks: int) -> None:
    owner = {
        id(param): rank for rank, groups in enumerate(_torch_partition(bare)) for g in groups for param in g["params"]
    }
    theirs = [owner[id(param)] for param in bare.param_groups[0]["params"]]
    ours = [shard.rank for shard in partition(specs, ranks).shards]
    if ours != theirs:
        raise AssertionError("ours and torch's choose different owners, so that their times cannot be compared")


if __name__ == "__main__":
    sys.exit(main())
