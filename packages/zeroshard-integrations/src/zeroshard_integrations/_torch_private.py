"""The private names of torch that this package uses, each with its reason; see :mod:`zeroshard_comm._torch_private`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter

import torch
from torch._C import _distributed_c10d
from torch.distributed.algorithms.join import Joinable, _JoinConfig
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from zeroshard_comm._torch_private import check_names

TESTED_WITH = "2.15"
"""The newest torch with which these names were tested."""

_DDP = "torch.nn.parallel.DistributedDataParallel"
_REDUCER = "torch.distributed.Reducer"
USED: Mapping[str, str] = {
    "torch.autograd.Variable._execution_engine": "calls a function at the end of a backward, after DDP's callbacks",
    "torch._C._current_graph_task_id": "whether DDP calls a hook in a backward, or for torch's Join",
    "torch._C._will_engine_execute_node": "whether a backward adds to .grad, as torch.autograd.grad() does not",
    f"{_DDP}._comm_hooks": "whether there is a hook in Python",
    f"{_DDP}._get_ddp_logging_data": "whether there is a hook in C++, which _comm_hooks does not list",
    f"{_DDP}._has_rebuilt_buckets": "whether the next forward rebuilds buckets, which replaces the tensors in .grad",
    f"{_DDP}._check_and_sync_module_buffers": "part of the forward, which a rank without data runs",
    f"{_DDP}._check_global_requires_backward_grad_sync": "the same",
    f"{_REDUCER}._rebuild_buckets": "the same",
    f"{_REDUCER}._get_zeros_like_grad_buckets": "part of the backward, which a rank without data runs",
    f"{_REDUCER}._run_comm_hook": "the same",
    f"{_REDUCER}._push_all_rebuilt_params": "the same",
    f"{_REDUCER}._get_local_used_map": "the same",
    f"{_REDUCER}._set_forward_pass_work_handle": "sets the number of ranks by which gradients are divided",
    "torch._disable_dynamo": "keeps torch.compile out of our code; torch.compiler.disable imports the compiler",
    "torch.distributed.algorithms.join.Joinable._join_config": "whether a joinable is in a Join context",
    "torch.distributed.algorithms.join._JoinConfig": "the same; its value outside of any context",
    "torch._C._distributed_c10d._create_work_from_future": "passes the number of ranks in the form that DDP expects",
}

check_names("zeroshard_integrations", USED, TESTED_WITH)

graph_task_id = torch._C._current_graph_task_id
queue_callback = torch.autograd.Variable._execution_engine.queue_callback
will_execute = torch._C._will_engine_execute_node
buckets_of_zeros = _distributed_c10d.Reducer._get_zeros_like_grad_buckets
run_comm_hook = _distributed_c10d.Reducer._run_comm_hook
push_all_rebuilt_params = _distributed_c10d.Reducer._push_all_rebuilt_params
local_used_map = _distributed_c10d.Reducer._get_local_used_map
has_rebuilt_buckets: Callable[[DistributedDataParallel], bool] = attrgetter("_has_rebuilt_buckets")
disable_dynamo: Callable[[Callable[..., None]], Callable[..., None]] = vars(torch)["_disable_dynamo"]
JoinConfig = _JoinConfig


def mark_ignored(ddp: DistributedDataParallel) -> None:
    """Mark the parameters that DDP ignores, as torch does, because a script may only have listed their names."""
    for name, param in ddp.module.named_parameters():
        if name in ddp.parameters_to_ignore:
            vars(param)["_ddp_ignored"] = True


def has_comm_hook(ddp: DistributedDataParallel) -> bool:
    """Return True if there is a communication hook, in Python or in C++."""
    return bool(ddp._comm_hooks or ddp._get_ddp_logging_data().get("comm_hook"))


def prepare_forward(ddp: DistributedDataParallel, *, with_grad: bool) -> None:
    """Run the collectives that a forward of other ranks, with or without gradients, runs before it computes."""
    if with_grad and ddp.reducer._rebuild_buckets():
        ddp.__dict__["_has_rebuilt_buckets"] = True
    ddp._check_and_sync_module_buffers()
    if ddp.modules_buffers:
        ddp._check_global_requires_backward_grad_sync(is_joined_rank=True)


def divide_by(ddp: DistributedDataParallel, ranks: int | None) -> None:
    """Set the number of ranks by which the next backward divides gradients; None for the size of the group."""
    found: Future[list[torch.Tensor]] = Future()
    found.set_result([torch.tensor([ranks or 0], device="cpu")])
    # torch's stubs leave it out.
    work = vars(_distributed_c10d)["_create_work_from_future"](found)
    ddp.reducer._set_forward_pass_work_handle(work, ranks is None)


def join_config(joinable: Joinable) -> JoinConfig:
    """Return the config that a Join context has set in a joinable, or the config outside of any context."""
    # A joinable that does not call its base class's constructor has none before its first context.
    config: JoinConfig = getattr(joinable, "_join_config", JoinConfig.construct_disabled_join_config())
    return config


def set_join_config(joinable: Joinable, config: JoinConfig | None) -> None:
    """Set the config of a joinable in a Join context; None for a joinable outside of any context."""
    joinable._join_config = JoinConfig.construct_disabled_join_config() if config is None else config
