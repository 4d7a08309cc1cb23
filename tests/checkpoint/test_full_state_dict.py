"""The whole state on one rank, by names: what torch gets of a plain optimizer with ``full_state_dict``."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import pytest
import torch
from support.combinations import FLAG, each_of
from support.listed_state import assert_listed, assert_same, leaves
from support.state_dict_functions import Pair, one, unwrapped
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel
from zeroshard import full_optimizer_state_dict
from zeroshard.state.placeholder import StatePlaceholder
from zeroshard_testing import raises_on

BOTH = (0, 1)
REFUSED = r"zeroshard\.full_optimizer_state_dict\(model, optimizer\)"


@pytest.mark.ranks(2, backend="gloo")
@each_of("partition", ["whole", "split"], flat=FLAG)
def test_a_full_state_dict_of_one_rank_refuses_to_be_read(rank: int, partition: str, flat: bool) -> None:
    pair = Pair(partition)
    pair.train(range(2))
    options = {"full_state_dict": True, "flatten_optimizer_state_dict": flat}
    ours, theirs = pair.get(**options)
    assert_listed(ours, theirs)
    expected, lacking = dict(leaves(theirs)), 0
    for path, value in leaves(ours):
        if isinstance(value, StatePlaceholder):
            lacking += 1
            save = functools.partial(torch.save, value, io.BytesIO())
            for read in (value.tolist, value.numpy, value.sum, value.norm, save):
                with pytest.raises(RuntimeError, match=REFUSED):
                    read()
        elif isinstance(value, torch.Tensor):
            # Never one rank's part as if it were all.
            assert torch.equal(value, expected[path])
    assert lacking > 0
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.save(ours, io.BytesIO())
    # With cpu_offload torch leaves the others out.
    on_rank_0 = pair.get(**options, cpu_offload=True)[0]
    with raises_on(RuntimeError, ranks=0, match=REFUSED):
        torch.save(on_rank_0, io.BytesIO())
    assert rank == 0 or on_rank_0 == {}


@pytest.mark.ranks(2, backend="gloo")
@each_of("partition", ["whole", "split"], wrap=[DistributedDataParallel, unwrapped], to=BOTH)
def test_full_optimizer_state_dict_is_what_torch_gets_of_a_plain_optimizer(
    rank: int, partition: str, wrap: Any, to: int
) -> None:
    pair = Pair(partition, wrap=wrap)
    # Also of state that does not exist yet.
    for steps in (range(0), range(2)):
        pair.train(steps)
        full = full_optimizer_state_dict(pair.model, pair.sharded[0], to=to)
        # Until the next step torch's function returns it on that rank, and placeholders alone elsewhere.
        ours, theirs = pair.get(full_state_dict=True)
        assert_listed(ours, theirs)
        for found in (full, ours) if rank == to else ():
            assert_same(found, theirs)
            torch.save(found, io.BytesIO())
        assert rank == to or full == {}


@pytest.mark.ranks(2, backend="gloo")
@each_of(
    "way",
    ["every rank", "broadcast", "without full_state_dict"],
    flat=FLAG,
    wrap=[DistributedDataParallel, unwrapped],
    partition=["whole", "split"],
)
def test_the_whole_state_of_a_plain_optimizer_is_loaded(
    rank: int, partition: str, wrap: Any, flat: bool, way: str
) -> None:
    pair = Pair(partition, one(betas=(0.8, 0.9)), wrap=wrap)
    pair.train(range(3))
    theirs = pair.get(flatten_optimizer_state_dict=flat)[1]
    given = copy.deepcopy(theirs) if rank == 0 or way != "broadcast" else {}
    # Of flattened state these options do not ask: torch cannot flatten and distribute in one call.
    options = StateDictOptions(
        full_state_dict=way != "without full_state_dict", broadcast_from_rank0=way == "broadcast"
    )
    # Into an optimizer without state, and into one that has gone on.
    for other in (Pair(partition, wrap=wrap), pair):
        other.go_on_from(pair.values())
        set_optimizer_state_dict(other.model, other.sharded, given, options=options)
        set_optimizer_state_dict(other.reference, other.plain, copy.deepcopy(theirs))
        assert rank != 0 or dict(leaves(given)).keys() == dict(leaves(theirs)).keys()
        assert_listed(*other.get())
        other.train(range(3, 5))
