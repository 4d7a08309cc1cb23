"""Copies of what the optimizer lists: asynchronous saves, the stagers of torch, and what copies a dict of tensors."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.checkpointing import loaded
from support.combinations import each_of
from support.training import assert_bitwise_equal, cutting, small_model, train
from torch import nn, optim
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict, _offload_state_dict_to_cpu
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from zeroshard import ZeroRedundancyOptimizer
from zeroshard.state.placeholder import StatePlaceholder

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
KINDS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (optim.AdamW, {}),
    # Its state has no entry with one value for a whole tensor.
    "SGD": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}


def staging(*, shared: bool = False, in_thread: bool = False) -> DefaultStager:
    return DefaultStager(StagingOptions(False, shared, in_thread, False))


# What is given to async_save as its stager, and with which kinds of optimizers.
STAGERS: dict[str, tuple[Callable[[], Any], str]] = {
    "as by default": (lambda: None, "AdamW"),
    "DefaultStager": (staging, "AdamW"),
    "DefaultStager, shared memory": (lambda: staging(shared=True), "AdamW"),
    "DefaultStager in a thread": (lambda: staging(in_thread=True), "AdamW"),
    "BlockingAsyncStager": (BlockingAsyncStager, "SGD"),
}


@pytest.mark.ranks(2, backend="gloo")
@each_of("name", STAGERS, partition=["whole", "split"])
def test_an_asynchronous_save_has_the_values_of_the_moment_of_the_call(
    rank: int, name: str, partition: str, ranks_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, kind = STAGERS[name]
    optimizer_class, settings = KINDS[kind]
    model, sharded = stepped(kind, partition)
    reference = small_model()
    train(reference, optimizer_class(reference.parameters(), **settings), range(8))
    group, stager, written = dist.new_group(), make(), dcp.FileSystemWriter.write_data
    for number, first in enumerate((2, 5)):
        # Up to torch 2.12 the second use of a DefaultStager raises KeyError, whatever the state.
        stager = make() if torch.__version__ < "2.13" else stager
        trained = threading.Event()

        def write_late(*args: Any, trained: threading.Event = trained) -> Any:
            trained.wait()
            return written(*args)

        monkeypatch.setattr(dcp.FileSystemWriter, "write_data", write_late)
        states = dict(zip(("model", "optimizer"), get_state_dict(model, sharded, options=FLAT), strict=True))
        saving = dcp.async_save(
            states, checkpoint_id=ranks_tmp_path / str(number), process_group=group, async_stager=stager
        )
        if isinstance(saving, AsyncSaveResponse):
            saving.staging_completion.result()
            saving = saving.upload_completion
        train(model, sharded, range(first, first + 3))
        assert not saving.done()
        trained.set()
        saving.result()
    assert_bitwise_equal(model, reference, "while checkpoints were saved")
    for number, first in enumerate((2, 5)):
        loaded(model, sharded, ranks_tmp_path / str(number), None, flat=True)
        train(model, sharded, range(first, 8))
        assert_bitwise_equal(model, reference, f"resumed from step {first}")


def stepped(kind: str, partition: str) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    optimizer_class, settings = KINDS[kind]
    model = small_model()
    sharded = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, partition=cutting(partition), **settings)
    train(model, sharded, range(2))
    return model, sharded


def listed(kind: str, partition: str) -> dict[str, Any]:
    """What a rank lists, by name."""
    found: dict[str, Any] = get_optimizer_state_dict(*stepped(kind, partition), options=FLAT)
    assert any(isinstance(value, StatePlaceholder) for value in found.values())
    return found


def assert_same(copied: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """The same values, and placeholders where there are some."""
    assert copied.keys() == expected.keys()
    for key, value in expected.items():
        there = copied[key]
        assert type(there) is type(value), key
        if isinstance(value, StatePlaceholder):
            assert (there.shape, there.dtype, there.device) == (value.shape, value.dtype, value.device), key
            assert there.shard == value.shard, key
            there, value = there.part, value.part
        assert torch.equal(there, value) if isinstance(value, torch.Tensor) else there == value, key


def each(copy_one: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda given: {
        key: copy_one(value) if isinstance(value, torch.Tensor) else value for key, value in given.items()
    }


COPIES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "deepcopy of a dict": copy.deepcopy,
    "copy": each(copy.copy),
    "deepcopy": each(copy.deepcopy),
    "clone": each(torch.clone),
    "detach": each(torch.Tensor.detach),
    "to": each(lambda value: value.to("cpu")),
    "there and back": each(lambda value: value.to(torch.float64).to(value.dtype)),
    "zeros_like and copy_": each(lambda value: torch.zeros_like(value).copy_(value)),
    "empty_like and copy_": each(lambda value: torch.empty_like(value, device="cpu").copy_(value)),
    "_offload_state_dict_to_cpu": _offload_state_dict_to_cpu,
    "_copy_state_dict": lambda given: _copy_state_dict(given, copy.deepcopy(given)),
    "_copy_state_dict to zeros": lambda given: _copy_state_dict(given, each(torch.zeros_like)(given)),
    "DefaultStager": lambda given: staging().stage(given),
}
SHARE_MEMORY = {"copy", "detach", "to", "_offload_state_dict_to_cpu"}


@pytest.mark.ranks(2, backend="gloo")
@each_of("name", COPIES, partition=["whole", "split"])
def test_copies_have_the_parts_and_the_placeholders(name: str, partition: str) -> None:
    given = listed("AdamW", partition)
    before = copy.deepcopy(given)
    copied = COPIES[name](given)
    assert_same(copied, before)
    # As of any tensor: some share memory with what was copied, others do not.
    for value in given.values():
        part = value.part if isinstance(value, StatePlaceholder) else value
        if isinstance(part, torch.Tensor):
            part += 1
    assert_same(copied, given if name in SHARE_MEMORY else before)


def fill(given: dict[str, Any], tensor: Callable[[StatePlaceholder], object]) -> None:
    """Do something with each placeholder of one value, for which these functions of torch would put a 0."""
    for value in given.values():
        if isinstance(value, StatePlaceholder) and value.dim() == 0:
            tensor(value)


REFUSED: dict[str, Callable[[dict[str, Any]], object]] = {
    "BlockingAsyncStager": lambda given: BlockingAsyncStager().stage(given),
    "BlockingAsyncStager, type_check": lambda given: BlockingAsyncStager(type_check=True).stage(given),
    "_copy_state_dict to the CPU's": lambda given: _copy_state_dict(given, _create_cpu_state_dict(given)),
    "_create_cpu_state_dict, shared memory": lambda given: _create_cpu_state_dict(given, share_memory=True),
    "copy_ to a tensor": lambda given: fill(given, lambda value: torch.tensor(0.0).copy_(value)),
    "copy_ of a tensor": lambda given: fill(given, lambda value: value.copy_(torch.tensor(0.0))),
    "item": lambda given: fill(given, lambda value: value.item()),
    "float": lambda given: fill(given, float),
    "pickle": ForkingPickler.dumps,
}


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_lose_values_is_refused_by_name(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"state entry '\w+' of '[\w.]+' is partly or entirely on other ranks"):
        REFUSED[name](listed("AdamW", "whole"))


@pytest.mark.ranks(2, backend="gloo")
def test_a_save_that_cannot_be_staged_is_an_error_on_every_rank(rank: int, ranks_tmp_path: Path) -> None:
    given, group = {"optimizer": listed("AdamW", "whole")}, dist.new_group()
    # It is a BlockingAsyncStager too, and stages what it writes unless another stager is given.
    writer = dcp.FileSystemWriter(ranks_tmp_path)
    with pytest.raises(RuntimeError, match=r"async_stager=DefaultStager"):
        dcp.async_save(given, storage_writer=writer, process_group=group)
    dcp.async_save(given, storage_writer=writer, process_group=group, async_stager=staging()).result()
    loaded_back = copy.deepcopy(given)
    dcp.load(loaded_back, checkpoint_id=ranks_tmp_path)
    assert_same(loaded_back["optimizer"], given["optimizer"])


@pytest.mark.ranks(2, backend="gloo", isolation="process", timeout=120)
def test_a_save_in_another_process_is_refused_on_every_rank(ranks_tmp_path: Path) -> None:
    sharded = stepped("AdamW", "whole")[1]
    for given in (sharded.state_dict(), dict(sharded.state_dict())):
        saving = dcp.async_save(
            {"optimizer": given},
            checkpoint_id=ranks_tmp_path,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        with pytest.raises(RuntimeError, match="in a thread and not in another process"):
            saving.result()
    sharded.step()
