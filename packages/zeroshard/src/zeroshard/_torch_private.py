"""Lists the private names of torch that this package uses, with reasons; see :mod:`zeroshard_comm._torch_private`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from zeroshard_comm._torch_private import check_names

TESTED_WITH = "2.15"
"""The newest torch with which these names were tested."""

USED: Mapping[str, str] = {
    "torch._foreach_mul_": "one call for many gradients, where a loop costs a call for each",
    "torch._foreach_copy_": "the same",
    "torch._foreach_add_": "the same",
    "torch._foreach_norm": "the same; torch.nn.utils.get_total_norm adds up in the gradients' own precision",
    "torch._C._current_graph_task_id": "whether this thread is in a backward",
    "torch._C._current_autograd_node": "in which node of another backward one is nested; whether it is compiled",
    "torch.autograd.Variable._execution_engine": "queues callbacks for the end of a backward",
    "torch.autograd._unsafe_preserve_version_counter": "buffers are broadcast between a forward and its backward",
    "torch._C._storage_Use_Count": "whether the memory of a gradient has another user than its tensor",
    "torch.distributed._broadcast_coalesced": "sends buffers in as few broadcasts as DistributedDataParallel does",
    "torch.nn.parallel.DistributedDataParallel._active_ddp_module": "whether a model is called in one",
    "torch._disable_dynamo": "keeps torch.compile out of our code; torch.compiler.disable imports the compiler",
    "torch.Tensor._version": "whether a tensor was written to; the public function only increments it",
    "torch.Tensor._make_wrapper_subclass": "a tensor with a shape and no memory",
    "torch._C._disabled_torch_function_impl": "a tensor subclass whose results are plain tensors",
    "torch.utils._foreach_utils._get_foreach_kernels_supported_devices": "where AveragedModel averages in one call",
    "torch.ops.aten._foreach_zero_": "how an optimizer's zero_grad() reaches gradients without memory",
    "torch.ops.aten._foreach_norm": "how torch.nn.utils reaches gradients without memory",
    "torch.ops.aten._foreach_mul_": "the same",
    "torch.ops.aten._foreach_div_": "the same",
    "torch.ops.aten._foreach_clamp_min_": "the same",
    "torch.ops.aten._foreach_clamp_max_": "the same",
    "torch.ops.aten._amp_foreach_non_finite_check_and_unscale_": "how GradScaler reaches gradients without memory",
    "torch._amp_foreach_non_finite_check_and_unscale_": "what GradScaler does to gradients, for those with memory",
    "torch.ops.aten._to_copy": "how a model's conversion reaches gradients without memory",
    "torch.ops.aten._unsafe_view": "how flatten() of a tensor that is not in row-major order reaches such gradients",
    "torch.ops.aten._has_compatible_shallow_copy_type": "a conversion calls it on devices that are not torch's own",
    "torch.ops.aten._pin_memory": "how a checkpoint that is staged reaches state without memory",
    "torch.optim.Optimizer._optimizer_step_pre_hooks": "the user's hooks, called once if a step is made in parts",
    "torch.optim.Optimizer._optimizer_step_post_hooks": "the same",
    "torch.utils._python_dispatch.TorchDispatchMode": "sees the random numbers that an optimizer draws",
}

check_names("zeroshard", USED, TESTED_WITH)

F = TypeVar("F", bound=Callable[..., Any])
foreach_copy_ = torch._foreach_copy_
foreach_add_ = torch._foreach_add_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_devices: Callable[[], list[str]] = _foreach_utils._get_foreach_kernels_supported_devices
disable_dynamo: Callable[[F], F] = vars(torch)["_disable_dynamo"]
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
step_pre_hooks: Callable[[Optimizer], Mapping[int, Callable[..., Any]]] = attrgetter("_optimizer_step_pre_hooks")
step_post_hooks: Callable[[Optimizer], Mapping[int, Callable[..., Any]]] = attrgetter("_optimizer_step_post_hooks")
current_node: Callable[[], Any] = torch._C._current_autograd_node
queue_callback = torch.autograd.Variable._execution_engine.queue_callback
broadcast_coalesced: Callable[[dist.ProcessGroup, list[torch.Tensor], int, int], None] = vars(dist)[
    "_broadcast_coalesced"
]
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
without_torch_function = torch._C._disabled_torch_function_impl
ATEN_FOREACH_ZERO_ = torch.ops.aten._foreach_zero_.default
ATEN_FOREACH_NORM = torch.ops.aten._foreach_norm.Scalar
ATEN_FOREACH_MUL_ = (torch.ops.aten._foreach_mul_.Scalar, torch.ops.aten._foreach_mul_.Tensor)
ATEN_FOREACH_DIV_ = (torch.ops.aten._foreach_div_.Scalar, torch.ops.aten._foreach_div_.Tensor)
ATEN_FOREACH_CLAMP_MIN_ = torch.ops.aten._foreach_clamp_min_.Scalar
ATEN_FOREACH_CLAMP_MAX_ = torch.ops.aten._foreach_clamp_max_.Scalar
ATEN_AMP_UNSCALE_ = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
amp_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
ATEN_TO_COPY = torch.ops.aten._to_copy.default
ATEN_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
ATEN_SHALLOW_COPY = torch.ops.aten._has_compatible_shallow_copy_type.default
ATEN_PIN_MEMORY = torch.ops.aten._pin_memory.default
DispatchMode = TorchDispatchMode


def in_autograd() -> bool:
    """Return True if autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def in_compiled_backward() -> bool:
    """Return True if compiled autograd calls the current hook of a gradient: no node of the graph runs then."""
    return torch._C._current_autograd_node() is None


def keep_versions(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """Return a context in which autograd does not see writes to tensors, which it may have saved."""
    context: AbstractContextManager[None] = vars(torch.autograd)["_unsafe_preserve_version_counter"](tuple(tensors))
    return context


def storage_users(tensor: torch.Tensor) -> int:
    """Return the number of users of a tensor's storage; this function's own view of it is one."""
    found: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return found


def is_in_ddp() -> bool:
    """Return True if DistributedDataParallel is calling its model now."""
    return DistributedDataParallel._active_ddp_module is not None


def is_ignored_by_ddp(param: torch.Tensor) -> bool:
    """Return True if DistributedDataParallel was told to ignore a parameter."""
    return getattr(param, "_ddp_ignored", False)
