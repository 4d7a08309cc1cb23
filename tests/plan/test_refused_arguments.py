"""Parameters and settings that cannot be used: the same error on every rank, whoever was handed them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.combinations import WHERE, each_of
from support.refusals import assert_blames, is_mine
from support.training import assert_bitwise_equal, small_model, twins
from torch import nn, optim
from zeroshard import ZeroRedundancyOptimizer


def same_twice() -> list[dict[str, Any]]:
    param = nn.Parameter(torch.zeros(3))
    return [{"params": [param]}, {"params": [param]}]


BAD_PARAMS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "None": (lambda: None, TypeError, "iterable"),
    "a tensor": (lambda: torch.zeros(2), TypeError, "single"),
    "numbers": (lambda: [1.0, 2.0], TypeError, "float"),
    "text": (lambda: "weights", TypeError, "str"),
    "a tensor among dicts": (lambda: [{"params": []}, nn.Parameter(torch.zeros(1))], TypeError, "one kind"),
    "a name without its tensor": (lambda: [("weight", 3)], TypeError, "one kind"),
    "names for some": (
        lambda: [("w", nn.Parameter(torch.zeros(1))), nn.Parameter(torch.zeros(1))],
        TypeError,
        "one kind",
    ),
    "an exhausted generator": (lambda: (p for p in ()), ValueError, "empty parameter list"),
    "a generator that raises": (lambda: (len(3) for _ in "x"), TypeError, "no len"),  # type: ignore[arg-type]
    "a group without params": (lambda: [{"lr": 0.1}], ValueError, "'params'"),
    "a set": (lambda: set(small_model().parameters()), TypeError, "order"),
    "a set in a group": (lambda: [{"params": set(small_model().parameters())}], TypeError, "order"),
    "a number for a group's params": (lambda: [{"params": 3}], TypeError, "int"),
    "a tensor in two groups": (same_twice, ValueError, "more than one parameter group"),
    "on the meta device": (
        lambda: [("weight", nn.Parameter(torch.zeros(3, device="meta")))],
        ValueError,
        r"parameter 0 of group 0 \('weight'\), of shape \(3,\), is on the meta device and has no values",
    ),
    "a tensor that is no leaf": (lambda: [nn.Parameter(torch.zeros(3)) * 2], ValueError, "non-leaf"),
}


@pytest.mark.ranks(2, backend="gloo")
@each_of("name", BAD_PARAMS, where=WHERE)
def test_params_that_cannot_be_used(rank: int, where: str, name: str) -> None:
    make, error, words = BAD_PARAMS[name]
    with pytest.raises(error, match=words) as caught:
        ZeroRedundancyOptimizer(make() if is_mine(where, rank) else small_model().parameters(), optim.Adam)
    assert_blames(caught.value, where)


BAD_SETTINGS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "learning rate": ({"lr": -1.0}, ValueError, "Invalid learning rate"),
    "unknown argument": ({"no_such": 1}, TypeError, "no_such"),
    "exclusive arguments": ({"fused": True, "foreach": True}, RuntimeError, "fused"),
    "LBFGS": ({"optimizer_class": optim.LBFGS}, ValueError, "LBFGS cannot be sharded"),
    "no optimizer": ({"optimizer_class": 3}, TypeError, "must be an optimizer class"),
    "cost": ({"cost": lambda spec: "heavy"}, TypeError, "cost of tensor 'param.0' should be a number, but is 'heavy'"),
}


@pytest.mark.ranks(3, backend="gloo")
@each_of("name", BAD_SETTINGS, where=WHERE)
def test_settings_that_cannot_be_used(rank: int, where: str, name: str) -> None:
    bad, error, words = BAD_SETTINGS[name]
    model, untouched = twins()
    settings = {"optimizer_class": optim.Adam, "parameters_as_bucket_view": True}
    with pytest.raises(error, match=words) as caught:
        ZeroRedundancyOptimizer(model.parameters(), **(settings | bad if is_mine(where, rank) else settings))
    assert_blames(caught.value, where)
    assert_bitwise_equal(model, untouched, "after the refused construction")
    bases = [param.untyped_storage().nbytes() == param.nbytes for param in model.parameters()]
    assert all(bases), "no parameter lies in a flat buffer"
