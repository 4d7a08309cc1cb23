"""Optimizer state handed to fully sharded data parallel and back, by torch.distributed.checkpoint and in memory.

Every rank trains on the same batch, so that all gradients are replicated, and equal to those of the plain model.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.combinations import FLAG, each_of
from support.listed_state import assert_same
from support.training import cutting, small_model
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer, full_optimizer_state_dict

# FSDP's older functions and what they use are deprecated, and still what files were written with.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*(_get_pg_default_device|Multiple backends):UserWarning"),
]
Run = tuple[nn.Module, optim.Optimizer]


def two_groups(model: nn.Module, *, named: bool = False) -> list[dict[str, Any]]:
    """Not in the order of the model; names begin with the number of the layer."""
    params = [(re.sub(r"(_fsdp_wrapped_)?module\.", "", name), param) for name, param in model.named_parameters()]
    first = [pair if named else pair[1] for pair in params if pair[0][0] in "23"]
    others = [pair if named else pair[1] for pair in params if pair[0][0] not in "23"]
    return [{"params": first, "weight_decay": 0.2}, {"params": others, "lr": 0.03}]


def plain(kind: Any, **settings: Any) -> Run:
    model = small_model()
    return model, kind(two_groups(model), **settings)


def sharded(partition: str, kind: Any, *, named: bool = False, **settings: Any) -> Run:
    model = small_model()
    params = two_groups(model, named=named)
    optimizer = ZeroRedundancyOptimizer(params, kind, partition=cutting(partition), **settings)
    return DistributedDataParallel(model), optimizer


def fsdp2(kind: Any, **settings: Any) -> Run:
    model, mesh = small_model(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    return model, kind(two_groups(model), **settings)


def fsdp1(kind: Any, *, flat: bool, **settings: Any) -> Run:
    """With one flat parameter per layer, or the original ones as views."""
    model = FullyShardedDataParallel(
        small_model(),
        device_id=torch.device("cpu"),
        use_orig_params=not flat,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear, nn.LayerNorm}),
        # The mesh, or state dicts have ShardedTensors, which the CPU can write and not gather.
    )
    return model, kind(two_groups(model), **settings)


MAKERS: dict[str, Callable[..., Run]] = {
    "fsdp2": fsdp2,
    "fsdp1": partial(fsdp1, flat=True),
    "fsdp1 with original parameters": partial(fsdp1, flat=False),
}


def train(run: Run, steps: Iterable[int], *, unused: str = "none") -> None:
    model, optimizer = run
    for step in steps:
        batch = torch.randn(8, 40, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        for name, param in model.named_parameters():
            param.grad = None if name.endswith(unused) else param.grad
        optimizer.step()
    optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, Any]:
    return copy.deepcopy(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))


def saved(run: Run, path: Path, *, flat: bool) -> None:
    states = get_state_dict(*run, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=path)


def loaded(run: Run, path: Path, *, flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    states = dict(zip(("model", "optimizer"), get_state_dict(*run, options=options), strict=True))
    dcp.load(states, checkpoint_id=path)
    set_state_dict(*run, model_state_dict=states["model"], optim_state_dict=states["optimizer"], options=options)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (optim.AdamW, {"lr": 0.01}),
        pytest.param(optim.SGD, {"lr": 0.1, "momentum": 0.9}, marks=pytest.mark.exhaustive),
    ],
    ids=["AdamW", "SGD"],
)
@pytest.mark.parametrize(
    ("name", "flat"),
    # What FSDP1 lists unflattened has param groups on rank 0 alone, which only its own files fit.
    [
        ("fsdp2", False),
        pytest.param("fsdp2", True, marks=pytest.mark.exhaustive),
        ("fsdp1", True),
        ("fsdp1 with original parameters", True),
    ],
)
def test_what_fsdp_has_saved_is_loaded_by_ours_and_the_reverse(
    name: str, flat: bool, kind: Any, settings: dict[str, Any], ranks_tmp_path: Path
) -> None:
    makers: dict[str, Callable[..., Run]] = {
        "plain": plain,
        name: MAKERS[name],
        "whole": partial(sharded, "whole"),
        "split": partial(sharded, "split"),
    }
    runs = {each: make(kind, **settings) for each, make in makers.items()}
    at_save = None
    for each, run in runs.items():
        train(run, range(3))
        saved(run, ranks_tmp_path / each, flat=flat)
        at_save = at_save or values(run[0])
        assert_same(values(run[0]), at_save)
    train(runs["plain"], range(3, 6))
    for source, target in ((name, "whole"), (name, "split"), ("whole", name), ("split", name)):
        run = makers[target](kind, **settings)
        loaded(run, ranks_tmp_path / source, flat=flat)
        assert_same(values(run[0]), at_save)
        train(run, range(3, 6))
        assert_same(values(run[0]), values(runs["plain"][0]))


@pytest.mark.ranks(2, backend="gloo")
@each_of("partition", ["whole", "split"], broadcast=FLAG)
def test_full_state_goes_to_and_from_fsdp2(rank: int, partition: str, broadcast: bool) -> None:
    reference, ours, theirs = plain(optim.AdamW), sharded(partition, optim.AdamW), fsdp2(optim.AdamW)
    for run in (reference, ours, theirs):
        train(run, range(3))
    on_rank_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
    expected = copy.deepcopy(get_optimizer_state_dict(*reference))
    found = {"ours": full_optimizer_state_dict(*ours), "fsdp2": get_optimizer_state_dict(*theirs, options=on_rank_0)}
    for state_dict in found.values() if rank == 0 else ():
        assert_same(state_dict, expected)
    at_save = values(reference[0])
    train(reference, range(3, 6))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    for source, run in (("ours", fsdp2(optim.AdamW)), ("fsdp2", sharded(partition, optim.AdamW))):
        given = [found[source]]
        if not broadcast:
            dist.broadcast_object_list(given)
        set_model_state_dict(run[0], copy.deepcopy(at_save) if rank == 0 or not broadcast else {}, options=options)
        set_optimizer_state_dict(*run, given[0], options=options)
        train(run, range(3, 6))
        assert_same(values(run[0]), values(reference[0]))


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("partition", ["whole", "split"])
def test_full_state_goes_to_and_from_fsdp1_by_name_and_by_index(rank: int, partition: str) -> None:
    def make() -> Run:
        return sharded(partition, optim.AdamW, named=True)

    # With original parameters, torch's full state has each entry's values in all entries of the same shape, on the CPU.
    reference, ours, theirs = plain(optim.AdamW), make(), MAKERS["fsdp1"](optim.AdamW)
    for run in (reference, ours, theirs):
        train(run, range(3))
    at_save = values(reference[0])
    by_name = FullyShardedDataParallel.full_optim_state_dict(*theirs, rank0_only=False)
    by_index = FullyShardedDataParallel.rekey_optim_state_dict(
        by_name, OptimStateKeyType.PARAM_ID, reference[0], optim=reference[1]
    )
    ours[1].consolidate_state_dict()
    out = [ours[1].state_dict(keys="names")]
    if rank == 0:
        assert_same(out[0]["state"], by_name["state"])
        assert_same(ours[1].state_dict()["state"], by_index["state"])
    dist.broadcast_object_list(out)
    train(reference, range(3, 6))
    for keys, given in (("names", by_name), ("indices", by_index)):
        for from_rank in (None, 0):
            run = make()
            run[0].module.load_state_dict(at_save)
            run[1].load_state_dict(given if from_rank in (None, rank) else {}, from_rank=from_rank, keys=keys)
            train(run, range(3, 6))
            assert_same(values(run[0]), values(reference[0]))
    for name in ("fsdp1", "fsdp1 with original parameters"):
        for scatter in (False, True):
            model, optimizer = MAKERS[name](optim.AdamW)
            set_model_state_dict(model, copy.deepcopy(at_save), options=StateDictOptions(full_state_dict=True))
            given = copy.deepcopy(out[0])
            if scatter:
                loadable = FullyShardedDataParallel.scatter_full_optim_state_dict(
                    given if rank == 0 else None, model, optim=optimizer
                )
            else:
                loadable = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, given)
            optimizer.load_state_dict(loadable)
            train((model, optimizer), range(3, 6))
            assert_same(values(model), values(reference[0]))


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("name", MAKERS)
def test_parameters_that_were_never_stepped_have_no_state_there(rank: int, name: str) -> None:
    reference, ours = plain(optim.AdamW), sharded("split", optim.AdamW)
    for run in (reference, ours):
        train(run, range(3), unused="4.weight")
    found = [full_optimizer_state_dict(*ours)]
    dist.broadcast_object_list(found)
    assert_same(found[0], get_optimizer_state_dict(*reference))
    model, optimizer = MAKERS[name](optim.AdamW)
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, values(reference[0]), options=options)
    if name == "fsdp2":
        set_optimizer_state_dict(model, optimizer, found[0], options=options)
        # Torch keeps the state that it has made to learn which there is.
        optimizer.state.pop(model[4].weight)
    else:
        optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, found[0]))
    for run in (reference, (model, optimizer)):
        train(run, range(3, 6))
    assert_same(values(model), values(reference[0]))
