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
        tensor: ``param`` itself if the shard is all of it, else a separate leaf that is a view of the parameter's rows.
            With a hook that steps bucket by bucket it is a separate leaf in both cases, see
            :meth:`LocalOptimizer.detach_shards`. A master weight is a float32 copy of the rows.
    """

    shard: Shard
    param: torch.Tensor
    tensor: torch.Tensor
    is_master: bool = False

    @classmethod
    def of(cls, shard: Shard, param: torch.Tensor, *, detached: bool, master: bool = False) -> LocalShard:
        """Make the tensor of a shard: a master weight if ``master`` is True and the parameter has half precision."""
        is_master = master and param.dtype in _HALF
        if not (is_master or detached) and shard.numel == param.numel():
            return cls(shard, param, param)
        view = _view_of(shard, param)
        tensor = torch.nn.Parameter(view.float() if is_master else view, requires_grad=param.requires_grad)
        return cls(shard, param, tensor, is_master)

    @property
    def index(self) -> int:
        """The parameter's index in the plan."""
        return self.shard.tensor

    @property
    def is_cut(self) -> bool:
        """True if the shard is only a part of the parameter."""
        return self.shard.numel != self.param.numel()

    @property
    def is_detached(self) -> bool:
        """True if the local optimizer holds another tensor in place of the parameter."""
        return self.tensor is not self.param

    @property
    def local_view(self) -> torch.Tensor:
        """The part of the parameter that this rank owns, with the values that all ranks have."""
        return _view_of(self.shard, self.param)

    def unset_grad(self) -> None:
        """Remove the gradient of :attr:`tensor`, because it keeps memory. No-op if that is the parameter."""
        if self.is_detached:
            self.tensor.grad = None

    def converted(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return a gradient in the dtype and layout of :attr:`tensor`."""
        if gradient is None or not self.is_master:
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


def check_exact(param: torch.Tensor, label: str) -> None:
    """Raise a TypeError if a parameter has a special type, which the shard in its place would not have."""
    if type(param) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(
            f"{label} is a {type(param).__name__}, but an optimizer class would get a plain Parameter in its place: "
            f"use partition='whole', no master_weights, and no hook that steps bucket by bucket"
        )


def _view_of(shard: Shard, param: torch.Tensor) -> torch.Tensor:
    return param.detach() if shard.numel == param.numel() else shard.narrow(param.detach())
