"""torch.distributed.checkpoint with the sharded optimizer: what it saves and loads."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.checkpointing import loaded, saved
from support.listed_state import assert_same
from support.training import (
    EVERYWHERE,
    assert_bitwise_equal,
    assert_same_state,
    cutting,
    small_model,
    train,
    twin_optimizers,
)
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")
SIZES = (1, 2, 3, 4)


@pytest.mark.ranks(3, backend=EVERYWHERE)
@pytest.mark.parametrize("partition", ["whole", "split"])
def test_it_is_used_while_one_rank_has_the_consolidated_state(rank: int, partition: str, ranks_tmp_path: Path) -> None:
    model, reference = small_model(), small_model()
    optimizer, plain = twin_optimizers((model, reference), optim.AdamW, partition)
    train(model, optimizer, range(2))
    train(reference, plain, range(5))
    optimizer.consolidate_state_dict(to=2)
    saved(model, optimizer, ranks_tmp_path, None, flat=False)
    # What was listed goes back into the same optimizer, and what was saved into others.
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, range(2, 4))
    optimizer.consolidate_state_dict(to=1)
    loaded(model, optimizer, ranks_tmp_path, None, flat=False)
    train(model, optimizer, range(2, 5))
    assert_bitwise_equal(model, reference, "after loading into consolidated state")
    fresh = small_model()
    resumed = ZeroRedundancyOptimizer(fresh.parameters(), optim.AdamW)
    loaded(fresh, resumed, ranks_tmp_path, None, flat=False)
    train(fresh, resumed, range(2, 5))
    assert_bitwise_equal(fresh, reference, "after loading into another optimizer")


@pytest.mark.ranks(3, backend=EVERYWHERE)
def test_only_the_rank_with_the_consolidated_state_hands_it_in(rank: int) -> None:
    model = small_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW)
    train(model, optimizer, range(2))
    own = optimizer.state_dict()
    stale = copy.deepcopy(own)
    train(model, optimizer, range(2, 3))
    optimizer.consolidate_state_dict(to=1)
    listed = optimizer.state_dict()
    before = copy.deepcopy(optimizer.optim.state_dict())
    with pytest.raises(DisagreementError, match="rank 0 was passed placeholders for state that it owns"):
        optimizer.load_state_dict(own if rank == 1 else listed)
    with pytest.raises(DisagreementError, match="rank 2 differs from rank 1: they were passed different checkpoints"):
        optimizer.load_state_dict(stale if rank == 2 else listed)
    assert_same_state(optimizer.optim.state_dict(), before)
    # These are the same values.
    optimizer.load_state_dict(own if rank == 2 else listed)
    assert_same_state(optimizer.optim.state_dict(), before)


class Counting(optim.SGD):
    """Keeps a number, a list and a dict for each tensor."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        result = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["count"] = state.get("count", 0) + 1
                state.setdefault("seen", [torch.zeros(2), 0])[0].add_(state["count"])
                state.setdefault("nested", {})["twice"] = param.detach() * 2
        return result


@pytest.mark.ranks(3, backend=EVERYWHERE)
def test_state_that_is_no_tensor_is_saved(rank: int, ranks_tmp_path: Path) -> None:
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    groups = {size: dist.new_group(list(range(size))) for size in SIZES[:3]}
    reference = small_model()
    plain = Counting(reference.parameters(), **settings)
    train(reference, plain, range(3))
    model = small_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Counting, **settings)
    train(model, optimizer, range(3))
    saved(model, optimizer, ranks_tmp_path / "ours", None, flat=False)
    if rank == 0:
        saved(reference, plain, ranks_tmp_path / "plain", groups[1], flat=False)
    dist.barrier()
    for source in ("ours", "plain"):
        if rank < 2:
            fresh = small_model()
            resumed = ZeroRedundancyOptimizer(fresh.parameters(), Counting, process_group=groups[2], **settings)
            loaded(fresh, resumed, ranks_tmp_path / source, groups[2], flat=False)
            resumed.consolidate_state_dict()
            if rank == 0:
                assert_same(resumed.state_dict()["state"], plain.state_dict()["state"])


