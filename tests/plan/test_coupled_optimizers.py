"""An optimizer that couples tensors is refused on every rank, unless the caller lets it; here, one of that name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.combinations import VIEWS, WHERE, each_of
from support.refusals import assert_blames, is_mine
from support.training import assert_bitwise_equal, set_gradients, small_model, twins
from torch import optim
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_testing import assert_replicas_equal


class Clipping(optim.SGD):
    """Descends, its gradients clipped by one norm; in the table by the name of another class."""

    def __init__(self, params: Any, lr: float = 0.1, max_grad_norm: float = 0.0) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group.setdefault("max_grad_norm", max_grad_norm)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if group["max_grad_norm"]:
                torch.nn.utils.clip_grad_norm_(group["params"], group["max_grad_norm"])
        return super().step(closure)


Clipping.__module__, Clipping.__qualname__ = "pytorch_optimizer.optimizer.adan", "Adan"
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "argument": (Clipping, {}, {"max_grad_norm": 0.5}),
    "partial": (functools.partial(functools.partial(Clipping, max_grad_norm=0.5), lr=0.2), {}, {}),
    "group": (Clipping, {"max_grad_norm": 0.5}, {}),
    "function": (lambda params: Clipping(params, max_grad_norm=0.5), {}, {}),
}


@pytest.mark.ranks(3, backend="gloo")
@each_of("setting", CALLS, where=WHERE)
def test_every_rank_refuses_a_class_that_couples_tensors(rank: int, setting: str, where: str) -> None:
    factory, group, defaults = CALLS[setting]
    params = [{"params": list(small_model().parameters()), **group}]
    coupled: Any = "refuse" if is_mine(where, rank) else "allow"
    with pytest.raises(ValueError, match=r"pytorch_optimizer\.Adan with max_grad_norm=0\.5 couples tensors") as raised:
        ZeroRedundancyOptimizer(params, factory, coupled=coupled, **defaults)
    assert_blames(raised.value, where)


@pytest.mark.ranks(3, backend="gloo")
def test_a_group_that_would_couple_is_refused_and_training_goes_on() -> None:
    model, reference = twins()
    sharded = ZeroRedundancyOptimizer(model.parameters(), Clipping)
    with pytest.raises(ValueError, match="couples tensors"):
        sharded.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "max_grad_norm": 1.0})
    plain = Clipping(reference.parameters())
    for module, optimizer in ((model, sharded), (reference, plain)):
        set_gradients(module.parameters(), 0)
        optimizer.step()
    assert_bitwise_equal(model, reference, "after the refused group")


@pytest.mark.ranks(3, backend="gloo")
@VIEWS
def test_where_the_caller_lets_it_replicas_are_equal_and_differ_from_one_process(as_bucket_view: bool) -> None:
    model, reference = twins()
    sharded = ZeroRedundancyOptimizer(
        model.parameters(), Clipping, coupled="allow", parameters_as_bucket_view=as_bucket_view, max_grad_norm=0.5
    )
    plain = Clipping(reference.parameters(), max_grad_norm=0.5)
    for step in range(3):
        for module, optimizer in ((model, sharded), (reference, plain)):
            set_gradients(module.parameters(), step)
            optimizer.step()
        assert_replicas_equal(model.parameters())
    with pytest.raises(AssertionError, match="differs from the unsharded run"):
        assert_bitwise_equal(model, reference, "as each rank clips its own")


@pytest.mark.ranks(2, backend="gloo")
def test_another_word_is_refused_on_every_rank(rank: int) -> None:
    word: Any = "maybe" if rank == 1 else "refuse"
    with pytest.raises(ValueError, match="rank 1: `coupled` must be 'refuse' or 'allow', but got 'maybe'"):
        ZeroRedundancyOptimizer(small_model().parameters(), optim.SGD, coupled=word)
