"""State dicts of ours compared with the plain optimizer's: values, and what each rank lists of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex
from zeroshard.state.placeholder import StatePlaceholder


def leaves(value: Any, *path: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield what the containers hold, with its keys and positions."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, *path, key)
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            yield from leaves(item, *path, position)
    else:
        yield path, value


def assert_same(actual: Any, expected: Any) -> None:
    """Compare all values bitwise, with their keys, shapes and dtypes."""
    ours, theirs = dict(leaves(actual)), dict(leaves(expected))
    assert ours.keys() == theirs.keys()
    for path, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert not isinstance(ours[path], StatePlaceholder), path
            assert (ours[path].shape, ours[path].dtype) == (value.shape, value.dtype), path
            assert torch.equal(ours[path], value), path
        else:
            assert ours[path] == value, path


def assert_listed(actual: Any, expected: Any, replicated: Collection[str] = ()) -> None:
    """Compare what a rank lists with all values: it is a part of them, and each element lies on one rank. Collective.

    Boxes of parts are asked for as torch.distributed.checkpoint asks.

    Args:
        actual: with placeholders.
        expected: without.
        replicated: names of parameters whose state lies on every rank.
    """
    ours, theirs = dict(leaves(actual)), dict(leaves(expected))
    assert ours.keys() == theirs.keys()
    held = torch.zeros(len(theirs), dtype=torch.int64)
    for number, (path, value) in enumerate(theirs.items()):
        listed = ours[path]
        if not isinstance(value, torch.Tensor):
            # A number of another rank's state is listed as a tensor.
            assert isinstance(listed, StatePlaceholder) or listed == value, path
            held[number] += not isinstance(listed, StatePlaceholder)
            continue
        assert (listed.shape, listed.dtype, listed.device) == (value.shape, value.dtype, value.device), path
        boxes = [((0,) * value.dim(), listed)]
        if isinstance(listed, StatePlaceholder):
            chunks = listed.__create_chunk_list__()
            boxes = [(tuple(at.offsets), listed.__get_tensor_shard__(MetadataIndex("", at.offsets))) for at in chunks]
        for offsets, part in boxes:
            rows = tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))
            assert part.device == value.device, path
            assert torch.equal(part, value[rows]), path
            held[number] += part.numel()
    dist.all_reduce(held)
    for count, (path, value) in zip(held.tolist(), theirs.items(), strict=True):
        copies = dist.get_world_size() if any(name in ".".join(map(str, path)) for name in replicated) else 1
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            assert count == copies * value.numel(), f"{count} elements of {path} are listed"
        else:
            # A step count travels with each part.
            assert count > 0, path
