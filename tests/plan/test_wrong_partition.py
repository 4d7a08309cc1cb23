"""Partitions that cannot be, and plans that differ between ranks: the same error on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.combinations import VIEWS, WHERE, each_of
from support.refusals import Run, assert_blames, is_mine
from support.training import cutting, set_gradients, small_model, train_equally, twins
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import DisagreementError
from zeroshard_core import TensorSpec
from zeroshard_integrations.ddp import register_reduce_to_owner
from zeroshard_testing import assert_replicas_equal


def everything_to_the_last(tensors: Sequence[TensorSpec], loads: Sequence[float], cost: Any) -> list[tuple[int, ...]]:
    return [(len(loads) - 1,)] * len(tensors)


@pytest.mark.ranks(2, backend="gloo")
def test_a_function_may_place_all_tensors_on_one_rank(rank: int) -> None:
    pair = twins()
    sharded = ZeroRedundancyOptimizer(pair[0].parameters(), optim.Adam, partition=everything_to_the_last)
    train_equally(pair, (sharded, optim.Adam(pair[1].parameters())), range(2))
    assert len(sharded.optim.state) == (0 if rank == 0 else len(list(pair[0].parameters())))


def returning(owners: Any) -> Callable[..., Any]:
    def mine(tensors: Sequence[TensorSpec], *_: object) -> Any:
        return [owners] * len(tensors)

    return mine


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "an unknown name": ("diagonal", ValueError, "unknown strategy 'diagonal'; choose one of 'whole'"),
    "a number": (3, TypeError, r"a strategy must be one of 'whole'.* but is 3 \(int\)"),
    "a function that returns None": (lambda *_: None, TypeError, "the owners of each of 9 tensors, but returned None"),
    "owners of too few tensors": (lambda *_: [(0,)], TypeError, "the owners of each of 9 tensors, but returned"),
    "a number for a tuple": (returning(0), TypeError, r"'mine' should return a tuple of ranks .* is 0 \(int\)"),
    "a rank that is not": (returning((7,)), ValueError, r"distinct owners among ranks 0 to 2, but has \[7\]"),
    "a rank twice": (returning((1, 1)), ValueError, r"distinct owners among ranks 0 to 2, but has \[1, 1\]"),
    "more parts than rows": (returning((0, 1, 2)), ValueError, "can be cut into 1 parts only"),
    "a function that raises": (lambda *_: [][0], IndexError, "list index out of range"),
}


@pytest.mark.ranks(3, backend="gloo")
@each_of("name", WRONG, where=WHERE)
def test_a_partition_that_cannot_be_is_refused_on_every_rank(rank: int, where: str, name: str) -> None:
    wrong, error, words = WRONG[name]
    with pytest.raises(error, match=words) as caught:
        ZeroRedundancyOptimizer(
            small_model().parameters(), optim.Adam, partition=wrong if is_mine(where, rank) else "whole"
        )
    assert_blames(caught.value, where)


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("where", WHERE)
def test_tensors_of_a_class_that_is_not_elementwise_are_not_cut(rank: int, where: str) -> None:
    class Unlisted(optim.SGD):
        pass

    how: dict[str, Any] = {"partition": cutting("split"), "lr": 0.1}
    for unlisted in (Unlisted, optim.Adafactor):
        kind = unlisted if is_mine(where, rank) else optim.SGD
        with pytest.raises(ValueError, match=f"{unlisted.__name__} is not known to be elementwise") as caught:
            ZeroRedundancyOptimizer(small_model().parameters(), kind, **how)
        assert_blames(caught.value, where)
    ZeroRedundancyOptimizer(small_model().parameters(), Unlisted, elementwise=True, **how)


Named = list[tuple[str, torch.Tensor]]
OTHER_PLANS: dict[str, tuple[Callable[[Named], Named], str]] = {
    "a tensor missing": (lambda named: named[:-1], "tensor 8 '4.weight' is here only"),
    "another order": (lambda named: [named[1], named[0], *named[2:]], "another order: tensor 0"),
    "another shape": (lambda named: [("0.weight", nn.Parameter(torch.zeros(3))), *named[1:]], r"shape .* \(3,\) there"),
    "another dtype": (lambda named: [(n, nn.Parameter(p.detach().double())) for n, p in named], "dtype"),
    "frozen": (lambda named: [(n, p.requires_grad_(n != "2.weight")) for n, p in named], "tensor 4 '2.weight'"),
}


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("name", OTHER_PLANS)
def test_a_plan_that_differs_is_named_on_every_rank(rank: int, name: str) -> None:
    change, words = OTHER_PLANS[name]
    named = list(small_model().named_parameters())
    with pytest.raises(DisagreementError, match=f"rank 2 differs from rank 0: .*{words}"):
        ZeroRedundancyOptimizer(change(named) if rank == 2 else named, optim.Adam)


@pytest.mark.ranks(2, backend="gloo")
def test_owners_that_differ_are_named_on_every_rank(rank: int) -> None:
    partition: Any = everything_to_the_last if rank == 1 else "whole"
    with pytest.raises(DisagreementError, match=r"tensor \d .* belongs to rank \d here, to rank \d there"):
        ZeroRedundancyOptimizer(small_model().parameters(), optim.Adam, partition=partition)


@pytest.mark.ranks(2, backend="gloo")
def test_unnamed_parameters_in_another_order_are_found_by_a_hook(rank: int) -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)))
    params = list(ddp.parameters())
    optimizer = ZeroRedundancyOptimizer(params[::-1] if rank else params, optim.Adam)
    with pytest.raises(DisagreementError, match=r"rank 1 differs from rank 0: another order: tensor 0 is "):
        register_reduce_to_owner(ddp, optimizer)
    assert not optimizer.takes_buckets
    assert [spec.name for spec in optimizer.plan.tensors] == ["param.0", "param.1"]


@pytest.mark.ranks(3, backend="gloo")
@VIEWS
def test_a_plan_that_differs_since_one_rank_has_frozen_a_tensor_can_be_mended(rank: int, as_bucket_view: bool) -> None:
    run = Run(optim.SGD, {"lr": 0.1}, parameters_as_bucket_view=as_bucket_view)
    weight = list(run.model.parameters())[4]
    for _ in range(2):
        weight.requires_grad_(rank != 2)
        set_gradients(run.model.parameters(), 5)
        with pytest.raises(DisagreementError, match=r"tensor 4 'param.4' .*frozen on rank 2"):
            run.sharded.step()
        assert_replicas_equal(run.model.parameters())
    weight.requires_grad_(True)
    run.reference.load_state_dict(run.model.state_dict())
    run.assert_goes_on()
