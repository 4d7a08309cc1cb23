"""Checkpoints of an optimizer with a class per param group, and of a plain optimizer for each class."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from support.training import EVERYWHERE, assert_bitwise_equal, twins
from support.two_classes import language_model, parted, separate, sharded, step_all
from torch import optim
from zeroshard import ZeroRedundancyOptimizer, join_state_dicts, split_state_dict
from zeroshard_comm import DisagreementError

pytestmark = pytest.mark.usefixtures("tensors_on_the_device")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_checkpoint_goes_to_and_from_separate_optimizers(rank: int) -> None:
    model, reference = twins(language_model)
    optimizer, plain = sharded(model), separate(reference)
    step_all(model, [optimizer], 0)
    step_all(reference, plain, 0)
    optimizer.consolidate_state_dict(to=0)
    buffer = io.BytesIO()
    torch.save(join_state_dicts([each.state_dict() for each in plain], optimizer.group_assignment), buffer)
    buffer.seek(0)
    other = sharded(copied := copy.deepcopy(reference))
    other.load_state_dict(torch.load(buffer, weights_only=True))
    if rank == 0:
        for each, part in zip(plain, split_state_dict(optimizer.state_dict(), [0, 1, 1]), strict=True):
            each.load_state_dict(part)
    for step in range(1, 3):
        step_all(model, [optimizer], step)
        step_all(copied, [other], step)
        step_all(reference, plain, step)
        assert_bitwise_equal(model, reference, f"after step {step}")
        assert_bitwise_equal(copied, reference, f"after step {step}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_plain_checkpoint_is_loaded_into_the_groups_of_one_class() -> None:
    model, reference = twins(language_model)
    optimizer, plain = sharded(model), separate(reference)
    step_all(model, [optimizer], 0)
    step_all(reference, plain, 0)
    # The others keep their state.
    other = separate(copy.deepcopy(reference))[1]
    other.load_state_dict(plain[1].state_dict())
    for entries in other.state.values():
        entries["exp_avg"].mul_(0.5)
    optimizer.load_state_dict(other.state_dict(), group=1)
    plain[1].load_state_dict(other.state_dict())
    for step in range(1, 3):
        step_all(model, [optimizer], step)
        step_all(reference, plain, step)
        assert_bitwise_equal(model, reference, f"after step {step}")


@pytest.mark.ranks(2, backend=EVERYWHERE)
def test_a_checkpoint_is_loaded_after_a_class_with_a_name_of_an_older_group_was_added() -> None:
    model = language_model()
    hidden, outer, rest = parted(model)
    optimizer = ZeroRedundancyOptimizer(
        [{"params": hidden, "optimizer_class": optim.Muon, "momentum_decay": 0.5}, {"params": outer}], optim.AdamW
    )
    optimizer.add_param_group({"params": rest, "optimizer_class": optim.NAdam})
    step_all(model, [optimizer], 0)
    assert optimizer.param_groups[0]["momentum_decay"] == 0.5
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.ranks(2)
def test_the_group_of_a_load_is_the_same_on_all_ranks(rank: int) -> None:
    model = language_model()
    optimizer = sharded(model)
    with pytest.raises(DisagreementError, match=r"group of load_state_dict\(\) is 0 on rank 0 and 1 on rank 1"):
        optimizer.load_state_dict(separate(language_model())[rank].state_dict(), group=rank)
    step_all(model, [optimizer], 0)


@pytest.mark.ranks(2)
def test_loads_that_do_not_fit_the_classes_are_refused() -> None:
    model = language_model()
    optimizer, plain = sharded(model), separate(model)
    step_all(model, [optimizer], 0)
    whole: Any = optimizer.state_dict()
    for group in (5, -1, True, "a"):
        with pytest.raises(ValueError, match=r"load_state_dict\(group=.*\): expected a group from 0 to 2"):
            optimizer.load_state_dict(plain[0].state_dict(), group=group)  # type: ignore[arg-type] # that is tried
    with pytest.raises(TypeError, match="with 'state' and 'param_groups'"):
        optimizer.load_state_dict({"state": {}}, group=0)
    with pytest.raises(ValueError, match="state under 'count', which belongs to no parameter"):
        optimizer.load_state_dict({**whole, "state": {**whole["state"], "count": 3}})
    whole["param_groups"][0]["optimizer_class"] = optim.Muon
    with pytest.raises(ValueError, match="group 0 has 'optimizer_class', which no state dict has"):
        optimizer.load_state_dict(whole)
    # A hook may return something else than the state.
    optimizer.register_state_dict_post_hook(lambda _, found: {"optimizer": found})
    optimizer.load_state_dict(plain[0].state_dict(), group=0)