@pytest.mark.ranks(3, backend=EVERYWHERE)
@pytest.mark.parametrize("partition", ["whole", "split"])
def test_more_ranks_than_trained_tensors_save_and_load(rank: int, partition: str, ranks_tmp_path: Path) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        model.bias.requires_grad_(False)
        return model

    model, reference = made(), made()
    plain = optim.AdamW(reference.parameters())
    train(reference, plain, range(4))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, partition=partition)
    train(model, optimizer, range(2))
    saved(model, optimizer, ranks_tmp_path, None, flat=False)
    fresh = made()
    resumed = ZeroRedundancyOptimizer(fresh.parameters(), optim.AdamW, partition=partition)
    loaded(fresh, resumed, ranks_tmp_path, None, flat=False)
    train(fresh, resumed, range(2, 4))
    assert_bitwise_equal(fresh, reference, "after loading")


@pytest.mark.ranks(2, backend=EVERYWHERE)
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_a_group_is_added_after_several_were_loaded(rank: int, flat: bool, ranks_tmp_path: Path) -> None:
    def trained(kind: Callable[..., optim.Optimizer], steps: range, source: Path | None) -> tuple[Any, Any]:
        model = small_model()
        first, second, third = (list(model[i].parameters()) for i in (0, 2, 3))
        optimizer = kind([{"params": first, "lr": 0.1}, {"params": second, "weight_decay": 0.1}])
        if source is not None:
            loaded(model, optimizer, source, None, flat=flat)
            optimizer.add_param_group({"params": third, "lr": 0.2})
        train(model, optimizer, steps)
        return model, optimizer

    def ours(groups: list[dict[str, Any]]) -> optim.Optimizer:
        return ZeroRedundancyOptimizer(groups, optim.AdamW)

    for name, kind in (("ours", ours), ("plain", optim.AdamW)):
        model, optimizer = trained(kind, range(2), None)
        saved(model, optimizer, ranks_tmp_path / name, None, flat=flat)
    results = [
        trained(kind, range(2, 4), ranks_tmp_path / name) for name, kind in (("plain", ours), ("ours", optim.AdamW))
    ]
    assert_bitwise_equal(results[0][0], results[1][0], "after loading and adding a group")
    saved(*results[0], ranks_tmp_path / "grown", None, flat=flat)


@pytest.mark.ranks(3, backend=EVERYWHERE)
def test_memory_formats_may_differ_between_saving_and_loading(ranks_tmp_path: Path) -> None:
    def made(memory_format: torch.memory_format) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 16, 3))
        return model.to(memory_format=memory_format)

    formats = {"channels last": torch.channels_last, "contiguous": torch.contiguous_format}
    reference = made(torch.contiguous_format)
    train(reference, optim.AdamW(reference.parameters()), range(4))
    for name, memory_format in formats.items():
        model = made(memory_format)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, partition=cutting("split"))
        train(model, optimizer, range(2))
        saved(model, optimizer, ranks_tmp_path / name, None, flat=False)
    for source, (name, memory_format) in itertools.product(formats, formats.items()):
        model = made(memory_format)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, partition=cutting("split"))
        loaded(model, optimizer, ranks_tmp_path / source, None, flat=False)
        train(model, optimizer, range(2, 4))
        assert_bitwise_equal(model, reference, f"saved as {source}, loaded as {name}")


@pytest.mark.ranks(3, backend=EVERYWHERE)
@pytest.mark.parametrize("partition", ["whole", "split"])
def test_odd_shapes_and_dtypes_are_saved_and_loaded(partition: str, ranks_tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.scalar = nn.Parameter(torch.randn(()))
            self.empty = nn.Parameter(torch.empty(0, 4))
            self.brain = nn.Parameter(torch.randn(300, 3).bfloat16())
            self.transposed = nn.Parameter(torch.randn(5, 200).t())
            self.imaginary = nn.Parameter(torch.randn(200, 2, dtype=torch.complex64))
            self.wide = nn.Parameter(torch.randn(1, 400, 1, dtype=torch.float64))

    reference = Odd()
    plain = optim.Adam(reference.parameters(), amsgrad=True)
    train(reference, plain, range(2))
    saved(reference, plain, ranks_tmp_path / "plain", None, flat=True)
    train(reference, plain, range(2, 4))

    def sharded(model: nn.Module) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(model.parameters(), optim.Adam, partition=cutting(partition), amsgrad=True)

    model = Odd()
    optimizer = sharded(model)
    train(model, optimizer, range(2))
    saved(model, optimizer, ranks_tmp_path / "ours", None, flat=True)
    for source in ("ours", "plain"):
        model = Odd()
        optimizer = sharded(model)
        loaded(model, optimizer, ranks_tmp_path / source, None, flat=True)
        train(model, optimizer, range(2, 4))
        assert_bitwise_equal(model, reference, f"after loading {source}")
