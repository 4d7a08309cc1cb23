"""foreach, fused, maximize and capturable: taken as the unsharded optimizer takes them, and kept in checkpoints."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import zeroshard.guard
from support.checkpointing import matrices
from support.ddp_training import register
from support.training import (
    ELEMENTWISE_OPTIMIZERS,
    assert_bitwise_equal,
    assert_same_state,
    cutting,
    set_gradients,
    twin_optimizers,
    twins,
)
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from zeroshard import ZeroRedundancyOptimizer
from zeroshard_comm import RankGroup

CLASSES = {name: item for name, item in ELEMENTWISE_OPTIMIZERS.items() if name == item[0].__name__}
CLASSES |= {"Adafactor": (optim.Adafactor, {}), "Muon": (optim.Muon, {}), "SGD": (optim.SGD, {"momentum": 0.9})}
ONLY_WHOLE = "captured in a CUDA graph only with the backend 'nccl' and if no tensor is cut"
WAYS: list[dict[str, Any]] = [{"foreach": True}, {"fused": True}, {"maximize": True}, {"capturable": True}]


def on_all_devices() -> Any:
    return pytest.mark.ranks(2, backend=["gloo", "nccl"])


def train(model: nn.Module, optimizer: optim.Optimizer, steps: range) -> str:
    """Return the error of the class, if it does not support this here."""
    try:
        for step in steps:
            set_gradients(model.parameters(), step)
            optimizer.step()
    except (RuntimeError, AssertionError) as error:
        return type(error).__name__
    return ""


@pytest.mark.by_default(
    "2-ASGD-foreach | 2-Adadelta-fused | 2-Adagrad-maximize | 2-Adam-capturable | 2-AdamW-foreach | "
    "2-Adamax-fused | 2-NAdam-maximize | 2-RAdam-capturable | 2-RMSprop-foreach | 2-Rprop-fused | "
    "2-SGD-maximize | 2-Adafactor-capturable | 2-Muon-foreach"
)
@on_all_devices()
@pytest.mark.parametrize("way", WAYS, ids=lambda way: next(iter(way)))
@pytest.mark.parametrize("name", CLASSES)
def test_each_implementation_is_taken_as_unsharded(rank: int, name: str, way: dict[str, Any]) -> None:
    optimizer_class, settings = CLASSES[name]
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    model, reference = (each.to(device) for each in twins(matrices))
    keywords = {"lr": 1e-2, **settings, **way}
    if not way.keys() <= inspect.signature(optimizer_class).parameters.keys():
        with pytest.raises(TypeError):
            ZeroRedundancyOptimizer(model.parameters(), optimizer_class, **keywords)
        return
    plain = optimizer_class(reference.parameters(), **keywords)
    partition = cutting("split") if name not in ("Adafactor", "Muon") else "whole"
    sharded = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, partition=partition, **keywords)
    failed = train(reference, plain, range(2))
    assert train(model, sharded, range(2)) == failed
    if failed:
        # As capturable=True on the CPU.
        assert_bitwise_equal(model, twins(matrices)[0].to(device), "after a step that its class has refused")
        return
    sharded.consolidate_state_dict()
    saved = sharded.state_dict() if rank == 0 else {}
    if rank == 0:
        assert_same_state(saved, plain.state_dict())
        assert all(saved["param_groups"][0][key] is value for key, value in way.items())
    other = copy.deepcopy(model)
    resumed = ZeroRedundancyOptimizer(other.parameters(), optimizer_class, **{"lr": 0.5, **settings})
    resumed.load_state_dict(saved, from_rank=0)
    expected = {key: value.device for key, value in next(iter(plain.state.values())).items() if torch.is_tensor(value)}
    for entries in resumed.optim.state.values():
        assert {key: value.device for key, value in entries.items() if torch.is_tensor(value)} == expected
    assert train(other, resumed, range(2, 4)) == train(reference, plain, range(2, 4)) == ""
    assert_bitwise_equal(other, reference, "resumed")


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("by_group", [False, True], ids=["argument", "group"])
def test_differentiable_is_refused_by_name(by_group: bool) -> None:
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    given = [{"params": params, "differentiable": True}] if by_group else params
    settings = {} if by_group else {"differentiable": True}
    with pytest.raises(ValueError, match=r"AdamW\(differentiable=True\) cannot be sharded"):
        ZeroRedundancyOptimizer(given, optim.AdamW, **settings)
    optimizer = ZeroRedundancyOptimizer(params, optim.AdamW)
    with pytest.raises(ValueError, match=r"AdamW\(differentiable=True\) cannot be sharded"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "differentiable": True})
    assert len(optimizer.param_groups) == 1


@pytest.mark.by_default("2-whole-gloo-all | 2-split-nccl-one")
@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("captures", [[0, 1], [1]], ids=["all", "one"])
@pytest.mark.parametrize(("partition", "backend"), [("whole", "gloo"), ("split", "nccl")])
def test_a_simulated_capture_is_refused_on_every_rank(
    rank: int, captures: list[int], partition: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reference = twins(matrices)
    sharded, plain = twin_optimizers((model, reference), optim.AdamW, partition, lr=0.01)
    train(model, sharded, range(1))
    with monkeypatch.context() as simulated:
        simulated.setattr(zeroshard.guard, "is_captured", lambda _: rank in captures)
        simulated.setattr(RankGroup, "backend", lambda *_: backend)
        with pytest.raises(RuntimeError, match=ONLY_WHOLE):
            sharded.step()
    train(model, sharded, range(1, 3))
    train(reference, plain, range(3))
    assert_bitwise_equal(model, reference, "after a capture that was refused")


@pytest.mark.ranks(2, backend="gloo")
def test_a_simulated_capture_of_a_backward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = matrices()
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW)
    register("reduce_to_owner_hook", ddp, optimizer)
    loss = ddp(torch.ones(2, 40)).sum()
    monkeypatch.setattr(zeroshard.guard, "is_captured", lambda _: True)
    with pytest.raises(RuntimeError, match=ONLY_WHOLE):
        loss.backward()
