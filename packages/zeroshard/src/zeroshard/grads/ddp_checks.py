"""Refuses gradients and parameters of DistributedDataParallel that cannot be sent to their owners in a bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from zeroshard_core import Plan

from zeroshard._torch_private import is_ignored_by_ddp
from zeroshard.debug.checks import digest_of
from zeroshard.grads.bucket import Bucket, gradient_view
from zeroshard.grads.placeholder import GradPlaceholder
from zeroshard.plan.layout import Layout, label_in


def settings_of_ignored(params: Sequence[torch.Tensor], layout: Layout, first: int = 0) -> dict[str, int]:
    """Return checksums of the trainable parameters from ``first`` on that DistributedDataParallel ignores.

    They must be equal on all ranks, because all ranks get the owner's values of such a parameter in a step.
    """
    return {
        f"with a communication hook, the checksum of {label_in(layout.plan, index)}, which DistributedDataParallel "
        f"ignores (experts, one per rank, need an optimizer of their own),": digest_of(params[index])
        for index in range(first, len(params))
        if params[index].requires_grad and is_ignored_by_ddp(params[index])
    }


def index_of_param(bucket: Bucket, place: int, index_of: Mapping[torch.Tensor, int], plan: Plan) -> int:
    """Return the tensor index of a parameter. Raises ValueError if it is unknown, or its gradients cannot be sent."""
    param = bucket.params[place]
    index = index_of.get(param)
    if index is None:
        raise ValueError(
            f"DistributedDataParallel reduces a parameter of shape {tuple(param.shape)} that the optimizer does not "
            f"have: build it with all trainable parameters, or freeze others before DistributedDataParallel is built"
        )
    if refusal := _refusal(bucket, place):
        raise ValueError(f"{label_in(plan, index)} {refusal}; or train without a communication hook")
    return index


def _refusal(bucket: Bucket, place: int) -> str:
    """Return why a gradient cannot be sent to its owners, and what to do; empty if it can."""
    param = bucket.params[place]
    if bucket.buffer.layout is not torch.strided:
        return "has sparse gradients, which cannot be sent to their owners in a bucket: use sparse=False"
    if param.is_complex():
        return "is complex, and DistributedDataParallel reduces its gradients as real numbers: use real parameters"
    if bucket.gradients[place].dtype != param.dtype:
        return f"is {param.dtype}, and mixed precision of DistributedDataParallel cannot be combined with the hooks"
    if bucket.present[place] and not _has_order(bucket, place):
        return "has changed its memory format since DistributedDataParallel was built: convert the model before that"
    return ""


def _has_order(bucket: Bucket, place: int) -> bool:
    """Return True if a gradient is laid out in its bucket like its parameter. May read the whole gradient."""
    param, view = bucket.params[place], bucket.gradients[place]
    grad = param.grad
    if param.dim() < 2 or grad is None or type(grad) is GradPlaceholder:
        return True
    if grad.data_ptr() == view.data_ptr() and grad.stride() == param.stride():
        # The gradient is a view of the bucket.
        return True
    offset = int(view.storage_offset()) - int(bucket.buffer.storage_offset())
    view = gradient_view(bucket.buffer, offset, param.shape, param.stride())
    return bool(((view == grad) | (grad != grad)).all())
