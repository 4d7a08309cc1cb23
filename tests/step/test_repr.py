"""What an optimizer says of itself when it is printed: on one rank alone, at any time."""

from __future__ import annotations

import re

import pytest
import torch
from support.training import set_gradients, small_model
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_integrations.ddp import register_reduce_to_owner

SIZE = r"([\d.]+) (bytes|kB|MB)"


def sizes_in(line: str) -> list[float]:
    """All sizes of a line, in bytes."""
    return [float(number) * {"bytes": 1, "kB": 1e3, "MB": 1e6}[unit] for number, unit in re.findall(SIZE, line)]


def lines_of(optimizer: optim.Optimizer) -> dict[str, str]:
    return dict(line.strip().split(": ", 1) for line in repr(optimizer).splitlines()[1:])


def state_bytes(optimizer: optim.Optimizer) -> int:
    return sum(tensor.nbytes for entries in optimizer.state.values() for tensor in entries.values())


@pytest.mark.by_default("2-whole | 3-split")
@pytest.mark.ranks(2, 3, backend="gloo")
@pytest.mark.parametrize("partition", ["whole", "split"])
def test_bytes_of_state_here_and_of_all_ranks(rank: int, world_size: int, partition: str) -> None:
    model, twin = nn.Linear(1000, 600), nn.Linear(1000, 600)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, partition=partition)
    plain = optim.AdamW(twin.parameters())
    for module in (model, twin):
        set_gradients(module.parameters(), 0)
    optimizer.step()
    plain.step()
    if rank == 0:
        # On one rank alone.
        first, *_ = repr(optimizer).splitlines()
        assert first == f"ZeroRedundancyOptimizer of AdamW, rank 0 of {world_size}, partition {partition!r}"
        said = lines_of(optimizer)
        assert said["group 0"] == "2 tensors, lr 0.001"
        here, total = sizes_in(said["state here"])
        assert here == pytest.approx(state_bytes(optimizer.optim), rel=0.01)
        assert total == pytest.approx(state_bytes(plain), rel=0.01)
        owned, of = sizes_in(said["parameters here"])
        assert (owned, of) == pytest.approx((here / 2, total / 2), rel=0.01)


@pytest.mark.ranks(3, backend="gloo")
def test_there_may_be_no_state(rank: int) -> None:
    model = nn.Linear(3, 2)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1, momentum=0.9)
    assert lines_of(optimizer)["state"] == "none yet"
    set_gradients(model.parameters(), 0)
    optimizer.step()
    said = lines_of(optimizer)
    # There are two tensors.
    assert said["parameters here"].startswith("0 of 2" if rank == 2 else "1 of 2")
    if rank == 2:
        assert said["state here"] == "0 bytes of 32 bytes"
    plain = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1)
    plain.step()
    assert lines_of(plain)["state"] == "none yet"


@pytest.mark.ranks(1, backend="gloo")
def test_one_rank_alone() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = ZeroRedundancyOptimizer(embedding.parameters(), optim.SparseAdam)
    embedding(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    said = lines_of(optimizer)
    assert sizes_in(said["state here"]) == pytest.approx([2 * 40 * 4] * 2, abs=8)


@pytest.mark.ranks(2, backend="gloo")
def test_frozen_parameters_and_several_groups_and_a_hook(rank: int) -> None:
    model = small_model()
    model[0].requires_grad_(False)
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2:].parameters()), "lr": 0.5}]
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    groups.append({"params": list(model[1].parameters())})
    optimizer = ZeroRedundancyOptimizer(groups, optim.Adam)
    register_reduce_to_owner(ddp, optimizer)
    ddp(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    said = lines_of(optimizer)
    assert said["group 1"] == "5 tensors, lr 0.5"
    here, total = sizes_in(said["state here"])
    trained = sum(param.nbytes for param in model.parameters() if param.requires_grad)
    assert total == pytest.approx(2 * trained, rel=0.01)
    assert here == pytest.approx(state_bytes(optimizer.optim), rel=0.01)


def test_one_that_was_not_built_can_be_printed() -> None:
    assert "ZeroRedundancyOptimizer" in repr(object.__new__(ZeroRedundancyOptimizer))
