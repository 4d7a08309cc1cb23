"""Buckets of DistributedDataParallel on a rank that makes no backward: of zeros, or of what it has accumulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch exports it unseen
from zeroshard_core import is_dense


def fill(bucket: GradBucket, share: int, reduced: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Put what parameters have in ``.grad`` into a bucket of zeros.

    Args:
        bucket: of zeros.
        share: by which it is divided.
        reduced: by parameter, what is left out of it.
    """
    if bucket.buffer().layout is not torch.strided:
        param = bucket.parameters()[0]
        if param.grad is not None:
            before = reduced.get(param)
            bucket.set_buffer((param.grad if before is None else param.grad - before) / share)
        return
    for param, place in _places(bucket):
        if param.grad is not None:
            before = reduced.get(param)
            torch.div(param.grad if before is None else param.grad - before, share, out=place)


def keep(bucket: GradBucket, reduced: torch.Tensor) -> None:
    """Make what has been reduced this rank's gradients.

    Args:
        bucket: whose memory they get.
        reduced: as long as the bucket, or sparse as its only gradient.
    """
    if reduced.layout is not torch.strided:
        bucket.parameters()[0].grad = reduced.clone()
        return
    if reduced.data_ptr() != bucket.buffer().data_ptr():
        bucket.buffer().copy_(reduced.view(-1))
    for param, place in _places(bucket):
        param.grad = place


def _places(bucket: GradBucket) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The parameters of a bucket and their gradients' places in it, laid out by the strides of their parameters."""
    buffer = bucket.buffer()
    for param, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
        stride = param.stride() if is_dense(param) else view.stride()
        yield param, buffer.as_strided(param.shape, stride, int(view.storage_offset()))
