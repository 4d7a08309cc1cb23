"""The private names of torch that this package uses, each with its reason; see :mod:`zeroshard_comm._torch_private`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C import _distributed_c10d
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch exports it unseen
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from zeroshard_comm._torch_private import check_names

TESTED_WITH = "2.15"
"""The newest torch in which these names were tried."""

_DDP = "torch.nn.parallel.DistributedDataParallel"
_REDUCER = "torch.distributed.Reducer"
USED: Mapping[str, str] = {
    "torch.autograd.Variable._execution_engine": "what is to be done at the end of a backward, in order with DDP's",
    "torch._C._will_engine_execute_node": "whether a backward adds to .grad, or torch.autograd.grad() only reads",
    f"{_DDP}._comm_hooks": "which optimizer a model's communication hooks hand gradients to",
    f"{_DDP}._get_ddp_logging_data": "whether there is a hook in C++, which is not in that list",
    f"{_DDP}._build_params_for_reducer": "which parameters are reduced, in which order",
    f"{_DDP}._has_rebuilt_buckets": "whether the next forward rebuilds buckets, which exchanges the tensors in .grad",
    f"{_DDP}._divide_by_initial_world_size": "torch's Join sets it, and without a context nothing sets it back",
    f"{_DDP}._check_and_sync_module_buffers": "a part of a forward that a rank without data must take part in",
    f"{_DDP}._check_global_requires_backward_grad_sync": "the same",
    f"{_REDUCER}._rebuild_buckets": "the same",
    f"{_REDUCER}._get_zeros_like_grad_buckets": "a part of a backward that a rank without data must take part in",
    f"{_REDUCER}._run_comm_hook": "the same",
    f"{_REDUCER}._push_all_rebuilt_params": "the same",
    f"{_REDUCER}._get_local_used_map": "the same",
    f"{_REDUCER}._set_forward_pass_work_handle": "by how many ranks gradients are divided",
    "torch._C._distributed_c10d._create_work_from_future": "the number of ranks, in the form in which DDP takes it",
}

check_names("zeroshard_integrations", USED, TESTED_WITH)

queue_callback = torch.autograd.Variable._execution_engine.queue_callback
will_execute = torch._C._will_engine_execute_node


def comm_hooks(ddp: DistributedDataParallel) -> Sequence[tuple[Callable[..., Any], object]]:
    """Return the communication hooks in Python, each with its state; none for a model that could not be built."""
    found: Sequence[tuple[Callable[..., Any], object]] = vars(ddp).get("_comm_hooks", ())
    return found


def has_comm_hook(ddp: DistributedDataParallel) -> bool:
    """Whether there is a communication hook, in Python or in C++."""
    return bool(ddp._comm_hooks or ddp._get_ddp_logging_data().get("comm_hook"))


def params_for_reducer(ddp: DistributedDataParallel) -> Sequence[torch.Tensor]:
    """Return the parameters that are trained and not ignored, in the order in which DDP has them."""
    found: Sequence[torch.Tensor] = ddp._build_params_for_reducer()[0]
    return found


def has_rebuilt_buckets(ddp: DistributedDataParallel) -> bool:
    """Whether DDP has rebuilt its buckets, which it does once."""
    return bool(ddp._has_rebuilt_buckets)


def prepare_forward(ddp: DistributedDataParallel, *, with_grad: bool) -> None:
    """Do what the forward of the other ranks does before it computes. Collective.

    Args:
        ddp: the model.
        with_grad: whether they may make a backward of it.
    """
    if with_grad and ddp.reducer._rebuild_buckets():
        ddp.__dict__["_has_rebuilt_buckets"] = True
    ddp._check_and_sync_module_buffers()
    if ddp.modules_buffers:
        ddp._check_global_requires_backward_grad_sync(is_joined_rank=True)


def buckets_of_zeros(ddp: DistributedDataParallel) -> Sequence[GradBucket]:
    """Return DDP's buckets, set to zero.

    Raises:
        RuntimeError: if DDP does not know the shape of a sparse gradient yet.
    """
    found: Sequence[GradBucket] = ddp.reducer._get_zeros_like_grad_buckets()
    return found


def run_comm_hook(ddp: DistributedDataParallel, bucket: GradBucket) -> Future[Any]:
    """Begin to reduce a bucket as DDP does, by its communication hook if it has one. Collective."""
    return ddp.reducer._run_comm_hook(bucket)


def push_rebuilt_params(ddp: DistributedDataParallel) -> None:
    """Tell DDP, which rebuilds its buckets in the order in which gradients came, that all of them have come."""
    ddp.reducer._push_all_rebuilt_params()


def local_used_map(ddp: DistributedDataParallel) -> torch.Tensor | None:
    """Return DDP's own counts of who has used each parameter, int32, 1-D; None if it does not count."""
    found: torch.Tensor | None = ddp.reducer._get_local_used_map()
    return found


def divide_by(ddp: DistributedDataParallel, ranks: int, *, initial: bool) -> None:
    """Divide the gradients of the backward that comes next by a number of ranks.

    Args:
        ddp: the model.
        ranks: that many; without effect if ``initial``.
        initial: divide by the number of ranks in the group, whatever was said before.
    """
    found: Future[list[torch.Tensor]] = Future()
    found.set_result([torch.tensor([ranks], device="cpu")])
    # torch's stubs leave it out.
    work = vars(_distributed_c10d)["_create_work_from_future"](found)
    ddp.reducer._set_forward_pass_work_handle(work, initial)


def forget_join(ddp: DistributedDataParallel) -> None:
    """Let DDP divide by the number of ranks in the group again, as it does outside of any Join context."""
    ddp.__dict__["_divide_by_initial_world_size"] = True
