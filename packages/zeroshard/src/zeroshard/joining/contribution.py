"""What a rank that has run out of data puts into a bucket: nothing, or what it had accumulated."""

from __future__ import annotations

from dataclasses import replace

from zeroshard.overlap.accumulation import GradAccumulator
from zeroshard.overlap.bucket import Bucket, gradient_view
from zeroshard.overlap.placeholder import GradPlaceholder


def contribute(bucket: Bucket, gradients: GradAccumulator) -> Bucket:
    """Write into a bucket of zeros what this rank has accumulated and not reduced, and regard it as handed over.

    As a backward would whose own gradients are zero: values of backwards under ``no_sync()`` are added up by the
    reduction, and what was reduced before and not stepped yet is carried over by its owner.

    Args:
        bucket: as a framework hands it over on a rank without a backward.
        gradients: of the optimizer that takes it next.

    Returns:
        The bucket, with ``present`` and ``is_shadow`` set.
    """
    present: list[bool] = []
    for param, place in zip(bucket.params, bucket.gradients, strict=True):
        grad = param.grad
        values = grad
        if isinstance(grad, GradPlaceholder):
            if not gradients.is_used(grad._tensor):
                gradients.carry(grad._tensor)
                gradients.deliver(grad._tensor)
            values, grad._local = grad._local, None
        if values is not None:
            offset = int(place.storage_offset()) - int(bucket.buffer.storage_offset())
            gradient_view(bucket.buffer, offset, param.shape, param.stride()).copy_(values)
        present.append(values is not None)
        # A parameter that the optimizer does not have is refused by who takes the bucket.
        placeholder = gradients.placeholder_of(param)
        if placeholder is not None:
            param.grad = placeholder
    return replace(bucket, present=tuple(present), is_shadow=True)
