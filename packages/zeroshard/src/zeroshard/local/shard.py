"""One shard of this rank, and the tensor that the local optimizer steps for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from zeroshard_core import Shard

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class LocalShard:
    """A part of a parameter, or all of it, which this rank owns.

    Attributes:
        shard: what is owned.
        param: the whole parameter.
        tensor: ``param`` itself where the shard is all of it, else a leaf of its own that views the parameter's rows.
            Once gradients come bucket by bucket, a leaf of its own in both cases, so that shards can be stepped while
            autograd and DDP still work with ``param.grad``. A master weight is a float32 copy of the rows.
        rounded: the parameter's rows, if ``tensor`` is their master weight.
    """

    shard: Shard
    param: torch.Tensor
    tensor: torch.Tensor
    rounded: torch.Tensor | None = None

    @classmethod
    def of(cls, shard: Shard, param: torch.Tensor, *, detached: bool, master: bool = False) -> LocalShard:
        """Make the tensor of a shard; ``master`` says whether to make a master weight where one is needed."""
        if master and param.dtype in _HALF:
            rows = rows_of(shard, param)
            return cls(shard, param, torch.nn.Parameter(rows.float(), requires_grad=param.requires_grad), rows)
        if shard.numel == param.numel() and not detached:
            return cls(shard, param, param)
        return cls(shard, param, torch.nn.Parameter(rows_of(shard, param), requires_grad=param.requires_grad))

    @property
    def index(self) -> int:
        """Of the parameter in the plan."""
        return self.shard.tensor

    @property
    def is_cut(self) -> bool:
        """Whether the shard is only a part of the parameter."""
        return self.shard.numel != self.param.numel()

    @property
    def is_detached(self) -> bool:
        """Whether the local optimizer holds a tensor of its own in place of the parameter."""
        return self.tensor is not self.param

    @property
    def rows(self) -> torch.Tensor:
        """The values that all ranks have of it: rows of the parameter, or all of it."""
        return (self.tensor if self.rounded is None else self.rounded).detach()

    def converted(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return a gradient in the dtype of :attr:`tensor`, and laid out as that is."""
        if gradient is None or self.rounded is None:
            return gradient
        if gradient.layout is torch.strided and gradient.stride() != self.tensor.stride():
            return torch.empty_like(self.tensor).copy_(gradient)
        return gradient.to(self.tensor.dtype)


def gradient_of(shard: LocalShard) -> torch.Tensor | None:
    """Return a shard's part of its parameter's gradient."""
    grad = shard.param.grad
    if grad is None or not shard.is_cut:
        return None if grad is None else grad.detach()
    if grad.stride() != shard.param.stride():
        grad = torch.empty_like(shard.param, dtype=grad.dtype, device=grad.device).copy_(grad)
    return shard.shard.narrow(grad.detach())


def rows_of(shard: Shard, param: torch.Tensor) -> torch.Tensor:
    """The view of a detached shard: the parameter itself, or some rows of it."""
    return param.detach() if shard.numel == param.numel() else shard.narrow(param.detach())
