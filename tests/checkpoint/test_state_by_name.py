"""State dicts whose keys are names of parameters, and the whole state by the names of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.combinations import PARTITIONS
from support.training import assert_bitwise_equal, assert_same_state, cutting, small_model, train, two_groups
from torch import optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from zeroshard import ZeroRedundancyOptimizer


def sharded_and_plain(partition: str = "whole", *, steps: int = 2) -> tuple[Any, ...]:
    model, reference = small_model(), small_model()
    sharded = ZeroRedundancyOptimizer(two_groups(model), optim.AdamW, partition=cutting(partition))
    plain = optim.AdamW(two_groups(reference))
    train(model, sharded, range(steps))
    train(reference, plain, range(steps))
    return model, sharded, reference, plain


def by_name(plain: optim.Optimizer, reference: torch.nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = get_optimizer_state_dict(reference, plain)
    return found


@pytest.mark.ranks(2, backend="gloo")
@PARTITIONS
def test_state_dicts_with_names_are_made_and_loaded(rank: int, partition: str) -> None:
    _, sharded, reference, plain = sharded_and_plain(partition)
    sharded.consolidate_state_dict(to=1)
    if rank == 1:
        assert_same_state(sharded.state_dict(keys="names"), by_name(plain, reference))
    given = by_name(plain, reference)
    # In another order, as files of other programs are.
    given["param_groups"].reverse()
    given["param_groups"][0]["params"].reverse()
    given["state"] = dict(reversed(given["state"].items()))
    fresh = small_model()
    fresh.load_state_dict(reference.state_dict())
    resumed = ZeroRedundancyOptimizer(two_groups(fresh), optim.AdamW, partition=cutting(partition))
    resumed.load_state_dict(given, keys="names")
    train(fresh, resumed, range(2, 4))
    train(reference, plain, range(2, 4))
    assert_bitwise_equal(fresh, reference, "after loading by name")
    resumed.load_state_dict(resumed.state_dict(keys="names"), keys="names")
    resumed.load_state_dict(given if rank == 0 else {}, keys="names", from_rank=0)


@pytest.mark.ranks(2, backend="gloo")
def test_names_that_do_not_fit_are_refused(rank: int) -> None:
    _, sharded, reference, plain = sharded_and_plain()
    before = sharded.optim.state_dict()
    given = by_name(plain, reference)

    extra = {**given, "state": {**given["state"], "head.weight": {}}}
    with pytest.raises(ValueError, match=r"the key 'head\.weight'"):
        sharded.load_state_dict(extra if rank == 1 else given, keys="names")
    first, second = given["param_groups"]
    lacking = {**given, "param_groups": [first, {**second, "params": second["params"][:-1]}]}
    with pytest.raises(ValueError, match=rf"has \[\], and only the optimizer has \['{second['params'][-1]}'\]"):
        sharded.load_state_dict(lacking, keys="names")
    moved = [{**first, "params": [*first["params"], second["params"][0]]}, {**second, "params": second["params"][1:]}]
    with pytest.raises(ValueError, match=r"parameters of group 0, which are \['0.weight'"):
        sharded.load_state_dict({**given, "param_groups": moved}, keys="names")
    assert_same_state(sharded.optim.state_dict(), before)


@pytest.mark.ranks(2, backend="gloo")
def test_parameters_without_names_have_no_such_state_dict() -> None:
    model = small_model()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW)
    train(model, sharded, range(1))
    with pytest.raises(ValueError, match="parameters of group 0 have no names"):
        sharded.state_dict(keys="names")
    with pytest.raises(ValueError, match="`keys` must be one of"):
        sharded.state_dict(keys="name")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`keys` must be one of"):
        sharded.load_state_dict(sharded.state_dict(), keys="name")  # type: ignore[arg-type]
